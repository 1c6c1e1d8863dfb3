"""`verify` says OK to what the log confirms, and to nothing else: archives that a forger would make."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from node import __main__ as command
from node.archive import files
from node.archive.confirmed import Confirmed, first_difference, settings_difference, vocabulary_difference
from node.archive.verify import Verification, text, verify
from node.data.tokenizer import ByteTokenizer
from node.export.model_folder import export
from node.model.spec import ModelSpec, build
from node.optim import digest
from node.optim.digest import part_of
from node.optim.layout import Layout
from node.snapshot.pieces import describe, load, open_manifest, pack
from node.training.replica import Replica
from protos.errors import OperatorError
from protos.invite import Invite, run_named
from protos.run_config import ClockConfig, ModelConfig, RunConfig, config_from_json
from protos.v1 import log_pb2
from tests.unit.archive.test_archive import Life, rewrite
from tests.unit.model.test_spec import TINY

STATE_BYTES = 4 * (70 * 65 + 65)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    yield made
    made.recorder.close()


def segment(life: Life) -> None:
    """The archive can begin with the state of now."""
    image = life.ada.image()
    describe = life.ada.describer(image.total_bytes)
    life.recorder.segment(life.ada.step, image.total_bytes, lambda: image.pieces(1 << 20), describe)


def forge(
    life: Life, step: int, layout: Layout | None = None, names: Callable[[str], str] = str, *, keep: bool = False
) -> None:
    """Put another state at the beginning of a segment, with a manifest that fits it."""
    folder = files.Segment(life.archive / files.segment_name(step))
    old = open_manifest(folder.path(files.MANIFEST).read_bytes())
    state = {name: tensor.clone() for name, tensor in life.ada.state.items()}
    load(folder.path(files.STATE).read_bytes(), state)
    if not keep:
        state = {
            name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9))
            for name, tensor in state.items()
        }
    data = pack({names(name): tensor for name, tensor in state.items()})
    made = describe(
        data, run_id=old.run_id, step=old.step, entry_hash=old.entry_hash,
        layout_digest=old.layout_digest if layout is None else layout.digest(), piece_bytes=old.piece_bytes,
    )  # fmt: skip
    folder.path(files.STATE).write_bytes(data)
    folder.path(files.MANIFEST).write_bytes(made.encoded)


def cut(life: Life, step: int, entries: int) -> None:
    """Leave the first entries of a segment, as somebody would who packs an archive for others."""
    life.recorder.close()
    rewrite(life.archive / files.segment_name(step) / files.LOG, lambda records: records[:entries])


def test_a_random_model_with_a_real_entry_is_not_ok(life: Life) -> None:
    life.steps(4)
    cut(life, 0, 1)
    forge(life, 0)
    found = life.verify()
    assert not found.ok
    assert (found.confirmed_step, found.digests_checked, found.steps) == (None, 0, 1)
    assert "nothing in the log confirms the state after step 0" in text(found)
    assert "none of the entries 1 to 1 has a digest" in found.reason
    assert text(found).startswith("FAILED: ")


def test_a_stretch_without_digests_is_not_ok(tmp_path: Path) -> None:
    """While the anchor is away, entries have no digest: the archive is cut to these."""
    life = Life(tmp_path, silent=range(4, 20))
    life.steps(3)
    segment(life)
    life.steps(5)
    forge(life, 3)
    found = life.verify(from_step=3)
    assert not found.ok
    assert "none of the entries 4 to 8 has a digest" in found.reason
    assert found.steps == 5, "each step holds, and proves nothing about the weights"


def test_steps_after_the_last_digest_are_called_derived(tmp_path: Path) -> None:
    life = Life(tmp_path, silent=range(4, 20))
    life.steps(8)
    found = life.verify()
    assert found.ok, found.reason
    assert (found.confirmed_step, found.derived_steps, found.digests_checked) == (2, 6, 2)
    assert "The last 6 steps are only derived" in text(found)
    assert json.loads(found.json())["derived_steps"] == 6


def test_other_names_for_the_confirmed_bits_are_not_ok(life: Life) -> None:
    """With another layout.json all votes count as nothing, so a confirmed state with other names would stay as it is."""
    life.steps(1)
    segment(life)
    life.steps(1)
    layout = life.ada.demo.layout
    swap = {"weight": "weights", "bias": "bias"}
    shapes = [(swap[place.name], place.shape) for place in layout.places]
    (life.archive / files.LAYOUT).write_text(files.layout_text(shapes, layout.kinds))
    forge(life, 1, Layout.of_shapes(shapes, layout.kinds), swap.__getitem__, keep=True)
    found = life.verify(from_step=1)
    assert not found.ok
    assert "nothing in the log confirms the archive's layout.json: 0 of 2" in found.reason, found.reason


def test_a_state_of_another_layout_than_the_archive_says_is_found(life: Life) -> None:
    life.steps(2)
    forge(life, 0, Layout.of_shapes([("other", (3, 3))], {}), keep=True)
    found = life.verify()
    assert (found.ok, found.first_bad_step) == (False, 0)
    assert "another parameter layout" in found.reason


class NamedLayout(Life):
    """A run whose genesis names its layout, as `run create` makes it where torch is."""

    layout = bytes(32)

    def __post_init__(self) -> None:
        log_pb2_genesis = log_pb2.Genesis

        def made(**values: object) -> log_pb2.Genesis:
            return log_pb2_genesis(layout_digest=self.layout, **values)

        log_pb2.Genesis = made  # type: ignore[misc, assignment]
        try:
            super().__post_init__()
        finally:
            log_pb2.Genesis = log_pb2_genesis  # type: ignore[misc]


def test_a_layout_that_the_genesis_does_not_name_is_found(tmp_path: Path) -> None:
    life = NamedLayout(tmp_path)
    life.steps(2)
    found = life.verify()
    assert not found.ok
    assert "the genesis names 0000000000000000" in found.reason


@pytest.mark.parametrize("step", [None, 0, 1, 2, 3])
def test_a_digest_confirms_the_part_that_it_covers(step: int | None) -> None:
    parts = [part_of(STATE_BYTES, at, bytes_max=STATE_BYTES // 8 * 4 - 4) for at in range(3)]
    assert parts == [(0, 3), (1, 3), (2, 3)]
    confirmed = Confirmed(layout=True)
    for at in range(step or 0):
        confirmed.by_entry(at, *parts[at])
    if step == 3:
        assert (confirmed.state, confirmed.lacks(0, 9)) == (2, "")
    else:
        assert confirmed.state is None
        said = "cover" if step else "none of the entries 1 to 9 has a digest"
        assert said in confirmed.lacks(0, 9)


class LargeLife(Life):
    """A run whose digests cover a part of the state each, by the rule that its genesis names."""

    def _replica(self) -> Replica:
        replica = super()._replica()
        replica.digest_steps = config_from_json(self.genesis_message().config_json).clock.digest_steps
        return replica

    def genesis_message(self) -> log_pb2.Genesis:
        return log_pb2.Genesis.FromString(self.genesis)


@pytest.mark.parametrize(("digest_steps", "parts"), [(0, 19), (4, 4)])
def test_the_digests_of_a_large_state_are_those_of_the_rule_that_the_genesis_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest_steps: int, parts: int
) -> None:
    monkeypatch.setattr(digest, "DIGEST_BYTES_MAX", 1000)
    life = LargeLife(tmp_path, RunConfig(clock=ClockConfig(digest_steps=digest_steps)))
    life.steps(6)
    found = life.verify()
    assert part_of(STATE_BYTES, 1, digest_steps) == (1, parts)
    assert (found.ok, found.digests_checked) == (digest_steps == 4, 5), found.reason
    assert found.ok or f"cover 5 of its {parts} parts" in found.reason


def test_a_genesis_of_an_earlier_version_keeps_its_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration has no `clock.digest_steps`: the archive's digests are those of parts of one size."""
    monkeypatch.setattr(digest, "DIGEST_BYTES_MAX", 1000)
    whole = RunConfig.canonical_json

    def earlier(self: RunConfig) -> str:
        values = json.loads(whole(self))
        del values["clock"]["digest_steps"], values["snapshots"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    monkeypatch.setattr(RunConfig, "canonical_json", earlier)
    life = LargeLife(tmp_path)
    assert life.ada.digest_steps == 0
    life.steps(21)
    found = life.verify()
    assert found.ok, found.reason
    assert found.digests_checked == 20


# ---- the state of step 0 ---------------------------------------------------------------------------------------------


class TinyLife(Life):
    """A run whose model follows from its settings and its seed."""

    def _replica(self) -> Replica:
        optimizer = self.config.optimizer
        return Replica(self.run_id, build(ModelSpec(TINY), self.config.seed), optimizer, optimizer.vote_size)


def test_the_state_of_the_seed_needs_no_digest(tmp_path: Path) -> None:
    life = TinyLife(tmp_path, RunConfig(model=ModelConfig(config=dict(TINY)), seed=5))
    life.steps(1)
    found = life.verify()
    assert found.ok, found.reason
    assert (found.confirmed_step, found.derived_steps, found.digests_checked) == (0, 1, 0)
    forge(life, 0)
    found = life.verify()
    assert not found.ok
    assert "nothing in the log confirms the state after step 0" in found.reason


# ---- which run -------------------------------------------------------------------------------------------------------


def test_an_archive_of_another_run_of_the_same_name_is_not_ok(life: Life) -> None:
    life.steps(3)
    life.recorder.close()
    own = life.run_id.hex()

    def found(expected: str) -> Verification:
        return verify(life.folder, None, None, expected=run_named(expected))

    invite = Invite(life.run_id, ("127.0.0.1:1",), bytes(32), bytes(32), (), "same name")
    assert found(own).ok
    assert found(own[:16].upper()).ok
    assert found(invite.link()).ok
    other = found(replace(invite, run_id=bytes(32)).link())
    assert (other.ok, other.steps) == (False, 0)
    assert f"is an archive of run {own}, and --run names {bytes(32).hex()}" in text(other)
    assert own in text(found(own)), "the whole id is said"


@pytest.mark.parametrize("word", ["", "my run", "abc", "g" * 64, "a" * 65, "swarmentum://x"])
def test_a_run_that_nobody_can_mean_is_an_error(word: str) -> None:
    with pytest.raises(OperatorError):
        run_named(word)


def test_the_command_ends_with_1(life: Life) -> None:
    life.steps(2)
    cut(life, 0, 1)
    done = CliRunner().invoke(command.app, ["verify", str(life.folder)])
    assert (done.exit_code, "FAILED: nothing in the log confirms" in done.stdout) == (1, True), done.output


# ---- the exported model ----------------------------------------------------------------------------------------------


def exported(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], ModelConfig]:
    model = build(ModelSpec(TINY), 3)
    folder = export(model, ByteTokenizer(), tmp_path / "model", {})
    return folder, dict(model.named_parameters()), ModelConfig(config=dict(TINY))


