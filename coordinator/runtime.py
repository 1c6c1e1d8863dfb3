"""A run, alive: takes events one at a time, asks the machine, carries out the effects in order.

The only owner of a run's state. Decides nothing; the journal is written before anyone is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import structlog

from coordinator import facts, machine
from coordinator.events import (
    Append,
    Arm,
    Connected,
    Disconnected,
    Effect,
    EndStream,
    EntriesReturned,
    EntryCommitted,
    Event,
    NoticeKind,
    Refuse,
    SendAnnouncement,
    SendEntry,
    SendNotice,
    SendTick,
    TimerFired,
)
from coordinator.journal import Checkpoint, FencedError, Journal, JournalError
from coordinator.metrics import Metrics
from coordinator.reading import Page, Reading
from coordinator.replay import Folded
from coordinator.state import Phase, Run
from protos.errors import SwarmentumError
from protos.identity import Identity, short
from protos.limits import ENTRIES_PAGE_MAX
from protos.log import seal_tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

# Events that a slow follower may lag behind before its stream is cut; it reconnects and reads the journal instead.
FOLLOWER_EVENTS_MAX = 256
JOURNAL_RETRY_MS = 1_000
STANDS_BY = "this coordinator no longer acts; another one does"

T = TypeVar("T")
_Events: TypeAlias = "asyncio.Queue[pb.FollowResponse | None]"


def monotonic_ms() -> int:
    """The runtime's clock: never goes back, never crosses the wire."""
    return time.monotonic_ns() // 1_000_000


def unix_ms() -> int:
    """The wall clock, for what people date: tickets. Nothing in a step depends on it."""
    return time.time_ns() // 1_000_000


class NotJoinedError(SwarmentumError):
    """The peer that wants to follow is not admitted (any more): it has to join again."""


class BehindError(SwarmentumError):
    """The peer has more of the log than this coordinator: it can give that back."""


