"""The training run of one peer, to be read from top to bottom.

    Opened     gradient on this peer's samples -> momentum -> votes -> publish
    Committed  all accepted votes -> the same update on every replica -> report the digest
    Agreed     joining peers can start from this snapshot
    Ended      the operator ended the run: store this state (progress.py)
    Resync     the log contradicts this replica: compute again; if the state stands, stop with the evidence (recovery.py)
    Finished   the run has made all of its steps.

The loop has one thread. The network side has its own thread and hands over events in order. Only bytes cross between them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from node.control.control_server import OwnerRequests
from node.control.vote_history import VoteHistory
from node.data.samples import PacedSamples, Samples
from node.mirror.snapshot_mirrors import SnapshotPlaces
from node.optim.step import NonFiniteGradient
from node.optim.votes.groups import NotANumber
from node.snapshot.pieces import SnapshotManifest
from node.snapshot.store import SnapshotStore, stores
from node.swarm.api import Swarm
from node.swarm.facts import Agreed, Committed, Ended, Event, Failed, Finished, NotCounted, Opened, Resync, Waiting
from node.swarm.membership import JoinFacts
from node.training.fork_start import Start
from node.training.held_out import Evaluator
from node.training.keeper import Keeper, StepRecorder
from node.training.maker import NOT_FINITE, NoVotes, PendingGradient, check_loss
from node.training.progress import Activity, DigestReporter, EffectiveSettings, LastStep, apply_end, move
from node.training.recovery import Recovery, Stopping
from node.training.replica import Replica
from node.training.resource_limits import Throttle
from node.training.telemetry import Spans, StepLog, Summary
from node.training.uplink import VoteSize
from node.training.vote_checks import Checker
from protos.accounts import loss_of, rate
from protos.errors import DivergedError
from protos.identity import public_key_of
from protos.log import SignedEntry
from protos.run_config import RunConfig
from protos.slices import hash_of
from protos.v1 import update_pb2

EVENT_SECONDS_MAX = 0.5


@dataclass
class Trainer:
    """Everything that a step needs. It asks `stopping` between micro-batches and events. One without `samples` is an anchor."""

    config: RunConfig
    replica: Replica
    swarm: Swarm
    samples: Samples | None
    store: SnapshotStore
    private_path: Path
    micro_batch: int
    autocast: Any
    summary: Summary
    steps: StepLog
    stopping: Stopping
    anchored: bool = False
    patience_seconds: float = math.inf
    announced_step: int = 0
    ready: PendingGradient | None = None
    vote_size: VoteSize | None = None
    archive: StepRecorder | None = None
    evaluator: Evaluator | None = None
    activity: Activity = Activity.LOADING
    behind: bool = True  # a thread of its own writes snapshots and momentum
    places: SnapshotPlaces = field(default_factory=SnapshotPlaces)
    start: Start | None = None  # of a fork: the state of another run that it begins at
    wishes: OwnerRequests = field(default_factory=OwnerRequests)
    standing: VoteHistory = field(default_factory=VoteHistory)
    throttle: Throttle = field(default_factory=Throttle)
    spans: Spans = field(default_factory=Spans)
    opened: Opened | None = None  # the open step, until this peer has done its part

    def __post_init__(self) -> None:
        run, self.log = self.replica.run_id, structlog.get_logger("peer").bind(peer=self.summary.id[-8:])
        self.source, self.last = PacedSamples(self.log), LastStep(self.config.clock.steps)
        self.terms = EffectiveSettings(self.config, self.last)
        self.keeper = Keeper(
            self.replica, self.store, self.private_path, self._stored, self.log, behind=self.behind, spans=self.spans,
            snapshots_kept=self.places.kept, mirror=self.places.writer(run, self.store, self.log) if self.is_anchor else None,
        )  # fmt: skip
        self.recovery = Recovery(
            self.replica, self.swarm, self.store, self.keeper, self.private_path.parent, self.stopping, self.log, self.follow,
            agreed_start=self.anchored or self.config.admission.mode != "open", patience_seconds=self.patience_seconds,
            start=self.start, mirrors=lambda: self.places.reader(self.terms.mirrors, run, self.log, self.swarm.loaded),
        )  # fmt: skip
        self.reached, self.checker = DigestReporter(self.replica, self.swarm, self.recovery), None
        if self.config.trust.enabled and self.samples is not None and self.replica.maker.checker:
            self.checker = Checker(
                public_key_of(self.summary.id), self.config.trust, self.replica, self.samples, self.swarm,
                self.micro_batch, self.autocast, self.stopping, self.log,
            )  # fmt: skip

    @property
    def is_anchor(self) -> bool:
        """Whether this peer applies votes only."""
        return self.samples is None

    @property
    def entered(self) -> bool:
        """Whether this peer's momentum is loaded, so that it may be saved."""
        return self.activity is not Activity.LOADING

    def enter(self, bootstrap: Sequence[str]) -> None:
        """Join with the initial state, or with the agreed snapshot if the run is past it; then follow."""
        replica = self.replica
        about = JoinFacts(replica.layout_digest, replica.demo.layout.parameters, self.summary.seen, self.is_anchor)
        welcome = self.swarm.join(about, bootstrap, self.patience_seconds)
        self.terms.told(welcome.settings, welcome.head_step, quiet=True)
        self.recovery.begin(welcome.snapshots, welcome.head_step)
        if not self.is_anchor:  # what a peer with an anchor's home saved stays for that peer
            self.keeper.take_up()
        self.activity = move(self.activity, Activity.FOLLOWING)
        self.follow()

    def run(self) -> bool:
        """Train until the run is finished (True), or until `stopping` or the owner's wish (False). Raises network errors."""
        while not self.stopping():
            with self.throttle.resting():
                event = self.swarm.next_event(EVENT_SECONDS_MAX)
            if not isinstance(event, Opened):
                self.reached.settle()
            self.keeper.check()
            self.throttle.refresh()
            self._sync_pause()
            self.handle(event)
            over = self.last.is_over(self.replica.step, awaits=self.evaluator is not None)
            if over or self.wishes.ends(awaits_entry=self.announced_step > self.replica.step):
                break
            unwanted = self.activity is Activity.PAUSED or self.wishes.ending is not None
            if self.opened is not None and self.opened.tick.step == self.replica.step + 1 and not unwanted:
                self._contribute(self.opened)
                self.reached.settle()
                if not self.wishes.paused:  # else the step may still be open when the owner lets this peer go on
                    self.opened = None
        return self.last.is_here(self.replica.step)

    def handle(self, event: Event | None) -> None:
        match event:
            case Opened():
                self.opened = event
                self.spans.opened(event)
                self.standing.opened(event.tick.step, self.replica.step, asked=bool(event.ranges))
                if self.checker is not None:
                    self.checker.opened(event.tick)
            case Committed():
                self._apply(event)
            case Agreed():
                self.last.agreed = event.snapshot.step
                root = event.snapshot.root if self.start is None else self.start.stored(event.snapshot.root)
                self.keeper.agreed(event.snapshot.step, root, event.snapshot.root)
                if self.evaluator is not None:
                    self.evaluator.agreed(event.snapshot.step, root, self.last.step)
                self.log.info("snapshot agreed", step=self.replica.step, snapshot=event.snapshot.step)
            case Resync():
                self.opened = None
                self._resync(event)
            case Waiting() | NotCounted():
                self.standing.told(event)
                self.log.info(event.words, step=self.replica.step, why=event.reason)
            case Ended():
                self.opened = None
                apply_end(event, self.last, self.replica, self.keeper, self.archive)
            case Finished():
                self.last.finished = True  # a late joiner hears it before it has replayed the log
            case Failed():
                self.last.failed(event.error, self.replica.step)

    def _sync_pause(self) -> None:
        """Tell the coordinator if the owner or a condition has paused this peer, or lets it take part again."""
        paused, opened = self.wishes.paused, self.opened
        if paused == (self.activity is Activity.PAUSED) or self.is_anchor:
            return
        self.activity = move(self.activity, Activity.PAUSED if paused else Activity.FOLLOWING)
        self.swarm.paused(paused)
        self.standing.paused = paused
        if paused and opened is not None and opened.ranges and self.announced_step < opened.tick.step:
            self.standing.skipped(opened.tick.step, f"{self.wishes.words()}, during the step", "paused")
        if paused:
            self.ready = None
            self.replica.rest()
        self.log.info("paused" if paused else "goes on", step=self.replica.step, why=self.wishes.words())

    def _contribute(self, opened: Opened) -> None:
        """Compute the gradient, then the votes, and publish them; abstain if the step is decided first. With overlap the
        gradient is that of the step before, at the look-ahead parameters, on the samples of that step."""
        tick, replica = opened.tick, self.replica
        if self.samples is None:
            return
        if tick.parent_hash != replica.head:
            raise DivergedError(
                f"the coordinator opened step {tick.step} on a different log (head {tick.parent_hash.hex()[:16]}) than the one "
                f"that this peer has applied (head {replica.head.hex()[:16]}). Run `swarmentum status` and compare the head; "
                "if the other peers agree with the coordinator, delete this run's folder and join again"
            )
        if replica.published is not None and replica.published[0] == tick.step:
            self._publish_again(tick.step)
            return
        if not opened.ranges:
            return
        if away := self.swarm.voteless(tick.step) or self.samples.away(opened.ranges):
            self._abstain(tick.step, NoVotes(away))
            return
        if self.activity is Activity.FOLLOWING:
            self.activity = move(self.activity, Activity.VOTING)
            self.log.info("taking part", step=tick.step, peers=len(tick.roster), deadline_ms=opened.deadline_ms)
        ready, self.ready = self.ready, None
        if ready is None or ready.step + 1 != tick.step:  # older: this peer was out of some rosters meanwhile
            ready = self._gradients(opened)
        if ready is not None:
            self._publish(opened, ready)
        if self.config.optimizer.overlap and replica.demo.pending:
            with replica.ahead(tick.lr):
                self.ready = self._gradients(opened, late=True)

    def _gradients(self, opened: Opened, late: bool = False) -> PendingGradient | None:
        """The gradient of this peer's samples, in `.grad`. None for NaN, or if the step is decided (unless `late`)."""
        tick, replica, samples = opened.tick, self.replica, self.samples
        assert samples is not None, "an anchor does not train"
        started, before, over = time.monotonic(), samples.reading_seconds, False

        def decided() -> bool:
            nonlocal over  # it stays so: what stopped half-way is no gradient, even if the owner lets the peer go on
            over |= self.stopping() or self.wishes.paused or (not late and self.swarm.committed_step >= tick.step)
            return over

        stops, rates = self.throttle.resting_until(decided), (tick.lr / self.config.optimizer.lr, tick.lr)
        replica.maker.begin(tick.step, tick.lr, decided)
        try:
            with self.spans.timed(tick.step, "compute", ahead=late):
                result = replica.gradients(samples, opened.ranges or (), self.micro_batch, self.autocast, stops, *rates)
        except (NonFiniteGradient, NoVotes) as error:
            self._abstain(tick.step, error, tell=not late)
            return None
        self.summary.reading_seconds += (reading := samples.reading_seconds - before)
        self.source.noted(reading, time.monotonic() - started, replica.step)
        if not result.samples or decided():
            why = self.wishes.words() if self.wishes.paused else "too late for this step"
            self.standing.late(tick.step, result.samples, opened.ranges or (), time.monotonic() - started)
            self.log.info("no votes", step=tick.step, samples=result.samples, why=why)
            return None
        return PendingGradient(result, time.monotonic() - started, tick.step)

    def _abstain(self, step: int, error: ArithmeticError | NoVotes, tell: bool = True) -> None:
        """Skip a step. `tell` the coordinator, unless the gradient was for the next step: that step computes its own."""
        voteless = isinstance(error, NoVotes)
        why = str(error) if voteless else f"{NOT_FINITE}: {error}"
        log = self.log.info if voteless else self.log.warning
        log("no votes" if voteless else "skipping this step", step=step, why=why)
        if tell:
            self.standing.skipped(step, why)
            self.swarm.abstained(step, str(error), not_finite=not voteless)

    def _publish(self, opened: Opened, ready: PendingGradient) -> None:
        tick, result, started = opened.tick, ready.result, time.monotonic()
        if self.vote_size is not None:
            took, ms, before = self.swarm.counters.arrivals.took, 1000 * ready.seconds, self.replica.size
            self.replica.size = size = self.vote_size.fit(took, ms, self.terms.clock, len(tick.roster))
            if size != before:
                self.log.info("votes fit the uplink", step=tick.step, size=size, before=before)
        try:
            check_loss(result.loss_mean)
            with self.spans.timed(tick.step, "vote"):
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
        with self.spans.timed(tick.step, "publish", payload_bytes=len(data)):
            self.swarm.publish(data, announcement)
        self.standing.announced(tick.step, result.samples, result.tokens)
        self.summary.tokens += result.tokens
        if self.vote_size is not None:
            self.vote_size.sent(hash_of(data, self.replica.ranges), self.replica.size)

    def _publish_again(self, step: int) -> None:
        """Publish votes that this peer computed before a restart, for a step that is still open."""
        if self.announced_step != step and (data := self.replica.open_payload()) is not None:
            announcement = update_pb2.Announcement.FromString(self.replica.announcement)
            try:
                check_loss(announcement.loss)
            except NonFiniteGradient as error:  # an earlier version published them, and no coordinator takes them
                self._abstain(step, error)
                return
            self.announced_step = step
            self.log.info("publishing the open votes again", step=step)
            self.swarm.publish(data, announcement)

    def _apply(self, event: Committed) -> None:
        entry, replica = event.signed.entry, self.replica
        if entry.step <= replica.step:
            return  # an entry from before the last re-sync
        if entry.step > replica.step + 1:
            self._resync(Resync(None, f"entry {entry.step} came after the state of step {replica.step}", lost=True))
            return
        if not self.recovery.agrees(event.signed):
            self._started_again()
            return
        self.spans.decided(event)
        if self.checker is not None:
            with self.spans.timed(entry.step, "check"):
                self.checker.check(event)
        self.terms.told(entry.settings, entry.step)
        with self.spans.timed(entry.step, "apply"):
            accepted = replica.apply(event.signed, event.updates, event.authors)
        if self.archive is not None:
            self.keeper.archive(self.archive, event.signed, event.payloads, event.announcements)
        self.spans.applied(replica.step, accepted)
        self._note(event, accepted)
        self._keep(event.signed)

    def _note(self, event: Committed, accepted: bool) -> None:
        entry, summary = event.signed.entry, self.summary
        loss = loss_of(entry.contributions, summary.loss)
        summary.applied(entry.step, loss, accepted, self.swarm.counters)
        peers, samples = len(entry.contributions), sum(c.samples for c in entry.contributions)
        tried = any(trial.public_key == public_key_of(summary.id) for trial in entry.trials)
        self.standing.decided(entry.step, accepted=accepted, samples=samples, peers=peers, loss=loss, tried=tried)
        self.log.info("step", step=entry.step, loss=round(loss, 4), lr=rate(entry.lr), peers=peers, accepted=accepted)
        if accepted and summary.votes_accepted == 1:
            self.log.info("the first contribution of this peer was accepted", step=entry.step)
        signed, behind = event.signed, self.samples is not None and entry.step < self.last.step  # only `run` settles it
        self.reached.state(lambda digest: self.steps.applied(signed, digest, loss, accepted), behind=behind)

    def _keep(self, signed: SignedEntry) -> None:
        """Store a snapshot if this peer is drawn, and at another step its momentum; nothing if the log is past the next one."""
        clock, step = self.terms.clock, self.replica.step
        recent = self.swarm.committed_step < step + clock.snapshot_every
        self.last.reached(step, self.replica.head)
        if step == self.last.step:
            self.keeper.snapshot(kept=True)
            self.keeper.flush()  # the run is over, so no other peer waits for this one
        elif step % clock.snapshot_every == 0 and recent:
            self.keeper.snapshot(kept=self.is_anchor or stores(signed, public_key_of(self.summary.id)))
        if (step + clock.snapshot_every // 2) % clock.snapshot_every == 0 and recent and not self.is_anchor:
            self.keeper.private()

    def _stored(self, manifest: SnapshotManifest, kept: bool) -> None:
        """On the keeper's thread: a snapshot's root is known, and the snapshot is on the disk if it is `kept`."""
        root = manifest.root if self.start is None else self.start.named(manifest)
        self.swarm.stored(manifest.step, root, manifest.total_bytes, kept)

    def finish(self) -> None:
        """Write the waiting snapshots, and the momentum but of an anchor; at the end of the run, finish its evaluation."""
        self.keeper.flush()
        if self.evaluator is not None and self.last.finished:
            self.evaluator.finish()
        if not self.is_anchor:
            self.replica.save_private(self.private_path)
        self.reached.settle()  # last: it fails if the swarm is gone

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
        """The replica is at another state: a gradient that was computed on the earlier state does not count."""
        self.summary.resyncs += 1
        self.ready = None
        if self.activity is Activity.VOTING:
            self.activity = move(self.activity, Activity.FOLLOWING)

    def follow(self, store: bool = True) -> None:
        """Report the replica's state, and follow the log from there. With `store`, other peers can load its snapshot."""
        self.summary.step = self.replica.step
        if self.archive is not None:
            self.archive.begin(self.replica)
        self.reached.state(lambda _: None, behind=False)
        if store:
            self.keeper.snapshot(kept=True)
        self.swarm.follow_from(self.replica.step, self.replica.head)
