"""The bridge between the training thread and the network thread."""

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from node.swarm.api import EVENTS_MAX, FETCH_SECONDS_MAX, Swarm
from node.swarm.facts import Failed, Waiting
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


def made(stop: threading.Event | None = None, kind: type[Network] = Network) -> tuple[Swarm, Any]:
    box: list[Network] = []

    def make(emit: Any) -> Network:
        box.append(kind(emit))
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
    assert time.monotonic() - started < FETCH_SECONDS_MAX / 2
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
    events = [swarm.next_event(240) for _ in range(count)]
    assert events == [Waiting(str(number)) for number in range(count)]
    swarm.close(leaving=False)


def filled(swarm: Swarm) -> Future[None]:
    """Follow until the queue is full and one more waits for room."""
    following = asyncio.run_coroutine_threadsafe(swarm._session.follow_from(EVENTS_MAX + 5, b""), swarm._loop)
    until = time.monotonic() + 240
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


class Away(Network):
    """A coordinator that answers nothing, and is there after so many calls; its run is full for one question."""

    calls, fails = 0, 3
    away = ""

    async def connect(self) -> Any:
        self.calls += 1
        if self.calls <= self.fails:
            raise NetworkError(
                f"no coordinator answers at nowhere.example:{self.calls // 2}: Name or service not known"
            )
        return SimpleNamespace(head_step=7, unix_ms=0)

    async def turn(self, *, anchor: bool) -> Any:
        self.calls += 1
        place = int(self.calls == self.fails + 2)
        return SimpleNamespace(place=place, length=1, reason="the run is full; this peer is number 1 of 1 in line")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.clocks.RETRY_SECONDS_MIN", 0.01)
    monkeypatch.setattr("node.swarm.api.LINE_SECONDS", 0.1)


@pytest.mark.usefixtures("quick")
def test_a_coordinator_that_is_away_is_asked_until_it_answers_and_a_full_run_waited_for() -> None:
    swarm, network = made(kind=Away)
    said: list[str] = []
    swarm._sleep = lambda seconds: said.append(swarm.waits_for)  # type: ignore[method-assign]
    with capture_logs() as lines:
        assert swarm.connect().head_step == 7
    away = [f"trying again: no coordinator answers at nowhere.example:{port}: Name or service not known"
            for port in (0, 1, 1)]  # fmt: skip
    assert said == [*away, "the run is full; this peer is number 1 of 1 in line"]
    assert swarm.waits_for == ""
    told = [line["why"] for line in lines if line["event"] == "coordinator away; trying again"]
    assert told == [text.removeprefix("trying again: ") for text in away[:2]], "the same words are said once"
    network.away = "nobody answers"
    assert swarm.waits_for == "trying again: nobody answers", "also while the peer follows the log"
    swarm.close(leaving=False)


@pytest.mark.usefixtures("quick")
def test_a_peer_with_little_patience_and_ctrl_c_end_the_wait_for_a_coordinator() -> None:
    stop = threading.Event()
    swarm, network = made(stop, kind=Away)
    network.fails = 1000
    with pytest.raises(NetworkError, match="nowhere"):
        swarm.connect(patience_seconds=0.0)
    assert network.calls == 1
    with pytest.raises(NetworkError, match="nowhere"):
        swarm.connect(patience_seconds=0.2)
    assert network.calls > 2
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(StoppedError):
        swarm.connect()
    swarm.close(leaving=False)
