"""The archive of a fork: it is replayed from the state that its genesis names, and from no other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.archive import files
from node.archive.verify import text
from node.snapshot.pieces import of_fork
from node.training.replica import Replica
from protos.log import run_id_of
from protos.start import StartingState, start_body
from protos.v1 import log_pb2
from tests.unit.archive.test_archive import COORDINATOR, Life
from tests.unit.archive.test_confirmed_archive import forge, segment

STEP = 3


class Fork(Life):
    """A fork of a run at its step 3; Ada keeps the archive. `wrong`: what the genesis says that is not so."""

    def __init__(self, folder: Path, parent: Life, **wrong: object) -> None:
        self.parent, self.wrong = parent, wrong
        super().__init__(folder)

    def __post_init__(self) -> None:
        manifest, data = self.parent.ada.packed()
        true = StartingState(
            self.parent.run_id,
            COORDINATOR.public_key,
            manifest.step,
            manifest.entry_hash,
            manifest.root,
            manifest.total_bytes,
            self.parent.ada.digest(),
            24,
        )
        self.start = replace(true, **self.wrong)  # type: ignore[arg-type]
        made = log_pb2.Genesis(
            format_version=1,
            config_json=self.config.canonical_json(),
            coordinator_public_key=COORDINATOR.public_key,
            nonce=bytes(16),
            layout_digest=manifest.layout_digest,
            start=start_body(self.start),
        )
        self.genesis = made.SerializeToString(deterministic=True)
        self.run_id = run_id_of(made)
        self.ada, self.bob = self._replica(), self._replica()
        for peer in (self.ada, self.bob):
            peer.load(of_fork(manifest, self.run_id), data)
        self.archive = self.folder / "archive"
        self.recorder = self.open()


@pytest.fixture
def parent(tmp_path: Path) -> Life:
    (tmp_path / "parent").mkdir()
    life = Life(tmp_path / "parent")
    life.steps(STEP)
    life.recorder.close()
    return life


def forked(parent: Life, **wrong: object) -> Fork:
    folder = parent.folder.with_name("fork")
    folder.mkdir()
    return Fork(folder, parent, **wrong)


def test_a_fork_is_replayed_from_the_state_that_its_genesis_names(parent: Life) -> None:
    fork = forked(parent)
    fork.steps(4)
    found = fork.verify()
    assert found.ok, found.reason
    assert (found.steps, found.first_step, found.from_start) == (4, 1, True)
    assert (found.fork_of, found.fork_step) == (parent.run_id.hex(), STEP)
    assert found.state_digest == fork.ada.whole_digest().hex()
    assert f"it starts from the state after step 3 of run {parent.run_id.hex()[:16]}, which this archive has" in text(
        found
    )


def test_an_archive_that_begins_later_says_what_it_lacks(parent: Life) -> None:
    fork = forked(parent)
    fork.steps(2)
    image = fork.ada.image()
    describe = fork.ada.describer(image.total_bytes)
    fork.recorder.segment(fork.ada.step, image.total_bytes, lambda: image.pieces(1 << 20), describe)
    fork.steps(2)
    found = fork.verify(from_step=2)
    assert found.ok, found.reason
    assert (found.first_step, found.from_start) == (3, False)
    assert "This archive lacks that state: it begins before step 3" in text(found)


@pytest.mark.parametrize(("wrong", "says"), [
    ({"root": b"r" * 32}, "not the one that the genesis names"),
    ({"entry_hash": b"e" * 32}, "not the one that the genesis names"),
    ({"step": STEP + 1}, "not the one that the genesis names"),
    ({"total_bytes": 7}, "not the one that the genesis names"),
    ({"state_digest": b"d" * 32}, "the starting state has digest"),
])  # fmt: skip
def test_another_state_than_the_genesis_names_does_not_hold(parent: Life, wrong: dict[str, object], says: str) -> None:
    fork = forked(parent, **wrong)
    fork.steps(2)
    found = fork.verify()
    assert not found.ok
    assert (found.first_bad_step, found.steps) == (0, 0)
    assert says in found.reason


def test_weights_that_were_exchanged_in_the_archive_do_not_hold(parent: Life) -> None:
    fork = forked(parent)
    fork.steps(2)
    fork.recorder.close()
    state = fork.archive / files.segment_name(0) / files.STATE
    data = bytearray(state.read_bytes())
    data[-3] ^= 1
    state.write_bytes(bytes(data))
    found = fork.verify()
    assert not found.ok
    assert found.first_bad_step == 0


class WithTeacher(Life):
    """The model has a parameter that is not trained, as the base of LoRA."""

    def _replica(self) -> Replica:
        made = super()._replica()
        made.model.register_parameter("teacher", torch.nn.Parameter(torch.arange(3.0), requires_grad=False))
        return made


class ForkWithTeacher(WithTeacher, Fork):
    pass


def test_parameters_that_the_run_does_not_train_are_confirmed_by_a_fork_s_start_alone(tmp_path: Path) -> None:
    """`verify` said of each honest archive with frozen parameters that its state did not fit the model."""
    for name in ("parent", "fork"):
        (tmp_path / name).mkdir()
    parent = WithTeacher(tmp_path / "parent")
    parent.steps(STEP)
    found = parent.verify()
    assert (found.ok, found.first_bad_step, found.steps) == (False, None, STEP)
    assert "confirms the parameters that the run does not train: 1 in all, such as teacher" in found.reason
    fork = ForkWithTeacher(tmp_path / "fork", parent)
    fork.steps(2)
    segment(fork)
    fork.steps(2)
    assert fork.verify().ok, fork.verify().reason
    assert "does not train" in fork.verify(from_step=2).reason
    forge(fork, 0)
    found = fork.verify()
    assert (found.ok, found.first_bad_step) == (False, 0)
