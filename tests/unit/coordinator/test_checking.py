"""`run check`: mistakes with their lines, all at once; what a run costs; one name, one run. `health`. Mostly without torch."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from coordinator import __main__ as command
from coordinator.commands import checking, planning
from coordinator.commands.checking import checked, cost_of, curve, findings_of, rows_of
from coordinator.commands.forks import changes_of, forked
from coordinator.commands.planning import NOT_INSTALLED, text_of
from node.commands.model_layout import TookTooLongError, limited
from node.model.dry_run import dry_run
from node.model.spec import ModelSpec
from protos.errors import NetworkError, OperatorError, Refusal
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, DataConfig, RunConfig, TrustConfig
from protos.run_sections import LayoutFacts
from tests.unit.coordinator.serving import operated, served
from tests.unit.coordinator.test_service import WAITS

WRONG = """name = "bad"
[model.config]
model_type = "llama"
hidden_size = 100
num_attention_heads = 8
max_position_embeddings = 64
[data]
context = 128
[clock]
steps = 5
[optimizer]
warmup_steps = 10
[admission]
mode = "allow_list"
"""


def mistakes(file: Path) -> list[str]:
    """What `checked` says of a file that it refuses, a line for each mistake."""
    with pytest.raises(OperatorError) as told:
        checked(file)
    return str(told.value).splitlines()


def places(file: Path, lines: list[str]) -> list[str]:
    """The lines of the file that these mistakes are in."""
    return [line.removeprefix(f"{file}:").split(":")[0] for line in lines]


@pytest.mark.usefixtures("in_this_process")
def test_all_mistakes_are_told_at_once_each_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(WRONG)
    lines = mistakes(file)
    assert places(file, lines) == ["4", "6", "12", "13"]
    assert "take 96 or 104" in lines[0]
    assert "raise it to 128" in lines[1]
    assert "not shorter than the run of 5" in lines[2]
    assert "nobody can join" in lines[3]


def test_settings_that_another_one_leaves_without_effect_are_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[optimizer]\ntop_k = 64\nclip_norm = 0.5\ndecay_steps = 9\n[optimizer.base]\nname = 'adamw'\nmomentum = 0.9\n"
        "[optimizer.local]\nlr = 0.1\n[evaluation]\nsamples = 8\n"
    )
    lines = mistakes(file)
    assert places(file, lines) == ["2", "3", "4", "7", "9", "11"]
    assert 'optimizer.top_k: it has no effect with optimizer.selection = "groups": remove it, or set' in lines[0]
    file.write_text("[optimizer]\nrecipe = 'diloco-demo'\nselection = 'full'\nlocal = { optimizer = 'muon' }\n")
    assert checked(file).optimizer.top_k == 640, "the recipe's own settings are nobody's mistake"
    with pytest.raises(OperatorError, match="top_k: it has no effect"):
        forked(RunConfig(), changes_of(["optimizer.top_k=64"]))


OWN = """[data]
source = "own"
sha256 = "HASH"
[trust]
enabled = true
[clock]
min_peers = 3
[evaluation]
every = 25
"""


def test_what_a_run_of_own_text_cannot_have_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OWN.replace("HASH", "0" * 64))
    lines = mistakes(file)
    assert places(file, lines) == ["3", "5", "9"]
    assert all('does not work with `source = "own"`' in line for line in lines)
    clock, trust = ClockConfig(min_peers=3), TrustConfig(enabled=True)
    with pytest.raises(Refusal, match="which no other peer has"):  # also past the command, at the coordinator's door
        RunConfig(data=DataConfig(source="own"), clock=clock, trust=trust).check_new()
    file.write_text('[[data.mix]]\nname = "a"\nsource = "own"\nweight = 1\n')
    with pytest.raises(OperatorError, match=r"data\.mix.* give it alone"):
        checked(file)


def test_the_check_of_a_run_of_own_text_says_that_nobody_can_check_votes(tmp_path: Path) -> None:
    for mode, said in (("open", True), ("invite", False)):
        config = RunConfig.model_validate({"data": {"source": "own"}, "admission": {"mode": mode}})
        note = checking._own_text(config)
        assert "Nobody can check a peer's votes" in note
        assert ("admission.mode invite" in note) is said
        assert checking.texts_of(config) == []


LAYERS = """[model.config]
model_type = "lama"
[trust]
enabled = true
[clock]
steps = "many"
stepz = 10
[overlay]
bootstrap = ["/ip4/999.1.1.1/tcp/1/p2p/12D3KooWAAAA"]
"""


def refusal(file: Path, *flags: str) -> list[str]:
    """The lines of what `run check` says of a file that it refuses."""
    done = CliRunner().invoke(command.app, ["run", "check", str(file), *flags])
    assert isinstance(done.exception, OperatorError), done.output
    return str(done.exception).splitlines()


@pytest.mark.usefixtures("in_this_process")
def test_mistakes_of_types_and_rules_are_told_at_once_and_those_of_the_model_after_them(tmp_path: Path) -> None:
    """The types are of pydantic, the rules are the coordinator's. transformers alone knows models, and loads slowly."""
    file = tmp_path / "run.toml"
    file.write_text(LAYERS)
    lines = refusal(file)
    assert places(file, lines) == ["4", "6", "7", "9"]
    assert "needs clock.min_peers of at least 3, not 1" in lines[0]
    assert "given: 'many'" in lines[1]
    assert "is not a known setting of this version: did you mean clock.steps? Correct it" in lines[2]
    assert "its host is no IP address" in lines[3]
    assert "for example '/ip4/" in lines[3]
    file.write_text("\n".join(LAYERS.splitlines()[:2]))
    [line] = refusal(file)
    assert line.startswith(f"{file}:2: model.config.model_type = 'lama'")
    assert "near it: llama" in line