def test_an_honest_export_is_the_replayed_model(tmp_path: Path) -> None:
    folder, state, model = exported(tmp_path)
    assert first_difference(state, folder) is None
    assert settings_difference(model, folder) is None


def test_a_tensor_that_the_run_does_not_train_is_found(tmp_path: Path) -> None:
    """A head of its own beside tied weights would be what the model answers with."""
    folder, state, _ = exported(tmp_path)
    weights = load_file(folder / "model.safetensors")
    name, tensor = next(iter(state.items()))
    save_file({**weights, "again": tensor.detach().clone()}, folder / "model.safetensors")
    assert first_difference(state, folder) is None, f"{name} once more, bit for bit"
    save_file({**weights, "lm_head.other": torch.zeros(4, 4)}, folder / "model.safetensors")
    assert "holds lm_head.other, which the run does not train" in str(first_difference(state, folder))


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "adapter_config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
)
def test_other_weights_beside_the_model_are_found(tmp_path: Path, name: str) -> None:
    folder, state, _ = exported(tmp_path)
    (folder / name).write_bytes(b"{}")
    assert f"holds {name} beside" in str(first_difference(state, folder))


@pytest.mark.parametrize(("key", "value"), [
    ("rope_parameters", {"rope_type": "default", "rope_theta": 7.0}), ("hidden_act", "relu"),
    ("rms_norm_eps", 0.5), ("num_attention_heads", 4), ("model_type", "gpt2"), ("auto_map", {"AutoModel": "evil.Evil"}),
    ("attn_implementation", "some/kernel"),
])  # fmt: skip
def test_other_settings_of_the_model_are_found(tmp_path: Path, key: str, value: object) -> None:
    folder, _, model = exported(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert str(settings_difference(model, folder)).startswith("config.json")


@pytest.mark.parametrize("size", [None, 32000, -1, "256"])
def test_a_vocabulary_that_the_run_leaves_to_the_tokenizer_is_that_of_the_state(tmp_path: Path, size: object) -> None:
    """Without vocab_size, or with another one, transformers builds a model that these weights do not fit."""
    folder, state, model = exported(tmp_path)
    left = ModelConfig(config={key: value for key, value in TINY.items() if key != "vocab_size"})
    assert vocabulary_difference(left, folder, state) is None
    config = json.loads((folder / "config.json").read_text())
    made = {key: value for key, value in config.items() if key != "vocab_size"} | (
        {} if size is None else {"vocab_size": size}
    )
    (folder / "config.json").write_text(json.dumps(made))
    assert f"vocab_size is {size!r}" in str(vocabulary_difference(left, folder, state))
    assert str(settings_difference(model, folder)).startswith("config.json"), "a run that names one has it there"


@pytest.mark.parametrize("content", ["", "[]", "3", "{", "[" * 100_000])
def test_a_config_that_is_none_is_a_difference(tmp_path: Path, content: str) -> None:
    folder, _, model = exported(tmp_path)
    (folder / "config.json").write_text(content)
    assert str(settings_difference(model, folder)).startswith("config.json")


@pytest.mark.parametrize("facts", ["", "[]", "{", '{"steps": 3, "run_id": "ab"}'])
def test_facts_of_an_export_that_are_none_or_of_another_run_are_no_ok(life: Life, facts: str) -> None:
    life.steps(3)
    (life.export() / "swarmentum.json").write_text(facts)
    found = life.verify()
    assert (found.ok, found.first_bad_step) == (False, 3)
    assert "swarmentum.json" in found.reason or "is of run ab" in found.reason
