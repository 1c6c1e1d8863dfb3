"""The swarm as the training thread sees it: blocking calls and a queue of events. Only bytes and numbers cross.

Runs the network side on one asyncio thread of its own. Every call has a deadline; `close` leaves nothing running.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import UTC, datetime
from typing import Any, TypeVar

import structlog

from node.overlay.reach import Access
from node.swarm.facts import Event, Failed, Snapshot, Welcome
from node.swarm.membership import JoinFacts
from node.swarm.outbox import Outbox
from node.swarm.runtime import Counters
from node.swarm.session import Session
from protos import clocks
from protos.accounts import Owner
from protos.clocks import RETRY_SECONDS_MIN, Again, Waits
from protos.errors import NetworkError, RefusedError, StoppedError
from protos.evaluation import Evaluation
from protos.log import SignedEntry, Verdict
from protos.process import join_or_leave
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import update_pb2

EVENTS_MAX = 256
FAILURE_SECONDS_MAX = 5.0
START_SECONDS_MAX = 90.0
PACE_SECONDS_MAX = 600.0
LINE_SECONDS = 20.0
"""A peer in the line before a full run asks so often."""
AWAY_SECONDS_MAX = 20.0
"""A coordinator that is away is asked again after so long at the latest."""
FETCH_SECONDS_MAX = 600.0
STOP_SECONDS_MAX = 10.0
OWNER_SECONDS_MAX = 20.0
LIVE_SECONDS_MAX = 2.0
"""A setting of the owner waits for the network thread so long; the next look tries again."""
SLICE_SECONDS = 0.25
T = TypeVar("T")


def _reported(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """As asyncio reports what no task caught, but for one thing: a process that joins again has a new loop, gRPC finishes the
    calls of the old one there, and cannot tell the old loop. Nothing is lost by that, and a traceback helps nobody."""
    error = context.get("exception")
    late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not (late and "PollerCompletionQueue" in str(context.get("message"))):
        loop.default_exception_handler(context)


class Swarm:
    """A thread with an event loop and a `Session` on it, made by `make(emit)` on that loop."""

    def __init__(self, make: Any, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping
        # No SimpleQueue: in CPython 3.11 its `get` waits for ever if a signal's handler outlasts the timeout.
        self._events: queue.Queue[Event] = queue.Queue()
        self._room = asyncio.Semaphore(EVENTS_MAX)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_reported)
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        self._closed = False
        self._waits_for = ""
        self._session: Session = self._call(self._make(make), START_SECONDS_MAX)

    async def _make(self, make: Any) -> Session:
        return make(self._emit)  # type: ignore[no-any-return]

    async def _emit(self, event: Event) -> None:
        """Wait for room in the queue: a busy training thread slows the network side down, and the queue does not grow."""
        await self._room.acquire()
        self._events.put(event)

    def _call(self, work: Coroutine[Any, Any, T], seconds_max: float, *, stoppable: bool = False) -> T:
        """Wait in slices, so that Ctrl-C ends a `stoppable` call at once."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        until = time.monotonic() + seconds_max
        while True:
            try:
                return future.result(min(max(until - time.monotonic(), 0.0), SLICE_SECONDS))
            except FutureTimeoutError as error:
                if future.done():
                    return future.result()  # the result has just come, or the call failed with a timeout of its own
                if stoppable and self._stopping():
                    future.cancel()
                    raise StoppedError("stopped") from error
                if time.monotonic() >= until:
                    future.cancel()
                    raise NetworkError(f"the network side did not answer within {seconds_max:.0f} s") from error

    def _tell(self, put: Callable[[Outbox], None], seconds_max: float = START_SECONDS_MAX) -> None:
        """Give the outbox a fact, on the network thread."""
        self._call(self._session.tell(put), seconds_max)

    @staticmethod
    async def _drain() -> None:
        """End the tasks that libraries left on the loop (hivemind's DHT leaves some)."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # ---- calls -------------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """Live figures."""
        return self._session.counters

    @property
    def committed_step(self) -> int:
        """The newest entry that has arrived, applied or not: a step up to it is decided."""
        return self._session.committed_step

    def voteless(self, step: int) -> str:
        """Why this peer must not vote in a step; empty if it may."""
        return self._session.voteless(step)

    @property
    def waits_for(self) -> str:
        """What this peer waits for, in words: a coordinator that is away, or a place of the run. Empty: nothing."""
        away = self._session.away
        return self._waits_for or (away and f"trying again: {printable(away)}")

    def connect(self, *, anchor: bool = False, patience_seconds: float = math.inf) -> pb.GetRunResponse:
        """Reach the coordinator and read the run's facts. Waits while the coordinator is away, and while the run is full.
        Raises RefusedError if it does not admit this peer, NetworkError after so many seconds without a coordinator."""
        facts = self._patiently(self._session.connect, patience_seconds)
        if why := clocks.wrong(datetime.now(UTC), facts.unix_ms):
            structlog.get_logger("peer").warning("the clock is wrong", why=why, todo=clocks.SET_IT)
        self._wait_in_line(anchor=anchor, step=facts.head_step, patience_seconds=patience_seconds)
        return facts

    def _patiently(self, call: Callable[[], Coroutine[Any, Any, T]], patience_seconds: float, step: int = 0) -> T:
        """The call's result. A coordinator that does not answer is asked again, with a growing wait between two tries."""
        give_up, again = time.monotonic() + patience_seconds, Again()
        waits = Waits(RETRY_SECONDS_MIN, AWAY_SECONDS_MAX)
        while True:
            try:
                result = self._call(call(), START_SECONDS_MAX, stoppable=True)
                self._waits_for = ""
                return result
            except NetworkError as error:
                delay = waits.next()
                if time.monotonic() + delay > give_up:
                    raise
                why = printable(str(error))
            self._waits_for = f"trying again: {why}"
            if again.worth(why, time.monotonic()):
                structlog.get_logger("peer").info("coordinator away; trying again", why=why, step=step)
            self._sleep(delay)

    def tell_failure(self, reason: pb.JoinFailure) -> None:
        """Tell the operator what keeps this peer from joining. NetworkError, RefusedError."""
        self._call(self._session.tell_failure(reason), FAILURE_SECONDS_MAX)

    def _wait_in_line(self, *, anchor: bool, step: int, patience_seconds: float = math.inf) -> bool:
        """Returns when the run has a place for this peer; False: it had one at once. Raises RefusedError and NetworkError."""
        told, log = (0, 0), structlog.get_logger("peer")
        while True:
            turn = self._patiently(lambda: self._session.turn(anchor=anchor), patience_seconds, step)
            if not turn.place:
                return told != (0, 0)
            self._waits_for = printable(turn.reason)
            if (turn.place, turn.length) != told:
                told = turn.place, turn.length
                log.info("waiting in line", why=self._waits_for, place=turn.place, step=step)
            self._sleep(LINE_SECONDS)

    def _sleep(self, seconds: float) -> None:
        """Raises StoppedError if this peer has to stop meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._stopping():
                raise StoppedError("stopped")
            time.sleep(min(left, SLICE_SECONDS))

    def join(self, about: JoinFacts, bootstrap: Sequence[str], patience_seconds: float = math.inf) -> Welcome:
        """Get on the overlay and join the run. If the place was taken meanwhile, wait in line again. Waits for a coordinator
        that is away, at most so many seconds."""
        self._call(self._session.start(bootstrap), START_SECONDS_MAX, stoppable=True)
        again = True
        while True:
            try:
                return self._patiently(lambda: self._session.enter(about), patience_seconds, self.committed_step)
            except RefusedError:
                if not again:
                    raise
                again = self._wait_in_line(anchor=about.anchor, step=self.committed_step)

    def follow_from(self, step: int, head: bytes) -> None:
        """Follow the log after `step`."""
        self._call(self._session.follow_from(step, head), START_SECONDS_MAX)

    def halt(self) -> None:
        """Stop following and forget the events that are queued: the state is about to start again."""
        self._call(self._session.halt(), START_SECONDS_MAX)
        self._forget()

    def _forget(self) -> None:
        """Forget every queued event but a failure: the state starts again, the network side does not."""
        failed: list[Event] = []
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, Failed):
                failed.append(event)
            else:
                self._loop.call_soon_threadsafe(self._room.release)
        for event in failed:
            self._events.put(event)

    def offered(self) -> tuple[Snapshot, ...]:
        """The snapshots that are agreed now, newest first. Waits for an absent coordinator for the peer's patience."""
        return self._call(self._session.offered(), math.inf, stoppable=True)

    def entries_about(self, step: int) -> tuple[SignedEntry | None, SignedEntry | None]:
        """The log's entries of `step` and of the step after it."""
        return self._call(self._session.entries_about(step), START_SECONDS_MAX, stoppable=True)

    def is_withdrawn(self, step: int) -> bool:
        """Whether the operator, or an anchor, withdrew the digests and snapshots of the state after this step."""
        return self._session.is_withdrawn(step)

    def found_bad(self, snapshot: Snapshot) -> None:
        """Tell the coordinator that an agreed snapshot does not hold what the log says."""
        self._tell(lambda outbox: outbox.add_bad_snapshot(snapshot.step, snapshot.root, snapshot.total_bytes))

    def next_event(self, seconds_max: float) -> Event | None:
        """The next event, or None after `seconds_max`."""
        try:
            event = self._events.get(timeout=seconds_max)
        except queue.Empty:
            return None
        self._loop.call_soon_threadsafe(self._release, event)
        return event

    def _release(self, event: Event) -> None:
        self._room.release()
        self._session.release(event)

    def publish(self, data: bytes, announcement: update_pb2.Announcement) -> None:
        """Offer this peer's payload of a step."""
        self._call(self._session.publish(data, announcement), START_SECONDS_MAX)

    def applied(self, step: int, digest: bytes) -> None:
        """Tell the coordinator the state after a step."""
        self._tell(lambda outbox: outbox.add_applied(step, digest))

    def abstained(self, step: int, reason: str, *, not_finite: bool) -> None:
        """Tell the coordinator that there will be no votes for a step."""
        self._call(self._session.abstained(step, reason, not_finite=not_finite), START_SECONDS_MAX)

    def loaded(self, size: int) -> None:
        """Count bytes that this peer loads for the run from elsewhere, and wait as its caps ask. From any thread."""
        self._call(self._session.loaded(size), PACE_SECONDS_MAX)

    def paused(self, paused: bool) -> None:
        """Tell the coordinator that this peer's owner has paused it, or lets it take part again."""
        self._tell(lambda outbox: outbox.pause(paused))

    def name_owner(self, owner: Owner) -> None:
        """Tell the coordinator whose machine this is: in the next Join, or in a report. From any thread."""
        self._tell(lambda outbox: outbox.name_owner(owner), LIVE_SECONDS_MAX)

    def limit_relaying(self, bytes_a_second: float | None) -> int:
        """What this peer may relay from now on (None: no limit). Returns relayed bytes. From any thread."""
        return self._call(self._session.limit_relaying(bytes_a_second), LIVE_SECONDS_MAX)

    def found(self, verdicts: Sequence[Verdict]) -> None:
        """Tell the coordinator the verdicts of this peer's checks of other peers' votes."""
        self._tell(lambda outbox: outbox.add_verdicts(verdicts))

    def evaluated(self, made: Evaluation) -> None:
        """Sign the held-out loss of a state, and tell the coordinator. From any thread."""
        self._call(self._session.evaluated(made), START_SECONDS_MAX)

    def restarted(self, step: int) -> None:
        """The state starts again from the snapshot of a step."""
        self._tell(lambda outbox: outbox.restart(step))

    def stored(self, step: int, root: bytes, size: int, kept: bool) -> None:
        """Tell the coordinator a snapshot's root, and whether its pieces are in the store. From any thread."""
        self._tell(lambda outbox: outbox.add_snapshot(step, root, size, kept=kept))

    def fetch(self, sha256: bytes, size: int, holders: Sequence[bytes]) -> bytes:
        """A blob by hash; NetworkError if no holder gives it."""
        return self._call(self._session.fetch(sha256, size, holders), FETCH_SECONDS_MAX, stoppable=True)

    def access(self) -> Access:
        """How this peer is reached and connected now. From any thread, after `join`."""
        return self._call(self._session.access(), OWNER_SECONDS_MAX)

    def standing(self) -> str:
        """The coordinator's words on whether this peer's votes count. From any thread."""
        return self._call(self._session.standing(), OWNER_SECONDS_MAX)

    def close(self, *, leaving: bool) -> None:
        """Stop the network side; `leaving` says goodbye first. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if hasattr(self, "_session"):
                self._call(self._session.stop(leaving=leaving), STOP_SECONDS_MAX)
        except NetworkError as error:
            structlog.get_logger("swarm").warning("the network side did not stop in time", step="-", why=str(error))
        finally:
            self._call(self._drain(), STOP_SECONDS_MAX)
            self._loop.call_soon_threadsafe(self._loop.stop)
            join_or_leave(self._thread, STOP_SECONDS_MAX)
            if not self._thread.is_alive():
                self._loop.close()
