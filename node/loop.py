"""The training run of one peer, to be read from top to bottom.

    Opened     gradient on this peer's samples -> momentum -> votes -> publish
    Committed  everybody's accepted votes -> the same update on every replica -> report the digest
    Agreed     others can start from this snapshot
    Resync     this replica is contradicted: compute again, and stop with the evidence if it stands (node/recovery.py)
    Finished   done

One thread; the network side has its own, and hands over events in order. Bytes only cross between them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

from node import audit
from node.archive.record import Recorder
from node.data.samples import Samples
from node.model.gradients import GradResult
from node.optim.demo import NonFiniteGradient
from node.optim.votes import NotANumber
from node.recovery import Recovery, Stopping
from node.replica import Replica
from node.snapshot.private import PrivateStateError
from node.snapshot.store import PieceStore
from node.swarm.api import Swarm
from node.swarm.events import Agreed, Committed, Failed, Finished, Opened, Resync, Waiting
from node.swarm.session import About
from node.telemetry import StepLog, Summary
from node.uplink import VoteSize
from node.wire.codec import payload_hash
from protos import figures
from protos.assignment import Range
from protos.errors import DivergedError
from protos.identity import public_key_of
from protos.log import Tick
from protos.run_config import RunConfig
from protos.v1 import update_pb2

EVENT_SECONDS_MAX = 0.5
# Own payloads of which nobody has said yet how long they took.
SENT_MAX = 16
# A source is slow if reading took more than this part of the time of as many steps, and more seconds than that.
SLOW_SOURCE_PART = 0.5
SLOW_SOURCE_STEPS = 5
SLOW_SOURCE_SECONDS = 1.0


@dataclass(frozen=True)
class Ready:
    """A gradient that is in `.grad` and not yet voted with, on the samples of `step`."""

    result: GradResult
    seconds: float
    step: int


@dataclass
class Trainer:
    """Everything that a step needs. `stopping` is asked between micro-batches and events. Without `samples` it is an anchor:
    it applies what others voted, and does not train."""

    config: RunConfig
    replica: Replica
    swarm: Swarm
    samples: Samples | None
    store: PieceStore
    private_path: Path
    micro_batch: int
    autocast: Any
    summary: Summary
    steps: StepLog
    stopping: Stopping
    anchored: bool = False
    patience_seconds: float = math.inf
    taking_part: bool = False
    announced_step: int = 0
    ready: Ready | None = None
    vote_size: VoteSize | None = None
    archive: Recorder | None = None
    entered: bool = False
    """Whether the momentum that is here is this peer's, and may be saved."""

    def __post_init__(self) -> None:
        self.sent: dict[bytes, int] = {}
        self.reading: deque[tuple[float, float]] = deque(maxlen=SLOW_SOURCE_STEPS)
        self.told_slow = False
        self.tick: Tick | None = None
        self.log = structlog.get_logger("peer").bind(peer=self.summary.id[-8:])
        self.recovery = Recovery(
            self.replica,
            self.swarm,
            self.store,
            self.private_path.parent,
            self.stopping,
            self.log,
            self.follow,
            agreed_start=self.anchored or self.config.admission.mode != "open",
            patience_seconds=self.patience_seconds,
        )

    # ---- the run -----------------------------------------------------------------------------------------------------

    def enter(self, bootstrap: Sequence[str]) -> None:
        """Join with the initial state, or with the agreed snapshot if the run is past it; then follow."""
        replica = self.replica
        anchor = self.samples is None
        about = About(replica.layout_digest, replica.demo.layout.parameters, self.summary.device, anchor)
        welcome = self.swarm.join(about, bootstrap)
        self.recovery.begin(welcome.snapshots, welcome.head_step)
        try:
            if replica.load_private(self.private_path):
                self.log.info("momentum taken up again", step=replica.step)
        except (PrivateStateError, ValueError) as error:  # not ours, damaged, or of another method
            why = str(error)
            self.log.warning("starting with fresh momentum: the saved one cannot be used", step=replica.step, why=why)
        self.entered = True
        self.follow()

    def run(self) -> bool:
        """Train until the run is finished (True) or `stopping` (False). Raises what the network side fails with."""
        opened: Opened | None = None
        finished = False
        while not self.stopping():
            event = self.swarm.next_event(EVENT_SECONDS_MAX)
            match event:
                case Opened():
                    opened, self.tick = event, event.tick
                case Committed():
                    self._apply(event)
                case Agreed():
                    self.replica.agreed_root = event.snapshot.root
                    self.log.info("snapshot agreed", step=self.replica.step, snapshot=event.snapshot.step)
                case Resync():
                    opened = None
                    self._resync(event)
                case Waiting():
                    self.log.info("waiting", step=self.replica.step, why=event.reason)
                case Finished():
                    finished = True  # a late joiner hears it before it has replayed the log
                case Failed():
                    raise event.error
            if finished and self.replica.step >= self.config.clock.steps:
                return True
            if opened is not None and opened.tick.step == self.replica.step + 1:
                self._contribute(opened)
                opened = None
        return False

    # ---- our votes ---------------------------------------------------------------------------------------------------

    def _contribute(self, opened: Opened) -> None:
        """Gradient, momentum, votes, publish; abstain if the step is decided before we are done.

        With overlap the gradient is that of the step before, at the look-ahead point, on the samples of that step: a step
        takes as long as the slower of computing and exchanging, not as both.
        """
        tick, replica = opened.tick, self.replica
        if self.samples is None:
            return
        if tick.parent_hash != replica.head:
            raise DivergedError(f"step {tick.step} was opened on another log than the one that is applied here")
        if replica.published is not None and replica.published[0] == tick.step:
            self._publish_again(tick.step)
            return
        if not opened.ranges:
            return
        if not self.taking_part:
            self.taking_part = True
            self.log.info("taking part", step=tick.step, peers=len(tick.roster), deadline_ms=opened.deadline_ms)
        ready, self.ready = self.ready, None
        if ready is None or ready.step + 1 != tick.step:  # older: this peer was out of some rosters meanwhile
            ready = self._gradients(opened)
        if ready is not None:
            self._publish(opened, ready)
        if self.config.optimizer.overlap and replica.demo.pending:
            # while the others exchange this step: the gradient of the next one, where it is likely to begin
            with replica.demo.ahead(tick.lr):
                self.ready = self._gradients(opened, late=True)

    def _gradients(self, opened: Opened, late: bool = False) -> Ready | None:
        """What our samples say, in `.grad`; None if the step was decided meanwhile (unless it is for the next), or for NaN."""
        tick, replica, samples = opened.tick, self.replica, self.samples
        assert samples is not None, "an anchor does not train"
        started = time.monotonic()

        def decided() -> bool:
            return self.stopping() or (not late and self.swarm.committed_step >= tick.step)

        factor = tick.lr / self.config.optimizer.lr
        read_before = samples.reading_seconds
        try:
            result = replica.gradients(samples, opened.ranges or (), self.micro_batch, self.autocast, decided, factor)
        except NonFiniteGradient as error:
            self._abstain(tick.step, error, tell=not late)
            return None
        self._note_reading(samples.reading_seconds - read_before, time.monotonic() - started)
        if not result.samples or decided():
            self.log.info("too late for this step", step=tick.step, samples=result.samples)
            return None
        return Ready(result, time.monotonic() - started, tick.step)

    def _note_reading(self, reading: float, whole: float) -> None:
        """Count the time that the data took, and say so once where it is most of a few steps'."""
        self.summary.reading_seconds += reading
        self.reading.append((reading, whole))
        if self.told_slow or len(self.reading) < SLOW_SOURCE_STEPS:
            return
        read, all_of_it = (sum(times) for times in zip(*self.reading, strict=True))
        if read > max(SLOW_SOURCE_PART * all_of_it, SLOW_SOURCE_SECONDS):
            self.told_slow = True
            self.log.warning(
                "the data source is slow: this peer gets fewer samples than it could compute; a local disk is faster",
                step=self.replica.step,
                reading_percent=round(100 * read / all_of_it),
            )

    def _abstain(self, step: int, error: ArithmeticError, tell: bool = True) -> None:
        """`tell`: not for a gradient that was to be of the next step: that step computes its own."""
        self.log.warning("abstaining: the gradient is not finite", step=step, why=str(error))
        if tell:
            self.swarm.abstained(step, str(error))

    def _fit_uplink(self, computed_ms: float) -> None:
        """Vote with as many bytes as the others get in time."""
        assert self.vote_size is not None
        for sha256, size in list(self.sent.items()):
            took = self.swarm.counters.arrivals.milliseconds(sha256)
            if took is not None:
                self.vote_size.arrived(size, took)
                del self.sent[sha256]
        self.vote_size.computed(computed_ms)
        before, size = self.replica.size, self.vote_size.choose()
        if size != before:
            self.log.info("votes fit the uplink", step=self.replica.step, size=size, before=before)
            self.replica.size = size

    def _publish(self, opened: Opened, ready: Ready) -> None:
        tick, result = opened.tick, ready.result
        started = time.monotonic()
        if self.vote_size is not None:
            self._fit_uplink(1000 * ready.seconds)
        try:
            data = self.replica.vote(tick.step, tick.lr)
        except (NonFiniteGradient, NotANumber) as error:
            self._abstain(tick.step, error)
            return
        announcement = update_pb2.Announcement(
            step=tick.step,
            parent_hash=tick.parent_hash,
            samples=result.samples,
            tokens=result.tokens,
            loss=result.loss_mean,
            compute_ms=int((ready.seconds + time.monotonic() - started) * 1000),
        )
        self.replica.announcement, self.announced_step = announcement.SerializeToString(), tick.step
        self.swarm.publish(data, announcement)
        self.summary.tokens += result.tokens
        if self.vote_size is not None:
            self.sent[payload_hash(data)] = self.replica.size
            while len(self.sent) > SENT_MAX:
                del self.sent[next(iter(self.sent))]

    def _publish_again(self, step: int) -> None:
        """Votes that an earlier life of this peer computed for the step that is still open: they are as good as new."""
        if self.announced_step == step:
            return
        data = self.replica.open_payload()
        if data is not None:
            self.announced_step = step
            self.log.info("publishing the open votes again", step=step)
            self.swarm.publish(data, update_pb2.Announcement.FromString(self.replica.announcement))

    # ---- everybody's votes -------------------------------------------------------------------------------------------

    def _apply(self, event: Committed) -> None:
        entry, replica = event.signed.entry, self.replica
        if entry.step <= replica.step:
            return  # of a following that was stopped
        if entry.step > replica.step + 1:
            self._resync(Resync(None, f"entry {entry.step} came after the state of step {replica.step}", lost=True))
            return
        if not self.recovery.agrees(event.signed):
            self._started_again()
            return
        if self.config.trust.enabled:
            self._check(event)
        accepted = replica.apply(event.signed, event.updates)
        if self.archive is not None:
            self.archive.record(replica, event.signed, event.payloads, event.announcements)
        digest = replica.digest()
        self.recovery.reached(replica.step, digest)
        self.swarm.applied(replica.step, digest)
        self._note(event, accepted, digest)
        if replica.step % self.config.clock.snapshot_every == 0 or replica.step == self.config.clock.steps:
            self.store_snapshot()

    def _check(self, event: Committed) -> None:
        """Look at others' votes where the entry draws us to, at the state on which they were computed."""
        demo, samples = self.replica.demo, self.samples
        me = public_key_of(self.summary.id)
        mine = [] if self.tick is None else audit.due(me, self.config.trust, self.tick, event.signed)
        if self.tick is None or samples is None or not mine:
            return

        def gradient(ranges: tuple[Range, ...]) -> Tensor:
            over = self.replica.mean_gradient(samples, ranges, self.micro_batch, self.autocast, self.stopping)
            if over.samples < sum(map(len, ranges)):
                raise audit.NoGradient("this peer is about to stop")
            return audit.transformed(demo.layout, self.replica.whole_gradients(), demo.config.transform)

        try:
            votes = {
                key: audit.seen_votes(demo.config.form, update.votes, update.size, demo.layout.chunks)
                for key, update in event.by_author.items()
            }
            found = audit.verdicts(me, mine, self.config.trust, self.tick, event.signed, votes, gradient)
        except audit.NoGradient as error:
            self.log.info("no check: the gradient cannot be had", step=event.signed.entry.step, why=str(error))
            return
        if found:
            self.swarm.found(found)
            self.log.info("checked", step=event.signed.entry.step, peers=len(found))

    def _note(self, event: Committed, accepted: bool, digest: bytes) -> None:
        entry, summary = event.signed.entry, self.summary
        tokens = sum(c.tokens for c in entry.contributions)
        loss = figures.loss_of(entry.contributions, summary.loss)
        summary.step, summary.loss = entry.step, loss
        summary.steps_applied += 1
        summary.votes_accepted += accepted
        summary.take(self.swarm.counters)
        peers = len(entry.contributions)
        self.log.info("step", step=entry.step, loss=round(loss, 4), lr=entry.lr, peers=peers, accepted=accepted)
        self.steps.write(
            step=entry.step,
            digest=digest.hex(),
            entry=event.signed.hash.hex(),
            loss=loss,
            lr=entry.lr,
            peers=peers,
            accepted=accepted,
            tokens=tokens,
            payload_bytes=sum(c.payload_bytes for c in entry.contributions),
        )

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def store_snapshot(self) -> None:
        """Keep the state for those who come later, and our momentum for ourselves."""
        manifest = self.replica.snapshot(self.store)
        self.swarm.stored(manifest.step, manifest.root, manifest.total_bytes)
        self.replica.save_private(self.private_path)

    def _resync(self, event: Resync) -> None:
        """The coordinator contradicts this peer's state, or votes that the log names are lost."""
        at = self.replica.step
        if event.lost:
            self.recovery.lost(event.reason)
        else:
            self.recovery.told(event)
        if self.replica.step != at:
            self._started_again()

    def _started_again(self) -> None:
        """The replica is at another state: what was computed on the one before is for nothing."""
        self.summary.resyncs += 1
        self.taking_part, self.ready = False, None

    def follow(self, store: bool = True) -> None:
        """Follow the log from the state that is here, and say which it is; with `store`, that its snapshot can be had here."""
        replica = self.replica
        self.summary.step = replica.step
        if self.archive is not None:
            self.archive.begin(replica)
        self.recovery.reached(replica.step, replica.digest())
        self.swarm.applied(replica.step, replica.digest())
        if store:
            manifest = self.replica.snapshot(self.store)
            self.swarm.stored(manifest.step, manifest.root, manifest.total_bytes)
        self.swarm.follow_from(replica.step, replica.head)