class RunRuntime:
    """One run, and the same as the journal has it (`folded`). `handle` returns what was refused, for the peer that asked."""

    def __init__(
        self,
        folded: Folded,
        journal: Journal,
        identity: Identity,
        metrics: Metrics,
        io: ThreadPoolExecutor,
        fenced: Callable[[], None],
        reading: Reading,
    ) -> None:
        self.run = run = folded.at(monotonic_ms())
        self._folded = folded
        self._journal = journal
        self._identity = identity
        self._metrics = metrics
        self._io = io
        self._fenced = fenced
        self._reading = reading
        self._lock = asyncio.Lock()
        # Every peer's newest stream, and those of them that have read the whole log and get events as they happen.
        self._streams: dict[bytes, _Events] = {}
        self._followers: dict[bytes, _Events] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stale = False
        self._stopped = False
        self._abandoned = False
        self._entry = b""
        self._due: Checkpoint | None = None
        self._tasks: set[asyncio.Task[list[str]]] = set()
        self._log = structlog.get_logger("coordinator").bind(run=run.run_id.hex()[:16])
        self._arm_restored()

    async def handle(self, event: Event) -> list[str]:
        """One event through the machine; its effects are done when this returns.

        A caller that is cancelled (a peer hung up in the middle of its request) does not stop it half-way. JournalError:
        the event was not taken, or not wholly; what is in the journal counts.
        """
        task = asyncio.get_running_loop().create_task(self._handle(event))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._check_acts()
            raise

    def _ended(self, task: asyncio.Task[list[str]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it; a caller that hung up does not

    async def _handle(self, event: Event) -> list[str]:
        async with self._lock:
            try:
                self._check_acts()
                if self._stale:
                    await self._restore()
                if isinstance(event, Disconnected) and not event.leaving and event.public_key in self._streams:
                    return []  # the peer is back already
                return await self._take(event)
            except FencedError as error:
                self._log.warning("a write was refused", step=self.run.head_step, peer="-", why=str(error))
                self._fenced()
                raise
            except JournalError:
                self._arm(monotonic_ms() + JOURNAL_RETRY_MS)
                raise

    async def _take(self, event: Event) -> list[str]:
        before = self.run
        run, effects = machine.step(before, event, monotonic_ms())
        refusals: list[str] = []
        self._stale = True  # until all is done: whatever happens on the way, the journal counts
        for effect in effects:
            await self._perform(effect, run, refusals)
        self._stale = False
        self.run = run
        self._observe(before, run)
        await self._checkpoint()
        return refusals

    async def _checkpoint(self) -> None:
        """Keep the run, if it is time to. Where that fails, a restart reads more records: nothing else is lost."""
        run_id, due = self.run.run_id, self._due
        if due is None:
            return
        self._due = None
        try:
            await self._in_thread(lambda: self._journal.keep(run_id, due))
        except FencedError:
            raise
        except JournalError as error:
            self._log.warning("no checkpoint is kept; trying again", step=self.run.head_step, peer="-", why=str(error))
        else:
            self._folded.kept_step = self.run.head_step

    async def _restore(self) -> None:
        """After a failed write: what is in the journal counts, as after a crash; peers connect and tell again."""
        before = self.run
        await self._in_thread(lambda: self._folded.read(self._journal))
        self.run = self._folded.at(monotonic_ms())
        self._stale = False
        self._observe(before, self.run)
        for key in list(self._streams):
            self._end(key)
        self._arm_restored()

    def _arm_restored(self) -> None:
        if self.run.step is not None:
            self._arm(self.run.step.deadline_at_ms)
        elif self.run.phase is Phase.FINISHED:
            self._arm(self.run.finish_by_ms)

    async def _perform(self, effect: Effect, run: Run, refusals: list[str]) -> None:
        match effect:
            case Append():
                record = effect.record
                await self._in_thread(lambda: self._journal.append(run.run_id, record))
                self._folded.take(record)
                if isinstance(record, EntryCommitted):
                    self._due = self._folded.due() or self._due
                    self._entry = self._journal.seal(run.run_id, record).envelope
            case SendEntry():
                entry = envelope_pb2.SignedEnvelope.FromString(self._entry)
                self._send(None, pb.FollowResponse(entry=entry))
            case SendTick():
                envelope = seal_tick(self._identity, run.run_id, effect.tick)
                tick = pb.TickEvent(envelope=envelope, deadline_ms=max(effect.deadline_ms, 0))
                self._send(effect.to, pb.FollowResponse(tick=tick))
            case SendAnnouncement():
                announcement = envelope_pb2.SignedEnvelope.FromString(effect.envelope)
                self._send(effect.to, pb.FollowResponse(announcement=announcement))
            case SendNotice():
                if effect.kind is NoticeKind.RESYNC:
                    self._metrics.resyncs.labels(run.run_id.hex()[:16]).inc()
                self._send(effect.to, pb.FollowResponse(notice=facts.notice(run, effect)))
                self._log.info(effect.reason, step=run.head_step, peer=short(effect.to) if effect.to else "all")
            case Arm():
                self._arm(effect.at_ms)
            case Refuse():
                refusals.append(effect.reason)
                if effect.denial is not None:
                    self._metrics.not_admitted(run, effect.denial)
                peer = short(effect.public_key) if effect.public_key else "-"
                self._log.info("refused", step=run.head_step, peer=peer, reason=effect.reason)
            case EndStream():
                self._end(effect.public_key)

    def _observe(self, before: Run, run: Run) -> None:
        self._metrics.observe(run)
        if run.head_step == before.head_step:
            return
        name = run.run_id.hex()[:16]
        self._metrics.entries.labels(name).inc(run.head_step - before.head_step)
        seconds = run.durations_ms[-1] / 1000 if run.durations_ms else 0.0
        self._metrics.step_seconds.labels(name).observe(seconds)
        self._log.info("step", step=run.head_step, peer="-", loss=round(run.loss, 4), seconds=seconds)

    # ---- followers ---------------------------------------------------------------------------------------------------

    def _send(self, to: bytes | None, event: pb.FollowResponse) -> None:
        for key in [to] if to is not None else list(self._followers):
            queue = self._followers.get(key)
            if queue is None:
                continue
            if queue.qsize() >= FOLLOWER_EVENTS_MAX - 1:
                self._cut(key)
            else:
                queue.put_nowait(event)

    def _cut(self, key: bytes) -> None:
        """A follower gets nothing more; its stream ends when it has read what it was sent."""
        queue = self._followers.pop(key, None)
        if queue is not None:
            queue.put_nowait(None)

    def _end(self, key: bytes) -> None:
        """The peer's stream no longer stands for the peer, and ends."""
        self._streams.pop(key, None)
        self._cut(key)

    async def follow(self, key: bytes, from_step: int) -> AsyncGenerator[pb.FollowResponse, None]:
        """The log after `from_step`, then events as they happen. A second stream of one peer ends the first.

        Raises NotJoinedError, JournalError, or BehindError for a step that this log has not reached.
        """
        if from_step > self.run.head_step:
            raise BehindError(f"the log after step {from_step}: the head is {self.run.head_step}")
        self._end(key)
        queue: _Events = asyncio.Queue(FOLLOWER_EVENTS_MAX)
        self._streams[key] = queue
        try:
            sent = from_step
            while not await self._registered(key, queue, sent):
                page = await self.entries(sent + 1, follows=True)
                for envelope in page:
                    yield pb.FollowResponse(entry=envelope)
                sent += len(page)
            if self._followers.get(key) is queue and (refusals := await self.handle(Connected(key))):
                raise NotJoinedError(refusals[0])
            while (event := await queue.get()) is not None:
                yield event
        finally:
            if self._streams.get(key) is queue:
                del self._streams[key]
                self._followers.pop(key, None)
                self._spawn(Disconnected(key))

    async def returned(self, event: EntriesReturned) -> list[str]:
        """Entries that the journal had lost; returns what was refused."""
        before = self.run.head_step
        refusals = await self.handle(event)
        if self.run.head_step > before:
            log = self._log.bind(step=self.run.head_step, peer=short(event.public_key))
            log.warning("the journal had lost its end: a peer gave entries back", from_step=before + 1)
        return refusals

    async def entries(self, from_step: int, *, follows: bool) -> Page:
        """One page of signed entries, for a peer that `follows` or for a stranger. JournalError, BusyError."""
        self._check_acts()
        head = self.run.head_step
        page = await self._reading.page(self.run.run_id, from_step, ENTRIES_PAGE_MAX, head, follows=follows)
        self._check_acts()
        return page

    async def _registered(self, key: bytes, queue: _Events, sent: int) -> bool:
        """Become a follower if nothing is left to read; under the lock, so that no entry is missed or doubled.

        A stream that was replaced meanwhile, or that comes when the coordinator stops, is over.
        """
        async with self._lock:
            if self._stopped or self._streams.get(key) is not queue:
                queue.put_nowait(None)
                return True
            if self._stale:
                raise JournalError("the journal fails; trying again")
            if sent < self.run.head_step:
                return False
            self._followers[key] = queue
            return True

    async def stop(self) -> None:
        """End every stream and finish what was begun: the coordinator stops."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for key in list(self._streams):
            self._end(key)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abandon(self) -> None:
        """Another coordinator acts from now on: end every stream, and what was begun, without waiting for the journal."""
        self._stopped = self._abandoned = True
        if self._timer is not None:
            self._timer.cancel()
        for key in list(self._streams):
            self._end(key)
        for task in list(self._tasks):
            task.cancel()

    # ---- time and threads --------------------------------------------------------------------------------------------

    def _arm(self, at_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stopped:
            return
        delay = max(at_ms - monotonic_ms(), 0) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay, self._spawn, TimerFired())

    def _spawn(self, event: Event) -> None:
        if self._stopped:
            return
        task = asyncio.get_running_loop().create_task(self._handle_logged(event))
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[list[str]]) -> None:
        """Our own mistakes are logged with their traceback, and the clock goes on."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("bug in the coordinator", step=self.run.head_step, peer="-", exc_info=error)
            self._arm(monotonic_ms() + JOURNAL_RETRY_MS)

    async def _handle_logged(self, event: Event) -> list[str]:
        try:
            return await self.handle(event)
        except JournalError as error:
            self._log.error("the journal fails; trying again", step=self.run.head_step, peer="-", error=str(error))
            return []

    async def _in_thread(self, function: Callable[[], T]) -> T:
        self._check_acts()
        future = asyncio.get_running_loop().run_in_executor(self._io, function)
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._check_acts()
            raise

    def _check_acts(self) -> None:
        if self._abandoned:
            raise JournalError(STANDS_BY)
