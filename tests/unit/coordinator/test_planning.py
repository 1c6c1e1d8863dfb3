"""What `run create` settles, and what it says about it; and the files for models that people ask for: each is a run."""

import ipaddress
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import __main__ as command
from coordinator.commands import planning
from coordinator.commands.checking import checked
from coordinator.commands.planning import (
    AGGREGATORS,
    MODELS,
    RANGED_VOTES,
    RANGES,
    adds_up,
    layout_of_run,
    measured_of,
    planned,
    room_for_votes,
    run_toml,
    tokens_a_second,
    votes_needed,
    with_rate,
)
from node.commands.model_layout import layout_of
from node.model.spec import ModelSpec, build
from node.training.replica import Replica
from protos.address import block_of
from protos.errors import OperatorError
from protos.identity import peer_id
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, DataConfig, RunConfig, TrustConfig, config_from_json
from protos.run_sections import AdmissionConfig
from tests.unit.coordinator.driver import key
from tests.unit.coordinator.serving import operated, served
from tests.unit.coordinator.test_service import WAITS

THREE = ClockConfig(min_peers=3)
NAMED = TrustConfig(anchors=[peer_id(key(7))])


def test_measured_constants_count_where_a_file_has_them_and_are_named() -> None:
    assert measured_of(RunConfig(trust=TrustConfig(enabled=True))) == ""
    changed = RunConfig(trust=TrustConfig(exclude_at=3.0), clock=ClockConfig(quorum=0.75))
    assert measured_of(changed).startswith("clock.quorum, trust.exclude_at: measured; ")


@pytest.mark.parametrize(("config", "votes", "anchor", "enabled", "says"), [
    (RunConfig(clock=THREE), 7000, True, True, "because the run is open and has an anchor"),
    (RunConfig(clock=THREE), None, True, True, "because the run is open and has an anchor"),
    (RunConfig(clock=THREE, trust=NAMED), 7000, False, True, "because the run is open and has an anchor"),
    (RunConfig(clock=THREE), 7000, False, False, "has no anchor"),
    (RunConfig(), 7000, True, False, "min_peers of at least 3, and it is 1"),
    (RunConfig(clock=THREE), 20, True, False, "a payload has 20 votes, and they need 288"),
    (RunConfig(clock=THREE, optimizer=OptimizerConfig(overlap=True)), 7000, True, False, "overlap"),
    (RunConfig(clock=THREE, data=DataConfig(source="own")), 7000, True, False, "each peer's own text stays with it"),
    (RunConfig(clock=THREE, trust=TrustConfig(enabled=False)), 7000, True, False, ""),
    (RunConfig(clock=THREE, admission=AdmissionConfig(mode="invite")), 7000, True, False, ""),
])  # fmt: skip
def test_checks_are_on_for_an_open_run_with_an_anchor_where_they_can_judge(
    config: RunConfig, votes: int | None, anchor: bool, enabled: bool, says: str
) -> None:
    made, said = planned(config, votes, anchor=anchor)
    assert made.trust.enabled is enabled
    assert made.trust.anchored is anchor
    assert (says in said) if says else not said
    made.check_new()


@pytest.mark.parametrize(
    ("mode", "anchor", "votes", "clock", "ranges"),
    [
        ("invite", False, RANGED_VOTES, {}, RANGES),
        ("invite", False, RANGED_VOTES - 1, {}, 1),
        ("invite", False, None, {}, 1),
        ("invite", False, RANGED_VOTES, {"ranges": 1}, 1),
        ("invite", False, RANGED_VOTES, {"aggregators": 3, "ranges": 4}, 4),
        ("invite", False, RANGED_VOTES, {"aggregators": 0}, 1),
        ("invite", True, RANGED_VOTES, {}, 1),
        ("open", False, RANGED_VOTES, {}, 1),
    ],
)
def test_a_large_model_without_an_anchor_is_added_up_in_ranges(
    mode: Any, anchor: bool, votes: int | None, clock: dict[str, int], ranges: int
) -> None:
    config = RunConfig(
        optimizer=OptimizerConfig(selection="random"),
        admission=AdmissionConfig(mode=mode),
        clock=ClockConfig.model_validate({"min_peers": 3, **clock}),
    )
    made, said = planned(config, votes, anchor=anchor)
    assert made.clock.ranges == ranges
    assert ("8 ranges" in said) is (ranges == RANGES)


def test_a_run_of_one_range_is_one_of_earlier_versions() -> None:
    """Its definition, and so its id, is the same as without the setting."""
    one = RunConfig(clock=ClockConfig(aggregators=3, ranges=1), optimizer=OptimizerConfig(selection="random"))
    assert "ranges" not in one.canonical_json()
    several = one.model_copy(update={"clock": one.clock.model_copy(update={"ranges": 4})})
    assert config_from_json(several.canonical_json()).clock.ranges == 4
    with pytest.raises(ValueError, match="divides what aggregators add up"):
        RunConfig(clock=ClockConfig(ranges=4))


