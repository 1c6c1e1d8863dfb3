"""The witness: what contradicts what a peer was told, what it keeps, and the proof that it leaves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from node.swarm import entries
from node.swarm.entries import Witness
from protos.errors import DivergedError
from protos.identity import Identity
from protos.log import Entry, SignedEntry, open_entry, seal_entry

COORDINATOR = Identity.from_seed(bytes([1]) * 32)
RUN = bytes([7]) * 32


def chain(length: int, lr_bits: int = 0) -> list[SignedEntry]:
    """A log from the run's beginning."""
    made: list[SignedEntry] = []
    for step in range(1, length + 1):
        parent = made[-1].hash if made else RUN
        entry = Entry(step, parent, (), lr_bits, b"", (), step)
        made.append(seal_entry(COORDINATOR, RUN, entry))
    return made


@pytest.fixture
def told(tmp_path: Path) -> Witness:
    made = Witness(RUN, COORDINATOR.public_key, tmp_path)
    made.start(0, RUN)
    return made


def test_one_log_never_contradicts_itself(told: Witness) -> None:
    log = chain(5)
    for signed in log[:3]:
        assert told.contradiction(signed) is None
        told.saw(signed)
    for signed in log:
        assert told.contradiction(signed) is None, "old, next and later entries of the same log"
    told.start(2, log[1].hash)
    assert told.contradiction(log[1]) is None


def test_another_entry_for_a_step_and_one_that_does_not_follow(told: Witness) -> None:
    log, other = chain(3), chain(3, lr_bits=1)
    for signed in log[:2]:
        told.saw(signed)
    for signed, step in zip(other, (1, 2, 2), strict=True):
        found = told.contradiction(signed)
        assert found.step == step
    late = seal_entry(COORDINATOR, RUN, replace(log[0].entry, parent_hash=bytes(32)))
    assert told.contradiction(late) is not None
    fresh = Witness(RUN, COORDINATOR.public_key, Path())
    fresh.start(0, RUN)
    assert fresh.contradiction(late) is not None, "a log that does not begin at the run"


def test_the_proof_holds_for_anyone(told: Witness, tmp_path: Path) -> None:
    [ours], [theirs] = chain(1), chain(1, lr_bits=1)
    told.saw(ours)
    found = told.contradiction(theirs)
    assert found is not None
    error = told.accuse(found, theirs)
    assert isinstance(error, DivergedError)
    assert error.exit_code == 5
    path = tmp_path / "equivocation-1.json"
    assert str(path) in str(error)
    kept = [
        open_entry(bytes.fromhex(entry["envelope"]), run_id=RUN, coordinator=COORDINATOR.public_key)
        for entry in json.loads(path.read_text())["entries"]
    ]
    assert kept == [ours, theirs]


def test_a_proof_that_cannot_be_written_is_said_to_be_lost(tmp_path: Path) -> None:
    told = Witness(RUN, COORDINATOR.public_key, tmp_path / "nowhere")
    [ours], [theirs] = chain(1), chain(1, lr_bits=1)
    told.saw(ours)
    found = told.contradiction(theirs)
    assert found is not None
    assert "could not be written" in str(told.accuse(found, theirs))


def test_its_memory_is_bounded(told: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    log = chain(40)
    monkeypatch.setattr(entries, "ENTRIES_KEPT_MAX", 10)
    for signed in log[:30]:
        told.saw(signed)
    assert list(told._told) == list(range(21, 31))
    monkeypatch.setattr(entries, "ENTRIES_KEPT_BYTES_MAX", 3 * len(log[0].envelope))
    for signed in [*log[30:], log[-1]]:
        told.saw(signed)
    assert len(told._told) <= 3
    assert told._bytes == sum(len(kept.envelope) for kept in told._told.values())
