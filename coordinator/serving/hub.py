"""All runs of one coordinator. The hub restores them from the journal, creates new ones for the operator, and describes them.

A coordinator that stands by has no runs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from coordinator.clock.state import Peer, PeerPhase, Phase, Run
from coordinator.clock.trust import Standing
from coordinator.serving import following
from coordinator.serving.event_loop import RunRuntime
from coordinator.serving.following import LogPages
from coordinator.serving.metrics import Failures, Metrics, StepTraces
from coordinator.store.checkpoint import Folded, FoldedRuns, run_of
from coordinator.store.journal import Journal, JournalError
from coordinator.store.wait_queues import Line, QueuePace, WaitQueues, waiting
from protos.accounts import owner_body
from protos.address import is_relayed
from protos.clocks import monotonic_ms
from protos.disk import DiskError
from protos.identity import Identity
from protos.log import run_id_of
from protos.run_facts import STATUS_EXCLUSIONS_MAX, STATUS_PEERS_MAX
from protos.start import StartingState
from protos.tracing import Tracing
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2

# A run of many peers changes with each report. The description takes milliseconds, and strangers may ask for it.
DESCRIBED_PEERS_MIN = 64
DESCRIBED_MS_MAX = 1_000
LINES_SECONDS = 1.0
ANOTHER_ACTS = "another coordinator acts now: ask it whether this is done"

_PHASES = {
    Phase.WAITING: pb.Phase.PHASE_WAITING,
    Phase.OPEN: pb.Phase.PHASE_OPEN,
    Phase.FINISHED: pb.Phase.PHASE_FINISHED,
}
_PEER_PHASES = {
    PeerPhase.SYNCING: pb.PeerPhase.PEER_PHASE_SYNCING,
    PeerPhase.READY: pb.PeerPhase.PEER_PHASE_READY,
    PeerPhase.ABSENT: pb.PeerPhase.PEER_PHASE_ABSENT,
}


class Hub:
    """Runs by run id. One writer thread: records of one run are never written out of order."""

    def __init__(self, journal: Journal, identity: Identity, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self.identity = identity
        self._tracing = tracing
        self.metrics = metrics
        self.runs: dict[bytes, RunRuntime] = {}
        self.left_out: dict[bytes, str] = {}
        """Runs of the journal that cannot be read, and why."""
        self.deleted: set[bytes] = set()
        """Ids of the runs that the operator deleted. No run gets one of these ids again."""
        self.noted: Callable[[bytes, str], None] = lambda run_id, name: None
        """The hub calls this for each run that it is going to serve, with the run's name. DiskError."""
        self.held = False
        """The journal comes from a backup, and the operator has not said that its log is whole."""
        self.stands_by: str | None = None
        """Why this coordinator does not act; None while it does."""
        self.coordinators: tuple[str, ...] = ()
        """The addresses of all coordinators, the acting one first; empty if there is only one."""
        self.failures = Failures(metrics)
        """What kept peers from joining."""
        self.lines = WaitQueues()
        """The lines before full runs."""
        self._writing_lines: asyncio.Task[None] | None = None
        self._genesis: dict[bytes, log_pb2.Genesis] = {}
        self._journal = self._acting = journal
        self._fenced: Callable[[], None] = lambda: None
        self._io = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._reading = LogPages(journal.reader())
        self._purging: asyncio.Task[None] | None = None
        self._working: set[asyncio.Task[None]] = set()
        self._described: dict[bytes, tuple[Run, pb.GetRunResponse, int]] = {}

    def restore(self) -> None:
        """Read every run back from the journal, and act. Called inside the event loop, before serving."""
        folds = FoldedRuns(self._journal)
        folds.catch_up()
        self.act(folds, self._journal, lambda: None, self._journal.lines())

    def act(
        self, folds: FoldedRuns, journal: Journal, fenced: Callable[[], None], lines: Mapping[bytes, bytes]
    ) -> None:
        """Continue the runs and lines that were read, and write to `journal`. The hub calls `fenced` if the journal refuses for
        good."""
        self._acting, self._fenced, self.stands_by = journal, fenced, None
        self.lines = WaitQueues(monotonic_ms(), lines)
        self.metrics.acts.set(1)
        for folded in folds.runs():
            folded.held = self.held
            self.noted(folded.run.run_id, folded.run.config.name)
            self._add(folded)
        self.deleted = set(folds.deleted)
        self._purging = asyncio.ensure_future(self._purge(journal)) if self.deleted else None
        self.left_out = folds.left_out
        for run_id, why in self.left_out.items():
            where, name = journal.place, run_id.hex()[:16]
            log = structlog.get_logger("coordinator")
            log.error(
                "a run in the journal cannot be read, so it is not served",
                journal=where,
                run=name,
                why=why,
                step="-",
                peer="-",
            )

    def stand_by(self, reason: str) -> None:
        """Act no more, at once. A write in progress may succeed or not: this coordinator tells no peer.

        The coordinator waits for nothing, because the database may not answer.
        """
        self.stands_by = reason
        self.metrics.acts.set(0)
        self._end_purging()
        for task in (*self._working, *filter(None, (self._writing_lines,))):
            task.cancel()
        runs, self.runs, self._genesis, self._described = list(self.runs.values()), {}, {}, {}
        for runtime in runs:
            runtime.abandon()
        self._io.shutdown(wait=False, cancel_futures=True)
        self._io = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def _end_purging(self) -> None:
        if self._purging is not None:
            self._purging.cancel()

    def genesis(self, run_id: bytes) -> log_pb2.Genesis:
        """The definition of a run of `runs`."""
        return self._genesis[run_id]

    async def create_run(self, genesis: log_pb2.Genesis) -> bytes:
        """Journal a new run and serve it; returns its id. JournalError."""
        run_id = run_id_of(genesis)
        await self._to_its_end(self._create(run_id, genesis))
        return run_id

    async def _create(self, run_id: bytes, genesis: log_pb2.Genesis) -> None:
        await self._journalled(Journal.create_run, run_id, genesis)
        folded = Folded(genesis, run_of(run_id, genesis))
        try:
            self.noted(run_id, folded.run.config.name)
        except DiskError as error:  # the journal has the run; the home notes it with the next one, or at the next start
            log = structlog.get_logger("coordinator").bind(run=run_id.hex()[:16], step=0, peer="-")
            log.warning("a new run is served, and not noted in this home yet", why=str(error))
        self._add(folded)

    async def delete_run(self, run_id: bytes) -> None:
        """The run is gone for ever: its peers' streams end, and its records leave the journal one by one. JournalError."""
        await self._to_its_end(self._delete(run_id))

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """A caller that hangs up ends nothing half-way: what is in the journal is served, and what is not there is not."""
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._worked)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `stand_by`, which waits for no write
                raise JournalError(ANOTHER_ACTS) from None
            raise

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that hung up does not read it, and asyncio would log it

    async def _journalled(self, write: Callable[..., None], *what: Any) -> None:
        journal = self._acting
        await asyncio.get_running_loop().run_in_executor(self._io, write, journal, *what)
        if journal is not self._acting or self.stands_by is not None:
            raise JournalError(ANOTHER_ACTS)

    async def _delete(self, run_id: bytes) -> None:
        await self._journalled(Journal.delete_run, run_id)
        self.deleted.add(run_id)
        runtime = self.runs.pop(run_id, None)
        self._genesis.pop(run_id, None)
        self._described.pop(run_id, None)
        self.metrics.forget(run_id)
        self.failures.forget(run_id)
        self.keep_line(run_id, {}, 0)
        if runtime is not None:
            runtime.abandon()
        if self._purging is None or self._purging.done():
            self._purging = asyncio.ensure_future(self._purge(self._acting))

    def keep_line(self, run_id: bytes, line: Line, now_ms: int) -> QueuePace | None:
        """The line before a run is this now; returns its pace. The journal gets it later: no question waits."""
        pace = self.lines.keep(run_id, line, now_ms)
        self._begin_writing_lines()
        return pace

    def _begin_writing_lines(self) -> None:
        if self.lines.changed and (self._writing_lines is None or self._writing_lines.done()):
            self._writing_lines = asyncio.ensure_future(self._write_lines(self._acting, self.lines))

    async def _write_lines(self, journal: Journal, lines: WaitQueues) -> None:
        """Write until nothing is new, at most once in LINES_SECONDS, however often strangers come and go."""
        said = ""
        while changed := lines.changed:
            for run_id in changed:
                try:
                    await self._write_line(journal, lines, run_id)
                except JournalError as error:
                    if str(error) != said:  # it is tried again, and a full disk may last
                        log = structlog.get_logger("coordinator")
                        log.warning("the line before a full run is not kept", step=0, peer="-", why=str(error))
                    said = str(error)
            await asyncio.sleep(LINES_SECONDS)

    async def _write_line(self, journal: Journal, lines: WaitQueues, run_id: bytes) -> None:
        body = lines.taken(run_id)
        try:
            await asyncio.get_running_loop().run_in_executor(self._io, journal.keep_line, run_id, body)
        except (asyncio.CancelledError, JournalError):
            lines.unwritten(run_id)
            raise

    async def _end_lines(self) -> None:
        """Write what is new at once: this coordinator stops, and may still write."""
        if self._writing_lines is not None:
            self._writing_lines.cancel()
            await asyncio.gather(self._writing_lines, return_exceptions=True)
            self._writing_lines = None
        for run_id in self.lines.changed:
            with suppress(JournalError):
                await self._write_line(self._acting, self.lines, run_id)

    async def _purge(self, journal: Journal) -> None:
        """Delete the rows of deleted runs, a few at a time, so that other runs can write. The next start goes on with it."""
        try:
            while await asyncio.get_running_loop().run_in_executor(self._io, journal.purge):
                pass
        except JournalError as error:
            log = structlog.get_logger("coordinator").bind(step="-", peer="-")
            log.warning("rows of a deleted run are still in the journal; the next start deletes them", why=str(error))

    async def states(self, run: Run) -> list[StartingState]:
        """The states of a run that a fork can begin at, oldest first. JournalError, Refusal."""
        return await self._reading.states(run.run_id, self.identity.public_key, dict(run.agreed_digests))

    def _add(self, folded: Folded) -> None:
        run_id = folded.run.run_id
        self._genesis[run_id] = folded.genesis
        traces = StepTraces(self._tracing, run_id, partial(self.metrics.took, run_id.hex()[:16]))
        self.runs[run_id] = RunRuntime(
            folded, self._acting, self.identity, self.metrics, self._io, self._fenced, self._reading, traces
        )
        self.metrics.observe(self.runs[run_id].run)

    async def stop(self) -> None:
        """End every stream; nothing more is written after this."""
        await asyncio.gather(*self._working, return_exceptions=True)
        self._end_purging()
        if self.stands_by is None:
            await self._end_lines()
        await asyncio.gather(*(runtime.stop() for runtime in self.runs.values()))

    def close(self) -> None:
        """Release the journal."""
        self._io.shutdown(wait=True)
        self._reading.close()
        self._journal.close()

    def describe(self, runtime: RunRuntime) -> pb.GetRunResponse:
        """The facts that `status` prints, without bootstrap addresses. The facts of a large run are at most DESCRIBED_MS_MAX
        old."""
        run, now_ms = runtime.run, monotonic_ms()
        before, made, made_ms = self._described.get(run.run_id, (None, pb.GetRunResponse(), 0))
        fresh = len(run.peers) > DESCRIBED_PEERS_MIN and now_ms - made_ms < DESCRIBED_MS_MAX
        if before is None or (before is not run and not fresh):
            made = self._facts(runtime)
            self._described[run.run_id] = run, made, now_ms
        answer = pb.GetRunResponse()
        answer.CopyFrom(made)
        answer.reason = runtime.trouble.why or answer.reason
        answer.failures.extend(self.failures.of(run.run_id))
        answer.in_line = len(waiting(self.lines.of(run.run_id), run, now_ms))
        return answer

    def _facts(self, runtime: RunRuntime) -> pb.GetRunResponse:
        run = runtime.run
        peers = sorted(run.peers.values(), key=lambda peer: (peer.phase is PeerPhase.ABSENT, peer.public_key))
        snapshot = following.snapshot_ref(run, run.snapshot) if run.snapshot else None
        holders = 0 if snapshot is None else len(snapshot.holders)
        return pb.GetRunResponse(
            genesis=self._genesis[run.run_id],
            phase=_PHASES[run.phase],
            head_step=run.head_step,
            head_hash=run.head_hash,
            total_steps=run.steps,
            snapshot=snapshot,
            peers=[_status(run, peer, holders) for peer in peers[:STATUS_PEERS_MAX]],
            loss=run.loss,
            reason=run.reason,
            payload_bytes_total=run.payload_bytes_total,
            exclusions=_exclusions(run),
            earlier=following.earlier_snapshots(run),
            withdrawn=following.withdrawn_of(run),
            anchored=run.anchored,
            parameters=run.parameters,
            unconfirmed_steps=run.unconfirmed_steps,
            paused=run.is_paused,
            end=following.end_of(run, self.identity),
            archived=run.archived,
            changed=following.changed_of(run),
            evaluations=[envelope for _, by in sorted(run.evaluations.items()) for envelope in by.values()],
        )