@pytest.mark.parametrize(
    ("mode", "anchor", "adds"), [("open", True, True), ("open", False, False), ("invite", False, True)]
)
def test_shared_signs_are_added_up_where_identities_are_not_free(mode: Any, anchor: bool, adds: bool) -> None:
    config = RunConfig(clock=THREE, optimizer=OptimizerConfig(selection="random"), admission=AdmissionConfig(mode=mode))
    made, said = planned(config, 7000, anchor=anchor)
    assert (made.clock.aggregators, adds_up(made)) == (AGGREGATORS, adds)
    assert ("only with an anchor" in said) is not adds
    none = RunConfig(clock=ClockConfig(min_peers=3, aggregators=0), optimizer=OptimizerConfig(selection="random"))
    assert planned(none, 7000, anchor=anchor)[0].clock.aggregators == 0, "as run.toml says"
    assert planned(RunConfig(clock=THREE), 7000, anchor=anchor)[0].clock.aggregators == 0, "groups do not add up"


def test_larger_shares_need_more_votes() -> None:
    small, large = RunConfig(clock=THREE), RunConfig(clock=ClockConfig(min_peers=3, batch_samples=3 * 512))
    assert votes_needed(large) == pytest.approx(votes_needed(small) * 512 / 32, rel=0.01)


def test_the_layout_that_a_run_fixes_is_the_one_that_its_peers_have() -> None:
    config = RunConfig()
    facts = layout_of(config)
    replica = Replica(bytes(32), build(ModelSpec(), 0), config.optimizer, config.optimizer.vote_size)
    assert facts.layout_digest == replica.layout_digest.hex()
    assert facts.parameters == replica.demo.layout.parameters
    assert facts.votes == replica.demo.layout.chunks * 4096 // config.optimizer.vote_size


def test_a_person_who_waits_longer_than_a_moment_is_told_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "PATIENCE_SECONDS", 0.0)
    program = 'print(\'{"unknown": "no reason"}\')'
    monkeypatch.setattr(planning, "python_command", lambda *_: [sys.executable, "-I", "-S", "-c", program])
    told = list[str]()
    assert layout_of_run(tmp_path / "run.toml", told=told.append) == (None, "no reason")
    assert told == ["building the model to count it, and running a small copy of it ..."]


@pytest.mark.parametrize(("address", "block"), [
    ("203.0.114.77", "203.0.114.0/24"), ("2a01:4f8:1:2::3", "2a01:4f8:1::/48"), ("127.0.0.1", ""), ("192.168.7.7", ""),
    ("10.9.8.7", ""), ("::1", ""), ("fd00::1", ""), ("100.64.3.3", ""),
])  # fmt: skip
def test_public_addresses_are_in_blocks_and_private_ones_in_none(address: str, block: str) -> None:
    assert block_of(ipaddress.ip_address(address)) == block


LOGS = """'[Errno -2] Name or service not known' thrown while requesting HEAD https://huggingface.co/gpt2
Retrying in 1s [Retry 1/5].
"""


