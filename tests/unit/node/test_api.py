"""The bridge between the training thread and the network thread."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from node.swarm.api import EVENTS_MAX, Swarm
from node.swarm.events import Failed, Waiting
from protos.errors import NetworkError, StoppedError


class Network:
    """Stands where the session stands: coroutines on the network thread."""

    def __init__(self, emit: Any) -> None:
        self.emit = emit
        self.stopped: list[bool] = []

    async def fetch(self, sha256: bytes, size: int, holders: list[bytes]) -> bytes:
        if sha256 == b"never":
            await asyncio.Event().wait()
        if sha256 == b"timeout":
            raise TimeoutError("its own")
        await asyncio.sleep(size / 1000)
        return sha256

    async def halt(self) -> None:
        return

    async def fail(self) -> None:
        await self.emit(Waiting("something"))
        await self.emit(Failed(NetworkError("gone for good")))
        await self.emit(Waiting("something else"))

    async def stop(self, *, leaving: bool) -> None:
        self.stopped.append(leaving)

    async def follow_from(self, step: int, head: bytes) -> None:
        for number in range(step):
            await self.emit(Waiting(str(number)))


def made(stop: threading.Event | None = None) -> tuple[Swarm, Network]:
    box: list[Network] = []

    def make(emit: Any) -> Network:
        box.append(Network(emit))
        return box[0]

    return Swarm(make, (stop or threading.Event()).is_set), box[0]


def test_calls_come_back_with_results_and_errors_and_close_says_goodbye() -> None:
    swarm, network = made()
    assert swarm.fetch(b"blob", 300, []) == b"blob"
    with pytest.raises(TimeoutError, match="its own"):
        swarm.fetch(b"timeout", 1, [])
    swarm.close(leaving=True)
    swarm.close(leaving=True)
    assert network.stopped == [True]
    assert "network" not in {thread.name for thread in threading.enumerate()}


def test_ctrl_c_ends_a_wait_at_once() -> None:
    stop = threading.Event()
    swarm, _ = made(stop)
    threading.Timer(0.2, stop.set).start()
    started = time.monotonic()
    with pytest.raises(StoppedError):
        swarm.fetch(b"never", 1, [])
    assert time.monotonic() - started < 5
    swarm.close(leaving=False)


def test_a_silent_network_side_is_a_network_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.api.FETCH_SECONDS_MAX", 0.3)
    swarm, _ = made()
    with pytest.raises(NetworkError, match="did not answer"):
        swarm.fetch(b"never", 1, [])
    swarm.close(leaving=False)


def test_more_events_than_fit_wait_for_room_and_keep_their_order() -> None:
    swarm, network = made()
    count = EVENTS_MAX * 2
    asyncio.run_coroutine_threadsafe(network.follow_from(count, b""), swarm._loop)
    events = [swarm.next_event(5) for _ in range(count)]
    assert events == [Waiting(str(number)) for number in range(count)]
    swarm.close(leaving=False)


def filled(swarm: Swarm) -> Future[None]:
    """Follow until the queue is full and one more waits for room."""
    following = asyncio.run_coroutine_threadsafe(swarm._session.follow_from(EVENTS_MAX + 5, b""), swarm._loop)
    until = time.monotonic() + 10
    while not swarm._room.locked():
        assert time.monotonic() < until, "the events never filled the queue"
        threading.Event().wait(0.01)
    return following


def test_an_event_that_waits_for_room_does_not_come_after_a_halt() -> None:
    """It belongs to a following that is over; the state was loaded from a snapshot since."""
    swarm, _ = made()
    filled(swarm).cancel()  # as the session's halt does
    swarm.halt()
    swarm.follow_from(3, b"")
    assert [swarm.next_event(0.1) for _ in range(4)] == [*(Waiting(str(number)) for number in range(3)), None]
    assert swarm._room._value == EVENTS_MAX
    swarm.close(leaving=False)


def test_closing_lets_an_event_go_that_waits_for_room() -> None:
    swarm, _ = made()
    following = filled(swarm)
    swarm.close(leaving=False)
    assert following.cancelled()


def test_a_failure_that_is_queued_outlives_a_resync() -> None:
    swarm, network = made()
    try:
        swarm._call(network.fail(), 5)
        swarm.halt()
        event = swarm.next_event(1)
        assert isinstance(event, Failed)
        assert str(event.error) == "gone for good"
        assert swarm.next_event(0.01) is None
        swarm.follow_from(EVENTS_MAX, b"")  # there is as much room as before
    finally:
        swarm.close(leaving=False)
