"""The training thread waits for events with a deadline, whatever signals come meanwhile."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from node.owner_commands import Stop
from node.swarm.api import Swarm


async def _nothing(**_: object) -> None:
    return None


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    swarm = Swarm(lambda emit: SimpleNamespace(stop=_nothing), lambda: False)
    yield swarm
    swarm.close(leaving=False)


def test_a_handler_that_outlasts_the_deadline_does_not_make_the_wait_endless(swarm: Swarm) -> None:
    """`queue.SimpleQueue.get` of CPython 3.11 waits for ever then: a closed window did not end its peer."""
    waited = threading.Event()

    def end_the_wait() -> None:
        if not waited.wait(10.0):
            swarm._events.put(SimpleNamespace())  # type: ignore[arg-type] # so that the test ends, and fails

    rescue = threading.Thread(target=end_the_wait)
    rescue.start()
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.4))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        found = swarm.next_event(0.3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        waited.set()
        rescue.join()
    assert found is None


def test_a_call_that_grpc_ends_after_its_loop_is_no_traceback_and_all_else_is_one(
    swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer whose disk was full joins again in the same process, with another loop."""
    late = {"message": "Exception in callback PollerCompletionQueue._handle_events()"}
    swarm._loop.call_exception_handler({**late, "exception": RuntimeError("Event loop is closed")})
    assert not caplog.records
    swarm._loop.call_exception_handler({**late, "exception": RuntimeError("other")})
    swarm._loop.call_exception_handler({"message": "Task exception", "exception": RuntimeError("Event loop is closed")})
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_a_stop_may_be_asked_for_anywhere_within_the_wait_for_it() -> None:
    """By a signal, or by the garbage collector, which ends a program's peer: both come between any two lines of a thread."""
    stop, found, inside = Stop(), list[bool](), list[str]()

    def asks(frame: FrameType, event: str, given: Any) -> None:
        if frame.f_code is threading.Condition.wait.__code__ and not stop():
            inside.append(frame.f_code.co_name)
            stop.ask()

    def waits() -> None:
        sys.settrace(asks)
        found.append(stop.wait(0.01))

    waiter = threading.Thread(target=waits, daemon=True)
    waiter.start()
    waiter.join(30)
    assert (found, inside[-1:]) == ([True], ["wait"])