def _status(run: Run, peer: Peer, holders: int) -> pb.PeerStatus:
    return pb.PeerStatus(
        public_key=peer.public_key,
        phase=_PEER_PHASES[peer.phase],
        device=peer.device,
        software_version=peer.software_version,
        applied_step=max(peer.applied_step, 0),
        state_digest=_public_digest(run, peer),
        anchor=peer.anchor,
        paused=peer.is_paused,
        votes_accepted=peer.votes_accepted,
        samples_per_second=peer.samples_per_second,
        loss=peer.loss,
        owner=owner_body(peer.owner) if peer.owner.name else None,
        relayed=is_relayed(peer.addresses),
        **_standing(run, peer, holders),
    )


def _public_digest(run: Run, peer: Peer) -> bytes:
    """A peer's state digest, once the step's digest is agreed. Before that, another peer could copy the digest."""
    return peer.state_digest if peer.applied_step in run.agreed_digests else b""


def _standing(run: Run, peer: Peer, holders: int) -> dict[str, Any]:
    """Whether a peer's votes count, and the results of its checks, in a run with checks; and why it has none now. `holders`:
    the peers that are here and have the newest snapshot."""
    standing, idle = run.standings.get(peer.public_key, Standing()), _idle(run, peer, holders)
    if not run.config.trust.enabled:
        return {
            "standing": "excluded" if standing.excluded else "counted",
            "standing_reason": standing.excluded or idle,
        }
    checks = standing.progress(run.config.trust.probation_steps)
    return {
        "score": standing.score,
        "check_permille": standing.check_permille,
        "standing": standing.name,
        "standing_reason": standing.excluded or "; ".join(filter(None, (checks, idle))),
    }


