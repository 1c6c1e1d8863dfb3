"""The runtime of a run: it takes events one at a time, asks the machine, and carries out the effects in order.

The runtime alone owns a run's state. The runtime decides nothing, and writes the journal before it tells a peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from coordinator.clock import machine
from coordinator.clock.effects import (
    Append,
    Arm,
    Denial,
    Effect,
    EndStream,
    EntryCommitted,
    NoticeKind,
    Record,
    Refuse,
    SendAnnouncement,
    SendEntry,
    SendNotice,
    SendSumRequest,
    SendTick,
)
from coordinator.clock.events import Connected, Disconnected, EntriesReturned, Event, Reported, TimerFired
from coordinator.clock.state import Phase, Run
from coordinator.serving import following
from coordinator.serving.following import (
    Events,
    EventStreams,
    FullError,
    LogPages,
    NotJoinedError,
    Page,
    PeerAheadError,
)
from coordinator.serving.metrics import Metrics, StepTraces
from coordinator.serving.throttled_log import FAILING, ThrottledLog, Trouble
from coordinator.store.checkpoint import Folded
from coordinator.store.journal import Checkpoint, FencedError, Journal, JournalError
from protos.clocks import monotonic_ms
from protos.errors import Refusal
from protos.identity import Identity, short
from protos.limits import ENTRIES_PAGE_MAX
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

EVENT_RETRY_MS = 1_000
BUG = "the coordinator has a bug: an event failed; please report this traceback"
STANDS_BY = "this coordinator no longer acts; another one does"

T = TypeVar("T")


class Refusals(list[str]):
    """The reasons of all refused parts. `full`: the run has no place left."""

    full = False


class RunRuntime:
    """One run, and its fold of the journal (`folded`). `handle` returns the refusals, for the peer that asked."""

    def __init__(
        self,
        folded: Folded,
        journal: Journal,
        identity: Identity,
        metrics: Metrics,
        io: ThreadPoolExecutor,
        fenced: Callable[[], None],
        reading: LogPages,
        traces: StepTraces | None = None,
    ) -> None:
        self.run = run = folded.resumed(monotonic_ms())
        self._folded = folded
        self._journal = journal
        self._identity = identity
        self._metrics = metrics
        self._io = io
        self._fenced = fenced
        self._reading = reading
        self._traces = traces
        self._lock = asyncio.Lock()
        self.streams = EventStreams()
        self._timer: asyncio.TimerHandle | None = None
        self._stale = False
        self._stopped = False
        self._abandoned = False
        self._entry = b""
        self._due: Checkpoint | None = None
        self._tasks: set[asyncio.Task[Refusals]] = set()
        self._log = structlog.get_logger("coordinator").bind(run=run.run_id.hex()[:16])
        self._caused = ThrottledLog(self._log)
        self.trouble = Trouble(self._log, metrics, run.run_id.hex()[:16])
        self._arm_restored()

    async def handle(self, event: Event) -> Refusals:
        """One event through the machine; its effects are done when this returns.

        A caller that is cancelled (a peer hung up during its request) does not stop the event half-way. Raises JournalError if
        the event was not taken, or not wholly; then the journal counts.
        """
        answer = self._at_once(event)
        if isinstance(answer, Refusals):
            return answer
        task = asyncio.get_running_loop().create_task(self._handle(event, answer))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._check_acts()
            raise

    def _at_once(self, event: Event) -> Refusals | machine.StepResult | None:
        """The event, if no other one waits and nothing is to be written, as for most reports. If something is to be written,
        what the machine said; None: other events come first."""
        waits = self._tasks or self._lock.locked() or self._stale or self._abandoned or self.trouble.why
        if waits or not isinstance(event, Reported):
            return None  # events are taken in the order in which they came
        verdict = machine.judge(self.run, event, monotonic_ms())
        if any(isinstance(effect, Append) for effect in verdict.effects):
            return verdict
        refusals = Refusals()
        for effect in verdict.effects:
            self._tell(effect, verdict.run, refusals)
        self.run = verdict.run
        self._observe(verdict.before, verdict.run, event, verdict.now_ms)
        return refusals

    def _ended(self, task: asyncio.Task[Refusals]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that hung up does not read it, and asyncio would log it

    async def _handle(self, event: Event, verdict: machine.StepResult | None = None) -> Refusals:
        """`verdict`: what the machine said of the event, if the run has not changed since."""
        async with self._lock:
            self._check_acts()
            self.trouble.check(monotonic_ms())
            try:
                if self._stale:
                    await self._restore()
                if isinstance(event, Disconnected) and not event.leaving and event.public_key in self.streams.newest:
                    return Refusals()  # the peer has a newer stream
                if verdict is None or verdict.before is not self.run:
                    verdict = machine.judge(self.run, event, monotonic_ms())
                refusals = await self._carry_out(event, verdict)
            except FencedError as error:
                self._log.warning(
                    "the database refused a write, because another coordinator acts",
                    step=self.run.head_step,
                    peer="-",
                    why=str(error),
                )
                self._fenced()
                raise
            except JournalError as error:
                self._check_acts()
                self._arm(self.trouble.failed(error, monotonic_ms(), self.run.head_step))
                raise JournalError(self.trouble.why) from error
            if refusals and self.trouble.why and isinstance(event, Reported):
                raise JournalError(self.trouble.why)  # its peer is not connected because the journal was read again
            return refusals

    async def _carry_out(self, event: Event, verdict: machine.StepResult) -> Refusals:
        run, effects, refusals = verdict.run, verdict.effects, Refusals()
        self._stale = True  # until all is done: if a write fails, the journal counts
        records = [effect.record for effect in effects if isinstance(effect, Append)]
        if records:  # an entry and the next tick are one write
            await self._in_thread(lambda: self._journal.append(run.run_id, *records))
            self.trouble.over(monotonic_ms(), self.run.head_step)
        for effect in effects:
            self._tell(effect, run, refusals)
        self.streams.flush()
        self.run = run
        await asyncio.sleep(0)  # the streams send first: the peers wait for them
        for record in records:
            self._written(run, record)
        self._stale = False
        self._observe(verdict.before, run, event, verdict.now_ms)
        await self._checkpoint()
        return refusals

    async def _checkpoint(self) -> None:
        """Keep the run, if a checkpoint is due. If that fails, a restart reads more records, and nothing is lost."""
        run_id, due = self.run.run_id, self._due
        if due is None:
            return
        self._due = None
        try:
            await self._in_thread(lambda: self._journal.keep(run_id, due))
        except FencedError:
            raise
        except JournalError as error:
            self._log.warning(
                "the checkpoint could not be written; the next entry tries again",
                step=self.run.head_step,
                peer="-",
                why=str(error),
            )
        else:
            self._folded.kept_step = self.run.head_step

    async def _restore(self) -> None:
        """After a failed write, as after a crash: the journal counts, and peers connect and report again."""
        before = self.run
        try:
            await self._in_thread(lambda: self._folded.read(self._journal))
        except Refusal as refusal:
            raise JournalError(f"the journal cannot be read at record {self._folded.number}: {refusal}") from refusal
        self.run = self._folded.resumed(monotonic_ms())
        self._stale = False
        self._observe(before, self.run)
        self.streams.end_all()
        self._arm_restored()

    def _arm_restored(self) -> None:
        if self.run.step is not None:
            self._arm(self.run.step.deadline_at_ms)
        elif self.run.phase is Phase.FINISHED:
            self._arm(self.run.finish_by_ms)

    def _written(self, run: Run, record: Record) -> None:
        """Note that a record is in the journal."""
        self._folded.append(record)
        if isinstance(record, EntryCommitted):
            self._metrics.committed(run, record.entry)
            self._due = self._folded.due() or self._due

    def _tell(self, effect: Effect, run: Run, refusals: Refusals) -> None:
        match effect:
            case Append(record=EntryCommitted() as committed):
                self._entry = self._journal.seal(run.run_id, committed).envelope
            case SendEntry():
                self.streams.hold(envelope_pb2.SignedEnvelope.FromString(self._entry))
            case SendTick():
                self.streams.send_tick(effect.to, following.tick_event(run, effect, self._identity))
            case SendSumRequest() | SendAnnouncement():
                self.streams.send(effect.to, following.for_one(effect))
            case SendNotice():
                if effect.kind is NoticeKind.RESYNC:
                    self._metrics.resyncs.labels(run.run_id.hex()[:16]).inc()
                self.streams.send(effect.to, pb.FollowResponse(notice=following.notice(run, effect, self._identity)))
                if effect.to is None:
                    self._log.info(effect.reason, step=run.head_step, peer="all")
                elif effect.kind is not NoticeKind.VOTE:  # its author alone wants to know
                    self._caused.info(effect.reason, effect.to, step=run.head_step, peer=short(effect.to))
            case Arm():
                self._arm(effect.at_ms)
            case Refuse():
                refusals.append(effect.reason)
                refusals.full |= effect.denial is Denial.FULL
                if effect.denial is not None:
                    self._metrics.not_admitted(run, effect.denial)
                peer = short(effect.public_key) if effect.public_key else "-"
                why = {"step": run.head_step, "peer": peer, "reason": effect.reason}
                self.trouble.refused(self._caused, effect.public_key, why)
            case EndStream():
                self.streams.end(effect.public_key)

    def _observe(self, before: Run, run: Run, event: Event | None = None, event_ms: int = 0) -> None:
        self._metrics.observe(run)
        if self._traces is not None and event is not None:
            self._traces.observe(before, run, event, event_ms, monotonic_ms())
        if run.head_step == before.head_step:
            return
        name = run.run_id.hex()[:16]
        self._metrics.entries.labels(name).inc(run.head_step - before.head_step)
        seconds = run.durations_ms[-1] / 1000 if run.durations_ms else 0.0
        self._metrics.step_seconds.labels(name).observe(seconds)
        self._log.info("a step is decided", step=run.head_step, peer="-", loss=round(run.loss, 4), seconds=seconds)

    # ---- followers ---------------------------------------------------------------------------------------------------

    async def follow(self, key: bytes, from_step: int, *, unpacks: bool = False) -> AsyncGenerator[bytes, None]:
        """The log after `from_step`, then events as they happen, serialised. A second stream of one peer ends the first.

        Raises NotJoinedError, FullError or JournalError, and PeerAheadError for a step that this log has not reached.
        """
        if from_step > self.run.head_step:
            raise PeerAheadError(f"no step {from_step} to follow from: the head is {self.run.head_step}")
        queue = self.streams.open(key, unpacks=unpacks)
        try:
            sent = from_step
            while not await self._registered(key, queue, sent):
                page = await self.entries(sent + 1, follows=True)
                for envelope in page:
                    yield pb.FollowResponse(entry=envelope).SerializeToString()
                sent += len(page)
            if self.streams.following.get(key) is queue and (refusals := await self.handle(Connected(key))):
                raise FullError(refusals[0]) if refusals.full else NotJoinedError(refusals[0])
            while (event := await queue.get()) is not None:
                yield event
        finally:
            if self.streams.closed(key, queue):
                self._spawn(Disconnected(key))

    async def returned(self, event: EntriesReturned) -> Refusals:
        """Take back entries that the journal had lost. Returns the refusals."""
        before = self.run.head_step
        refusals = await self.handle(event)
        if self.run.head_step > before:
            log = self._log.bind(step=self.run.head_step, peer=short(event.public_key))
            log.warning("the journal had lost its last entries, and a peer gave them back", from_step=before + 1)
        return refusals

    async def entries(self, from_step: int, *, follows: bool) -> Page:
        """One page of signed entries, for a peer that `follows` or for a stranger. Raises JournalError or BusyError."""
        self._check_acts()
        head = self.run.head_step
        page = await self._reading.page(self.run.run_id, from_step, ENTRIES_PAGE_MAX, head, follows=follows)
        self._check_acts()
        return page

    async def _registered(self, key: bytes, queue: Events, sent: int) -> bool:
        """Become a follower if no entry is left to read. The lock makes sure that no entry is missed or doubled.

        A stream ends here if a newer one replaced it, or if the coordinator stops.
        """
        async with self._lock:
            if self._stopped or not self.streams.is_newest(key, queue):
                queue.put_nowait(None)
                return True
            if self._stale:
                raise JournalError(self.trouble.why or FAILING)
            if sent < self.run.head_step:
                return False
            self.streams.following[key] = queue
            return True

    async def stop(self) -> None:
        """The coordinator stops: end every stream, and finish the events that were begun."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self.streams.end_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abandon(self) -> None:
        """Another coordinator acts: end every stream and cancel the events that were begun. The journal is not waited for."""
        self._stopped = self._abandoned = True
        if self._timer is not None:
            self._timer.cancel()
        self.streams.end_all()
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

    def _spawned_ended(self, task: asyncio.Task[Refusals]) -> None:
        """A bug of ours is logged with its traceback, and the clock goes on."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error(BUG, step=self.run.head_step, peer="-", exc_info=error)
            self._arm(monotonic_ms() + EVENT_RETRY_MS)

    async def _handle_logged(self, event: Event) -> Refusals:
        try:
            return await self.handle(event)
        except JournalError:  # `trouble` has said it, or another coordinator acts
            return Refusals()

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
