"""The end of a run on a peer: an entry after a signed end, and an end of another log, end the peer."""

import time

import pytest

from node.training.progress import AGREED_SECONDS_MAX, LastStep
from protos.errors import DivergedError, NetworkError, SwarmentumError
from protos.orders import End

HEAD, OTHER = bytes([1]) * 32, bytes([2]) * 32


def test_the_last_step_is_the_planned_one_until_the_end_is_known() -> None:
    last = LastStep(100)
    assert last.step == 100
    assert last.told(End(7, HEAD), 5, OTHER), "the peer has not replayed the log yet"
    assert last.step == 7
    last.reached(6, OTHER)
    last.reached(7, HEAD)
    assert not last.told(End(7, HEAD, "in other words"), 7, HEAD), "each notice has it"


@pytest.mark.parametrize(
    ("step", "head", "words"), [(8, HEAD, "ended at step 7, and an entry of step 8"), (7, OTHER, "two logs")]
)
def test_a_peer_stops_at_an_end_of_another_log_told_or_reached(step: int, head: bytes, words: str) -> None:
    with pytest.raises(DivergedError, match=words):
        LastStep(100).told(End(7, HEAD), step, head)
    last = LastStep(100)
    last.told(End(7, HEAD), 5, OTHER)
    with pytest.raises(DivergedError, match=words):
        last.reached(step, head)


def test_two_ends_are_two_logs() -> None:
    last = LastStep(100)
    last.told(End(7, HEAD), 5, OTHER)
    with pytest.raises(DivergedError, match="two ends of the run: at step 7, and 8"):
        last.told(End(8, HEAD), 5, OTHER)


def test_a_peer_awaits_that_the_last_state_is_agreed_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    last = LastStep(7)
    assert not last.is_over(7, awaits=False)
    last.finished = True
    assert not last.is_over(6, awaits=False)
    assert last.is_over(7, awaits=False)
    now[0] += AGREED_SECONDS_MAX
    assert not last.is_over(7, awaits=True)
    last.agreed = 7
    assert last.is_over(7, awaits=True)
    last.agreed = 5
    now[0] += 1
    assert last.is_over(7, awaits=True)


@pytest.mark.parametrize(("finished", "step", "error", "ends"), [
    (True, 7, NetworkError("silent"), True), (True, 6, NetworkError("silent"), False),
    (False, 7, NetworkError("silent"), False), (True, 7, DivergedError("two logs"), False),
])  # fmt: skip
def test_a_coordinator_that_goes_after_the_finish_takes_nothing_from_a_peer_with_the_last_state(
    finished: bool, step: int, error: SwarmentumError, ends: bool
) -> None:
    """Such a peer waited until the last state is agreed, and lost its export with the error."""
    last = LastStep(7, finished=finished)
    if ends:
        last.failed(error, step)
        assert last.is_over(step, awaits=True)
        return
    with pytest.raises(type(error)):
        last.failed(error, step)