def _idle(run: Run, peer: Peer, holders: int) -> str:
    """Why a peer that is here has no votes now; empty if it has, or if its owner has paused it."""
    if not peer.is_here or peer.is_paused:
        return ""
    if peer.phase is not PeerPhase.SYNCING:
        return "" if peer.silence is None else f"no votes of step {peer.silence[0]}: {peer.silence[1]}"
    if peer.applied_step >= 0:
        return f"{run.head_step - peer.applied_step} steps behind"
    again = "its state differed from the agreed one: it computes or " if peer.contradicted else ""
    if run.snapshot is None or not run.snapshot.step:
        return f"{again}builds the model"
    many = f"{holders} or more" if holders >= following.SNAPSHOT_HOLDERS_MAX else holders or "none"
    return f"{again}gets the state of step {run.snapshot.step}, which {many} of the peers that are here have"


def _exclusions(run: Run) -> list[pb.ExcludedPeer]:
    """The newest exclusions, oldest first. Exclusions that the next entry has to state come last."""
    found = [(key, standing) for key, standing in run.standings.items() if standing.excluded]
    found.sort(key=lambda one: (one[1].logged_step or run.head_step + 1, one[0]))
    return [
        pb.ExcludedPeer(
            public_key=key,
            step=standing.logged_step,
            reason=standing.excluded,
            proven=standing.equivocation is not None,
            by_operator=standing.by_operator,
        )
        for key, standing in found[-STATUS_EXCLUSIONS_MAX:]
    ]