def test_a_mistake_of_the_text_is_told_without_a_process_that_loads_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning.subprocess, "Popen", None)  # any use raises TypeError
    file = tmp_path / "run.toml"
    for text, near in (
        ("[clock]\nstepz = 10\n", "clock.steps"),
        ("steps = 10\n", "clock.steps"),
        ("[clok]\nsteps = 10\n", "clock"),
        ("[optimizer]\nbatch_samples = 3\n", "clock.batch_samples"),
    ):
        file.write_text(text)
        [line] = refusal(file)
        assert f"did you mean {near}? Correct it, remove it" in line


BIG = '[model.config]\nmodel_type = "llama"\nhidden_size = 1048576\nnum_hidden_layers = 1000\n'


@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_no_snapshot_holds_is_counted_before_it_is_built(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(BIG)
    with pytest.raises(OperatorError, match=r"run.toml:3: model.config.hidden_size: .* 2e\+15 parameters"):
        checked(file)


KEYS = """[model.config]
model_type = "gpt2"
n_layer = 2
n_head = 2
n_embd = 64
n_layers = 12

label_smoothing = 0.1
"""


@pytest.mark.usefixtures("in_this_process")
def test_keys_that_the_model_type_does_not_know_are_mistakes_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(KEYS)
    lines = refusal(file)
    assert places(file, lines) == ["6", "8"]
    assert "near it: n_layer" in lines[0]
    file.write_text(KEYS.partition("n_layers")[0])
    done = CliRunner().invoke(command.app, ["run", "check", str(file)])
    assert done.exit_code == 0, done.output
    assert "Run swarm: no mistakes found." in done.output


FAULTY = """[model]
factory = "tests.unit.model.faulty:make"
kwargs = {{ name = "{name}", kind = "{kind}" }}
"""


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("LookingAhead", "mean", "an earlier position sees a later token"),
        ("Remembering", "tracking", "BatchNorm1d 'norm' changes its buffer"),
        ("Kept", "expanded", "its export cannot be loaded again.*give each buffer memory of its own"),
        ("Kept", "word", "its export fails.*'_extra_state' in its state is a str"),
        ("Kept", "unsaved", "its export is another model"),
    ],
)
def test_a_run_whose_model_is_worthless_or_cannot_be_exported_is_refused(
    name: str, kind: str, says: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The first in a process of its own, as a run's are; tests/unit/model/test_dry_run.py has all kinds."""
    if name != "LookingAhead":
        request.getfixturevalue("in_this_process")
    file = tmp_path / "run.toml"
    file.write_text(FAULTY.format(name=name, kind=kind))
    [line] = refusal(file, "--allow-code")
    assert re.match(rf"{file}:2: model.factory = .*{says}", line), line


class Slow(torch.nn.Module):
    """A pass takes longer than a dry run may."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not ids.is_meta and not self.table.weight.is_meta:
            while True:
                pass
        return self.table(ids)


def test_a_model_that_was_not_run_is_never_called_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[clock]\nsteps = 5\n")
    untried = LayoutFacts("00" * 32, 1000, 100, 2_000, untried="a dry run took too long", notes=("a note",))
    for answer, says, code in (
        ((untried, ""), "Run swarm: not checked: a dry run took too long. No mistakes were found in the rest.", 1),
        ((None, "counting took too long"), "Run swarm: not checked: counting took too long.", 1),
        ((None, NOT_INSTALLED), f"no mistakes found in its text. Its model is not checked here: {NOT_INSTALLED}.", 0),
    ):
        monkeypatch.setattr(checking, "layout_of_run", lambda file, answer=answer, **flags: answer)
        done = CliRunner().invoke(command.app, ["run", "check", str(file)])
        assert (done.exit_code, says in done.output) == (code, True), done.output
        findings = findings_of(file, anchor=False)
        if code:
            with pytest.raises(OperatorError, match=r"it is not checked.*--no-layout"):
                findings.refuse_unchecked()
        else:
            findings.refuse_unchecked()


def test_the_limit_of_computing_ends_a_pass_that_does_not_end() -> None:
    def forever() -> None:
        dry_run(ModelSpec(factory=f"{__name__}:Slow"), 256, 32)

    with pytest.raises(TookTooLongError, match=r"a dry run took more than 0.2 s"), limited("a dry run", 0.2):
        forever()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[data]\ntokenizer = "/no/such/folder"\n', "run.toml:2: data.tokenizer: there is no /no/such/folder"),
        ('[data]\ntokenizer = "./tok"\n', "run.toml:2: data.tokenizer: './tok' is another place on each peer"),
        ('[data]\nsource = "~/text"\n', "run.toml:2: data.source: '~/text' is another place on each peer"),
        ("[data]\ncontext = 512\n", "run.toml:1: model.config.max_position_embeddings = 256: samples have 512 tokens"),
        ('[model.config]\nmodel_type = "llama"\nvocab_size = 10\n', "run.toml:3: model.config.vocab_size"),
        ('[data]\ncontext = 2048\n[model.config]\nmodel_type = "gpt2"\n', "samples have 2048 tokens"),
    ],
)
def test_runs_in_which_every_donor_would_fail_are_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    done = CliRunner().invoke(command.app, ["run", "check", str(file)])
    assert isinstance(done.exception, OperatorError), done.output
    assert says in str(done.exception)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("hidden_size = 64", "model_type is missing"),
        ('model_type = "gpt2"\nn_embd = 64\nn_head = 3', "not a multiple of 3 heads"),
        ('model_type = "llama"\nnum_attention_heads = 0', "expected a positive number"),
    ],
)
def test_models_that_cannot_be(config: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[model.config]\n{config}\n")
    with pytest.raises(OperatorError, match=says):
        checked(file)


@pytest.mark.usefixtures("in_this_process")
def test_a_short_run_with_the_default_warm_up_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[clock]\nsteps = 5\n")
    assert checked(file).clock.steps == 5


def test_costs_are_of_one_peer() -> None:
    config = RunConfig(name="x", clock=ClockConfig(steps=100))
    facts = LayoutFacts("", 1000, 100, 2_000, state_bytes=10_000, sample_bytes=100, disk_bytes=5_000,
                        snapshot_bytes=5_000_000, least_state_bytes=6_000, least_sample_bytes=10,
                        host_card_bytes=2_500, host_main_bytes=7_000, stream_card_bytes=900)  # fmt: skip
    cost = cost_of(config, facts, 5, 2.0)
    assert cost.up_bytes_hour == cost.down_bytes_hour == 4 * 2_000 * 1_800
    assert cost.memory_bytes == 10_800
    assert cost.run_seconds == 200
    assert cost.least_memory_bytes == 6_010
    assert cost.exchange_seconds == {"5": 0.013, "20": 0.003, "100": 0.001}
    assert cost.join_seconds == {"20": 2.0, "100": 0.4, "1000": 0.0}
    shown = dict(rows_of(config, facts, cost))
    assert shown["while all uplinks have room"] == "up to 10 kB a payload, and 5 times the traffic (vote_size)"
    assert shown["or with memory = host"] == "2.5 kB of a GPU, 7.0 kB of main memory"
    assert shown["or with memory = stream"] == "900 B of a GPU, 7.0 kB of main memory"
    whole = replace(facts, stream_card_bytes=None)
    assert "or with memory = stream" not in dict(rows_of(config, whole, cost)), "its blocks cannot come and go"
    assert shown["a step's votes at 5, 20, 100 Mbit/s up"] == "0.013 s, 0.003 s, 0.001 s"
    assert shown["to join at 20, 100, 1000 Mbit/s down"] == "2 s, 0.4 s, 0 s"


def test_the_curve_rises_to_the_peak_and_falls_to_the_end() -> None:
    config = RunConfig(
        name="x", clock=ClockConfig(steps=100), optimizer=OptimizerConfig(warmup_steps=50, lr_final_ratio=0.0)
    )
    drawn = curve(config, 11)
    assert (drawn[0], max(drawn), drawn[-1]) == ("▁", "█", "▁")
    assert list(drawn[:6]) == sorted(drawn[:6])


def test_check_needs_no_coordinator_and_prints_costs_for_programs(tmp_path: Path) -> None:
    """The model is built on the meta device by the node package, in a process of its own."""
    file = tmp_path / "run.toml"
    file.write_text('name = "small"\n[data]\nsource = "/some/text"\n')
    done = CliRunner().invoke(command.app, ["run", "check", str(file), "--json", "--peers", "3"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert values["layout"]["parameters"] == 885_888
    assert values["cost"]["up_bytes_hour"] == 2 * values["layout"]["payload_bytes"] * 360
    assert values["cost"]["memory_bytes"] > values["cost"]["least_memory_bytes"] > 4 * 885_888
    assert values["layout"]["least_state_bytes"] < 0.6 * values["layout"]["state_bytes"]
    assert 2 * 885_888 < values["layout"]["host_card_bytes"] < values["cost"]["least_memory_bytes"]
    assert 885_888 < values["layout"]["stream_card_bytes"] < values["layout"]["host_card_bytes"]
    assert 6 * 885_888 < values["layout"]["host_main_bytes"] < 12 * 885_888
    assert any("--data" in note for note in values["notes"])


async def test_a_second_run_of_one_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'name = "{WAITS.name}"\n')
    async with served(tmp_path, WAITS) as here:
        with operated(here, "run") as run, pytest.raises(OperatorError, match=f"has a run '{WAITS.name}' already"):
            await run("create", str(file), "--no-layout")
        assert len(here.hub.runs) == 1


async def test_health_asks_over_tls(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here:
        with operated(here, "health") as ask:
            [told] = await ask("--live")
        assert told == {"address": f"127.0.0.1:{here.port}", "acts": True}
    with operated(here, "health") as ask, pytest.raises(NetworkError, match="does not answer"):
        await ask("--live")


def test_the_curve_of_a_rate_that_stays_and_then_decays() -> None:
    optimizer = OptimizerConfig(warmup_steps=10, lr_final_ratio=0.0, schedule="wsd")
    assert curve(RunConfig(name="x", clock=ClockConfig(steps=100), optimizer=optimizer), 11) == "▂████████▃▁"


@pytest.mark.usefixtures("in_this_process")
def test_a_decay_that_is_longer_than_its_run_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[optimizer]\nschedule = "wsd"\nwarmup_steps = 60\ndecay_steps = 50\n[clock]\nsteps = 100\n')
    with pytest.raises(
        OperatorError, match=r"run.toml:4: optimizer.decay_steps: a decay of 50 steps and a warm-up of 60"
    ):
        checked(file)
    file.write_text(file.read_text().replace("60", "50"))
    assert checked(file).optimizer.decay_steps == 50


@pytest.mark.usefixtures("in_this_process")
def test_what_peers_would_leave_out_of_a_text_is_told(tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "run.toml"
    text.mkdir()
    (text / "a.txt").write_text("some text")
    (text / "b.txt").write_bytes(b"caf\xe9")
    file.write_text(f'name = "tiny"\n[data]\nsource = "{text}"\n')
    done = CliRunner().invoke(command.app, ["run", "check", str(file), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    [found] = told["texts"]
    assert (found["place"], found["left_out"]["not_utf8"]["count"]) == (str(text), 1)
    assert any("left out: 1 not UTF-8" in note for note in told["notes"])
    assert any("needs --allow-left-out" in note for note in told["notes"])
    (text / "a.txt").unlink()
    [line] = text_of(str(text)).lines
    assert "no UTF-8 text file below" in line
