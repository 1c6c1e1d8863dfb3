"""The signed end of a run in its archive: `verify` says it, and finds a log that does not end there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.archive.verify import text
from protos.identity import Identity, peer_id
from protos.orders import End, seal_end
from tests.unit.archive.test_archive import ADA, COORDINATOR, Life


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    made.steps(4)
    yield made
    made.recorder.close()


def end(life: Life, step: int, entry_hash: bytes, by: Identity = COORDINATOR) -> None:
    envelope = seal_end(by, life.run_id, End(step, entry_hash, "good enough"))
    life.recorder.end(envelope.SerializeToString(deterministic=True))


def test_the_end_is_said_and_so_is_a_part_of_the_log(life: Life) -> None:
    end(life, 4, life.entries[3].hash)
    found = life.verify()
    assert (found.ok, found.ended_step, found.ended_reason) == (True, 4, "good enough")
    assert "The operator ended the run at step 4, as the coordinator signed: good enough.\n" in text(found)
    end(life, 9, bytes(32))
    assert "This archive ends before, at step 4." in text(life.verify())


@pytest.mark.parametrize(("step", "of", "bad"), [(3, 2, 4), (4, 0, 4)])
def test_a_log_that_goes_past_its_end_or_ends_with_another_entry_does_not_hold(
    life: Life, step: int, of: int, bad: int
) -> None:
    end(life, step, life.entries[of].hash)
    found = life.verify()
    assert (found.ok, found.first_bad_step, found.signed_by) == (False, bad, peer_id(COORDINATOR.public_key))
    assert f"the coordinator signed that the run ended at step {step}, and another log" in found.reason


def test_an_end_that_somebody_else_signed_does_not_hold(life: Life) -> None:
    end(life, 4, life.entries[3].hash, by=ADA)
    found = life.verify()
    assert not found.ok
    assert "unknown_signer" in found.reason