@pytest.mark.parametrize(
    ("err", "says"),
    [
        ("error: model.config: no\nmodel.config.b: no\n", "model.config: no\nmodel.config.b: no"),
        (f"{LOGS}error: data.tokenizer = 'gpt2': no\n", "data.tokenizer = 'gpt2': no"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'x'\n", "model: it cannot be built: KeyError: 'x'"),
        ("", "model: it cannot be built: its process ended with -9"),
    ],
)
def test_log_lines_and_tracebacks_of_the_process_reach_no_person(err: str, says: str) -> None:
    assert planning._said(err, -9) == says


async def test_a_run_without_a_file_has_all_defaults_and_the_example_is_one(tmp_path: Path) -> None:
    printed = CliRunner().invoke(command.app, ["run", "example"])
    assert printed.exit_code == 0
    file = tmp_path / "run.toml"
    file.write_text(printed.stdout)
    async with served(tmp_path, WAITS.model_copy(update={"name": "waits"})) as here:
        with operated(here, "run") as run:
            [plain] = await run("create", "--no-layout")
        made = here.hub.runs[bytes.fromhex(plain["run"])].run.config
    assert made == checked(file) == RunConfig()


@pytest.mark.parametrize(
    ("payload_bytes", "clock", "says"),
    [
        (7_000, ClockConfig(), ""),
        (7_800_000, ClockConfig(max_peers=30), ""),
        (7_800_000, ClockConfig(), "votes of up to 75 steps: 7.8 MB of each peer and step, 150 GB with 256 peers"),
        (7_800_000, ClockConfig(), "enough for 34 peers: .* clock.snapshot_every to 3, clock.max_peers to 34,"),
        (250_000_000, ClockConfig(snapshot_every=100), "enough for 0 peers"),
    ],
)
def test_a_run_whose_votes_its_peers_cannot_keep_is_told_so(payload_bytes: int, clock: ClockConfig, says: str) -> None:
    """At 1 B parameters and 4 GiB a joiner of a run with 32 peers could never catch up."""
    said = room_for_votes(RunConfig(clock=clock), payload_bytes)
    assert re.search(says, said) if says else not said


@pytest.mark.parametrize(
    ("optimizer", "parameters", "lr", "says"),
    [
        ({}, 885_888, 4e-3, ""),
        ({}, 5_851_776, 1.9e-3, "optimizer.lr = 0.0019: the default for 5.9 M parameters and 1,024 tokens a step"),
        ({}, 124_000_000, 5.6e-4, "0.00056"),
        ({}, 1_240_000_000, 2.2e-4, "0.00022"),
        ({}, None, 4e-3, "the size of this model is not known here"),
        ({"lr": 4e-3}, 124_000_000, 4e-3, ""),
        ({"base": {"name": "muon", "block": 0}}, 124_000_000, 5.6e-4, "0.00056"),
        ({"base": {"name": "sign"}}, 124_000_000, 2e-3, ""),
        ({"method": "paper"}, 124_000_000, 2e-3, ""),
        ({"recipe": "sparseloco"}, 124_000_000, 1.0, ""),
    ],
)
def test_the_default_rate_follows_the_size_of_the_model(
    optimizer: dict[str, Any], parameters: int | None, lr: float, says: str
) -> None:
    """Those of GPT-3's table (125 M: 6e-4, 1.3 B: 2e-4), where nobody set one; a run that was made keeps its own."""
    made, said = with_rate(RunConfig.model_validate({"optimizer": optimizer, "data": {"context": 16}}), parameters)
    assert made.optimizer.lr == lr
    assert says in said if says else not said
    again = config_from_json(made.model_dump_json())
    assert with_rate(again, 8_000_000_000) == (again, "")


@pytest.mark.parametrize(("samples", "lr"), [(1, 1.1e-3), (8, 1.1e-3), (64, 1.6e-3), (128, 1.9e-3), (100_000, 1.9e-3)])
def test_the_default_rate_rises_with_the_tokens_of_a_step_as_far_as_was_measured(samples: int, lr: float) -> None:
    made, _ = with_rate(RunConfig.model_validate({"clock": {"batch_samples": samples}}), 23_993_856)
    assert made.optimizer.lr == lr


PARAMETERS = {"gpt2-124m": 124_439_808, "smollm2-360m": 361_821_120, "llama-3.2-1b": 1_235_814_400}


@pytest.mark.parametrize("name", MODELS)
def test_each_is_a_run_of_20_tokens_a_parameter(name: str) -> None:
    config = RunConfig.model_validate(tomllib.loads(run_toml(name)))
    assert config.name == name
    tokens = config.clock.steps * config.clock.batch_samples * config.data.context
    assert tokens > 20 * PARAMETERS[name]
    assert config.model.config["vocab_size"] <= (1 << 16 if config.data.dtype == "uint16" else 1 << 32)


@pytest.mark.parametrize(
    "name", ["gpt2-124m", *(pytest.param(name, marks=pytest.mark.nightly) for name in [*MODELS][1:])]
)
@pytest.mark.usefixtures("in_this_process")
def test_run_check_says_what_each_takes(name: str, tmp_path: Path) -> None:
    """With bytes for its tokenizer, which would come from the hub."""
    file = tmp_path / "run.toml"
    file.write_text(run_toml(name).replace(MODELS[name].tokenizer, "bytes"))
    done = CliRunner().invoke(command.app, ["run", "check", str(file), "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert values["verdict"] == "no mistakes found"
    assert values["layout"]["parameters"] == PARAMETERS[name]
    cost = values["cost"]
    assert cost["least_memory_bytes"] < 13 * PARAMETERS[name]
    assert cost["computing_seconds"]["H100"] < cost["computing_seconds"]["RTX 3060"]


def test_the_command_prints_one_and_names_those_that_there_are() -> None:
    runner = CliRunner()
    assert runner.invoke(command.app, ["run", "example", "--for", "gpt2-124m"]).stdout == run_toml("gpt2-124m")
    short, whole = (runner.invoke(command.app, ["run", "example", *flags]).stdout for flags in ([], ["--all"]))
    assert 100 > len(short.splitlines()) > 12
    assert len(whole.splitlines()) > 3 * len(short.splitlines())
    with pytest.raises(OperatorError, match=r"--for gpt5: expected one of gpt2-124m, smollm2-360m, llama-3\.2-1b"):
        run_toml("gpt5")


def test_the_speed_of_a_card_is_a_part_of_its_peak() -> None:
    assert tokens_a_second(10**9, 6e12) == pytest.approx(350)
