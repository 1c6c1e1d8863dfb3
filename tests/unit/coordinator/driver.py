"""The machine between well-behaved peers, in virtual time; and the checks that hold after every event of any kind.

`Harness` feeds events and checks; `Swarm` plays peers that behave like `node/swarm/publication.py`: reports are told until they
are taken, a stream that loses a message breaks and is opened again, gossip may simply be lost.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from coordinator.clock import entry_decision, holder_counts, machine, rules
from coordinator.clock.effects import (
    Append,
    Arm,
    Effect,
    EntryCommitted,
    Equivocated,
    NoticeKind,
    OrderSigned,
    PeerExcluded,
    PeerReadmitted,
    Record,
    Refuse,
    RunEnded,
    RunPaused,
    RunResumed,
    SendEntry,
    SendNotice,
    SendSumRequest,
    SendTick,
    SnapshotAgreed,
    SnapshotFact,
    TickOpened,
)
from coordinator.clock.events import (
    Claim,
    Connected,
    Disconnected,
    EntriesReturned,
    Event,
    HeldPlaces,
    JoinAsked,
    Reported,
    Summed,
    TimerFired,
)
from coordinator.clock.state import (
    DIGEST_STEPS_KEPT,
    DURATIONS_KEPT,
    PEERS_KEPT,
    SNAPSHOT_STEPS_KEPT,
    PeerPhase,
    Phase,
    Run,
)
from protos.assignment import Range, assign, merge
from protos.log import Entry, entry_body, entry_hash
from protos.run_config import ClockConfig, RunConfig
from protos.slices import Aggregate, Slice, mask_of, sum_in
from protos.slices import digest_of as digest_over
from protos.tick import Tick

RUN_ID = bytes([7]) * 32
LAYOUT = bytes([9]) * 32


def key(number: int) -> bytes:
    """A public key that sorts by number."""
    return bytes([number + 1]) * 32


def _places(tick: Tick | None, held: set[tuple[int, bytes, bytes]]) -> HeldPlaces | None:
    """These payloads by places of the roster; None if not all have one."""
    if tick is None or any(step != tick.step or author not in tick.places for step, author, _ in held):
        return None
    names = {tick.places[author]: payload for _, author, payload in held}
    return HeldPlaces(tick.step, tick.attempt, mask_of(names), digest_over(names[place] for place in sorted(names)))


def sha(*parts: object) -> bytes:
    """A hash of anything printable."""
    return hashlib.sha256(repr(parts).encode()).digest()


def config(**clock: object) -> RunConfig:
    """A run configuration with these clock settings."""
    usual: dict[str, object] = {"steps": 50, "batch_samples": 16, "snapshot_every": 10, "min_peers": 1}
    return RunConfig(clock=ClockConfig.model_validate(usual | clock))


def joined(number: int, layout: bytes = LAYOUT) -> JoinAsked:
    """Peer `number` asks to take part."""
    return JoinAsked(key(number), "cpu", 100, layout, (f"/ip4/127.0.0.1/tcp/1/p2p/{number}",))


def claim_of(tick: Tick, number: int, *, salt: object = 0, compute_ms: int = 100) -> Claim:
    """What peer `number` honestly announces for a tick."""
    share = next((s.samples for s in tick.roster if s.public_key == key(number)), 1)
    payload = sha("payload", tick.step, number, salt)
    return Claim(tick.step, tick.parent_hash, payload, 64, share, share * 128, 2.0, compute_ms)


def digest_of(step: int) -> bytes:
    """The state that every honest replica has after a step."""
    return sha("state", step)


def snapshot_at(step: int, salt: object = 0) -> SnapshotFact:
    """The snapshot that every honest replica stores after a step."""
    return SnapshotFact(step, sha("snapshot", step, salt), 1000)


@dataclass
class Harness:
    """One machine, its journal and its timer; `check` runs after every event."""

    settings: RunConfig
    now: int = 1_000
    journal: list[Record] = field(default_factory=list)
    announced: list[tuple[int, Effect]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    timer: int | None = None
    run_id: bytes = RUN_ID
    layout: bytes = b""
    """Of the genesis; empty: the agreed initial state fixes it."""
    returning: bool = False
    """Entries come back that the journal had lost: without their ticks."""

    def __post_init__(self) -> None:
        self.run = machine.new_run(self.run_id, self.settings, self.layout)
        self.entries: list[Entry] = []
        self.ticks: list[Tick] = []
        self.accepted: tuple[Range, ...] = ()
        self.out: set[bytes] = set()  # by the operator's word or their own signatures
        self.logged_out: set[bytes] = set()  # as the log says
        self.paused = False  # by the operator
        self.ended: int | None = None
        self.lost_steps: set[int] = set()
        """Steps in which a peer said that it never votes: without any votes only such a step is decided."""

    def load(self, journal: list[Record]) -> None:
        """Start from this journal."""
        for record in journal:
            self._journalled(record)
        self.restart()

    def feed(self, event: Event) -> list[Effect]:
        """One event; its effects in order."""
        self.returning = isinstance(event, EntriesReturned)
        if isinstance(event, TimerFired):
            self.timer = None
        if isinstance(event, Reported) and event.abstained is not None and event.lost:
            self.lost_steps.add(event.abstained[0])
        run, effects = machine.step(self.run, event, self.now)
        for effect in effects:
            match effect:
                case Append():
                    self._journalled(effect.record)
                    if isinstance(effect.record, OrderSigned):
                        self._obeyed(run)
                case Arm():
                    self.timer = effect.at_ms
                case Refuse():
                    self.refusals.append(effect.reason)
                case _:
                    self._told(effect)
                    self.announced.append((len(self.journal), effect))
        self.run = run
        self.check()
        return effects

    def comes(self, *numbers: int, at: int | None = None, layout: bytes = LAYOUT) -> None:
        """Each of these peers joins, follows, and tells the state after step `at`."""
        for number in numbers:
            self.feed(joined(number, layout))
            self.feed(Connected(key(number)))
            if at is not None:
                self.applies(at, number)

    def applies(self, step: int, *numbers: int) -> None:
        """Each of these peers tells the state after a step."""
        for number in numbers:
            self.feed(Reported(key(number), applied=((step, digest_of(step)),)))

    def late(self) -> None:
        """The deadline of the open step comes."""
        self.now = self.run.step.deadline_at_ms
        self.feed(TimerFired())

    def restart(self) -> None:
        """Kill -9 and start again from the journal."""
        self.run = machine.restore(machine.new_run(self.run_id, self.settings, self.layout), self.journal, self.now)
        self.timer = None
        if self.run.step is not None:
            self.timer = self.run.step.deadline_at_ms
        elif self.run.phase is Phase.FINISHED:
            self.timer = self.run.finish_by_ms
        self.check()

    # ---- what the journal says ---------------------------------------------------------------------------------------

    def _journalled(self, record: Record) -> None:
        if isinstance(record, EntryCommitted):
            head = self.entries[-1] if self.entries else None
            parent = next((r.hash for r in reversed(self.journal) if isinstance(r, EntryCommitted)), self.run_id)
            entry = record.entry
            assert entry.step == (head.step if head else 0) + 1
            assert entry.parent_hash == parent
            assert record.body == entry_body(entry)
            assert record.hash == entry_hash(record.body)
            keys = [c.public_key for c in entry.contributions]
            assert keys == sorted(set(keys))
            assert keys or entry.step in self.lost_steps
            self._check_sum(entry)
            self._check_exclusions(entry)
            if self.returning:
                self.accepted = _others(entry.returned_samples, entry.next_sample)
            else:
                tick = self.ticks[-1]
                assert (entry.step, entry.parent_hash, entry.lr_bits) == (tick.step, tick.parent_hash, tick.lr_bits)
                assert set(keys) <= {share.public_key for share in tick.roster}
                ranges = assign(tick.pool, tick.roster)
                self.accepted = merge([*self.accepted, *(part for k in keys for part in ranges[k])])
            self.entries.append(entry)
        if isinstance(record, TickOpened):
            assert record.tick.step == len(self.entries) + 1
            same = [tick for tick in self.ticks[-50:] if tick.step == record.tick.step]
            assert record.tick.attempt == len(same) + 1
            assert all(tick.pool == record.tick.pool for tick in same)
            assert not self.out & {share.public_key for share in record.tick.roster}
            assert not self.paused, "a step opened in a pause"
            assert self.ended is None, "a step opened after the end"
            self.ticks.append(record.tick)
        self.journal.append(record)

        if isinstance(record, RunEnded):
            self.ended = record.end.step
        if isinstance(record, RunPaused | RunResumed):
            self.paused = isinstance(record, RunPaused)
        if isinstance(record, PeerExcluded):
            self.out.add(record.public_key)
        if isinstance(record, Equivocated):
            self.out.add(record.offence.author)
        if isinstance(record, PeerReadmitted):
            self.out.discard(record.public_key)

    def _obeyed(self, run: Run) -> None:
        """The last signature of an order is the record of what it says, too."""
        self.ended = self.ended if run.ended is None else run.ended.step
        self.out |= {it.signed.order.excludes for it in run.orders.unlogged} - {b""}

    def _check_sum(self, entry: Entry) -> None:
        """An entry has a sum if its step has aggregators, and then the one that some of these sent of just these votes."""
        if self.returning:
            return
        assert (entry.aggregate is not None) == bool(self.ticks[-1].aggregators and entry.contributions)
        step = self.run.step
        if entry.aggregate is not None and step is not None and step.summing is not None:
            assert entry.aggregate.payloads_sha256 == digest_over(c.payload_sha256 for c in step.summing.contributions)
            assert entry.contributions == tuple(replace(c, payload_sha256=b"") for c in step.summing.contributions)

    def _check_exclusions(self, entry: Entry) -> None:
        """Who is out counts for nothing from the open step on, and the log speaks of each change once."""
        readmitted = set(entry.readmitted)
        assert readmitted <= self.logged_out, "readmitted, and the log did not say that it was out"
        self.logged_out -= readmitted
        if self.returning:  # the journal lost the operator's word, and the entry that comes back has it
            self.out -= readmitted
        authors = {c.public_key for c in (*entry.contributions, *entry.trials)}
        # No entry has the word if the same step's exclusion was not told either.
        assert not authors & (self.logged_out if self.returning else self.out | self.logged_out)
        assert not readmitted & self.out
        self.logged_out |= {exclusion.public_key for exclusion in entry.exclusions}

    def _told(self, effect: Effect) -> None:
        """Whatever peers see is in the journal before."""
        if isinstance(effect, SendEntry):
            assert self.entries[-1].step == effect.step
        if isinstance(effect, SendTick):
            assert self.ticks[-1] == effect.tick
            assert effect.deadline_ms >= 0
        if isinstance(effect, SendNotice) and effect.kind is NoticeKind.SNAPSHOT:
            agreed = [r.snapshot for r in self.journal if isinstance(r, SnapshotAgreed)]
            assert effect.snapshot in agreed
        if isinstance(effect, SendNotice) and effect.kind is NoticeKind.FINISHED:
            assert len(self.entries) == (self.run.config.clock.steps if self.ended is None else self.ended)

    # ---- what always holds -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants of a run after any event."""
        run = self.run
        out = {name for name, standing in run.standings.items() if standing.excluded}
        assert self.out <= out
        assert not [name for name in out if name in run.peers and run.peers[name].phase is not PeerPhase.ABSENT]
        due = {name for name, standing in run.standings.items() if standing.log_excludes}
        assert due == self.logged_out, "what the log says of exclusions was not kept"
        assert run.phase in Phase
        assert run.reason
        assert (run.step is not None) == (run.phase is Phase.OPEN)
        assert run.head_step == len(self.entries)
        self._check_samples()
        assert len(run.durations_ms) <= DURATIONS_KEPT
        assert len(run.agreed_digests) <= DIGEST_STEPS_KEPT + 2
        assert len(run.reported_digests) <= (DIGEST_STEPS_KEPT + 2 if run.anchored else 3)
        assert len(run.reported_snapshots) <= SNAPSHOT_STEPS_KEPT + 1
        assert len(run.peers) <= PEERS_KEPT
        assert len(run.left) <= len(run.roster)
        if run.electors is not None and run.electors.step in run.voted:
            anew = replace(run, electors=None)
            assert rules.electors(run, run.electors.step) == rules.electors(anew, run.electors.step)
        if run.step is not None:
            members = len(run.step.tick.roster)
            assert rules.seen(run.step, run.peers) == run.step, "who is here was not kept up to date"
            anew = entry_decision.counted(run, replace(run.step, counted_by=None), self.now)
            if run.step.counted_by == anew.counted_by:
                assert anew.counted == run.step.counted, "votes were not counted"
                assert anew.tally == run.step.tally, "holders were counted wrongly"
                assert anew.masks == run.step.masks, "slices were counted wrongly"
            assert len(run.step.claims) <= members
            assert len(run.step.held) <= members
            assert len(run.step.named) <= members * members
            assert run.step.claimed == sum(run.step.bit(author) for author in run.step.claims)
            assert not any(mask & ~run.step.claimed for mask in run.step.held.values()), "held of nobody's claim"
            assert self.timer is not None, "an open step without a timer can stand still"
            summing = run.step.summing
            assert self.timer <= (run.step.deadline_at_ms if summing is None else summing.until_ms)
            if summing is not None:
                assert run.step.tick.aggregators
                assert set(summing.sums) <= set(run.step.tick.aggregators)
        if run.phase is Phase.FINISHED and not run.finished_told:
            assert self.timer is not None, "a run that waits for its end without a timer can stand still"
        ready = len(rules.members_of(run))
        if run.phase is Phase.WAITING and run.snapshot and run.head_step >= run.lost_until and not run.is_paused:
            enough = min(ready, len(run.ready)) if not run.standings else ready and len(run.ready)
            assert enough < run.config.clock.min_peers, "enough peers are ready, and nothing opens"

    def _check_samples(self) -> None:
        """Accepted + returned + open is everything that was handed out, each sample once."""
        run = self.run
        is_open = run.step.tick.pool if run.step else ()
        everything = merge([*self.accepted, *run.returned_samples, *is_open])
        assert everything == ((Range(0, run.next_sample),) if run.next_sample else ())


def _others(returned: tuple[Range, ...], next_sample: int) -> tuple[Range, ...]:
    """The samples below `next_sample` that did not go back."""
    found, start = [], 0
    for part in (*returned, Range(next_sample, next_sample)):
        if part.start > start:
            found.append(Range(start, part.start))
        start = part.stop
    return tuple(found)


@dataclass
class PlayedPeer:
    """A well-behaved peer: what it knows and has."""

    number: int
    compute_ms: int = 100
    alive: bool = True
    stream: int = 0  # number of the stream it has open; 0: none
    log: list[Entry] = field(default_factory=list)
    tick: Tick | None = None
    life: int = 0
    claim: Claim | None = None
    holdings: set[tuple[int, bytes, bytes]] = field(default_factory=set)
    finished: bool = False
    silent: bool = False  # computes nothing, applies everything
    lies: bool = False  # in the sums that it makes


def sum_of(asked: SendSumRequest, peer: PlayedPeer) -> Summed:
    """What a peer says of the votes that it was asked to add up; who lies makes up another sum each time."""
    digest = digest_over(c.payload_sha256 for c in asked.contributions)
    lie = (peer.number, asked.attempt) if peer.lies else ()
    aggregate = Aggregate(sha("sum", digest, *lie), 64)
    if peer.tick is not None and peer.tick.ranges:
        numbers = peer.tick.ranges_of(key(peer.number))
        aggregate = sum_in([Slice(sha("sum", number, digest, *lie), 64) for number in numbers])
    return Summed(asked.step, asked.attempt, digest, aggregate)


class Swarm(Harness):
    """N peers. Times in ms of virtual time: 5 for a message, 200 to tell again, 500 to reconnect."""

    def __init__(self, settings: RunConfig, peers: int, *, seed: int = 0, loss: float = 0.0) -> None:
        super().__init__(settings)
        self.random = random.Random(seed)
        self.loss = loss
        self.up = True
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.peers = [PlayedPeer(number, 80 + 30 * number) for number in range(peers)]
        self.streams = itertools.count(1)
        for peer in self.peers:
            self.connect(peer)

    # ---- time --------------------------------------------------------------------------------------------------------

    def after(self, delay: int, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.order), what))

    def play(self, until: Callable[[], bool], ms_max: int = 3_600_000) -> None:
        """Let time pass until something is true; AssertionError if it does not become true."""
        end = self.now + ms_max
        while not until():
            at = self.queue[0][0] if self.queue else None
            timer = self.timer if self.up else None
            assert at is not None or timer is not None, f"nothing will ever happen again: {self.run.reason}"
            next_at = min(t for t in (at, timer) if t is not None)
            assert next_at <= end, f"stands still at step {self.run.head_step}: {self.run.reason}"
            self.now = max(self.now, next_at)
            if timer is not None and timer <= self.now:
                self.event(TimerFired())
            else:
                heapq.heappop(self.queue)[2]()

    def finish(self) -> None:
        """Play to the end of the run, and check that everyone alive has all of it."""
        self.play(lambda: self.run.finished_told and all(p.finished for p in self.peers if p.alive and p.stream))
        assert self.run.head_step == self.run.last_step

    # ---- the coordinator's side --------------------------------------------------------------------------------------

    def event(self, event: Event) -> list[Effect]:
        before = len(self.announced)
        effects = self.feed(event)
        for _, effect in self.announced[before:]:
            self._deliver(effect)
        return effects

    def crash(self, down_ms: int = 1_000) -> None:
        """Kill the coordinator; it is back after a while, and every stream is broken."""
        self.up = False
        for peer in self.peers:
            peer.stream = 0
            self.after(down_ms + 200 + 37 * peer.number, lambda peer=peer: self.connect(peer))  # type: ignore[misc]
        self.after(down_ms, self._start_again)

    def _start_again(self) -> None:
        self.up = True
        self.restart()

    def _deliver(self, effect: Effect) -> None:
        for peer in self.peers:
            to = getattr(effect, "to", None)
            if not peer.stream or (to is not None and to != key(peer.number)):
                continue
            if self.random.random() < self.loss:
                self.break_stream(peer)
                continue
            entry = self.entries[-1] if isinstance(effect, SendEntry) else None
            self.after(5, lambda p=peer, s=peer.stream, n=entry, f=effect: self._heard(p, s, n, f))  # type: ignore[misc]

    # ---- the peers' side ---------------------------------------------------------------------------------------------

    def connect(self, peer: PlayedPeer) -> None:
        """Join, read the log, follow."""
        if not peer.alive or peer.stream:
            return
        if not self.up or self.random.random() < self.loss:
            self.after(500, lambda: self.connect(peer))
            return
        effects = self.event(joined(peer.number))
        assert not [e for e in effects if isinstance(e, Refuse)], effects
        peer.log, peer.stream = list(self.entries), next(self.streams)
        self.event(Connected(key(peer.number)))
        self._tell_everything(peer)

    def _tell_everything(self, peer: PlayedPeer) -> None:
        step = len(peer.log)
        self.tell(peer, applied=((step, digest_of(step)),))
        every = self.settings.clock.snapshot_every
        self.tell(peer, snapshots=(snapshot_at(step // every * every),))

    def break_stream(self, peer: PlayedPeer) -> None:
        peer.stream = 0
        self.after(1, lambda: self.up and self.event(Disconnected(key(peer.number))))  # type: ignore[arg-type,func-returns-value]
        self.after(500, lambda: self.connect(peer))

    def kill(self, peer: PlayedPeer) -> None:
        """Kill -9: the network notices."""
        peer.alive, peer.stream, peer.life = False, 0, peer.life + 1
        peer.claim, peer.holdings = None, set()
        self.event(Disconnected(key(peer.number)))

    def leave(self, peer: PlayedPeer) -> None:
        """Ctrl-C."""
        peer.alive, peer.stream, peer.life = False, 0, peer.life + 1
        peer.claim, peer.holdings = None, set()
        self.event(Disconnected(key(peer.number), leaving=True))
        self.event(Disconnected(key(peer.number)))

    def tell(self, peer: PlayedPeer, **facts: object) -> None:
        """A report, again and again until it is taken or the stream is another one."""
        stream = peer.stream
        if not stream or not peer.alive:
            return
        if not self.up or self.random.random() < self.loss:
            self.after(200, lambda: self.tell(peer, **facts) if peer.stream == stream else None)
            return
        if self.settings.clock.ranges > 1 and "holdings" in facts and peer.tick is not None:
            facts.setdefault("held", HeldPlaces(peer.tick.step, peer.tick.attempt, 0, b""))
        self.event(Reported(key(peer.number), **facts))  # type: ignore[arg-type]
        said = facts.get("held")
        if isinstance(said, HeldPlaces) and holder_counts.unclear(self.run.step, key(peer.number), said, anchor=False):
            self.tell(peer, holdings=tuple(sorted(peer.holdings)))

    def _heard(self, peer: PlayedPeer, stream: int, entry: Entry | None, effect: Effect) -> None:
        if peer.stream != stream or not peer.alive:
            return
        match effect:
            case SendTick():
                self._hear_tick(peer, effect.tick)
            case SendEntry():
                self._hear_entry(peer, entry)
            case SendSumRequest():
                self.after(
                    20, lambda life=peer.life: peer.life == life and self.tell(peer, summed=sum_of(effect, peer))
                )  # type: ignore[misc]
            case SendNotice(kind=NoticeKind.FINISHED):
                peer.finished = True
            case SendNotice(kind=NoticeKind.RESYNC):
                self._tell_everything(peer)

    def _hear_tick(self, peer: PlayedPeer, tick: Tick) -> None:
        peer.tick = tick
        peer.holdings = {held for held in peer.holdings if held[0] == tick.step}
        if key(peer.number) not in {share.public_key for share in tick.roster} or peer.silent:
            return
        if peer.claim is not None and peer.claim.step == tick.step:
            self._say(peer, peer.claim)
            return
        life = peer.life
        self.after(peer.compute_ms, lambda: self._publish(peer, tick) if peer.life == life else None)

    def _hear_entry(self, peer: PlayedPeer, entry: Entry | None) -> None:
        if entry.step != len(peer.log) + 1:
            assert entry.step <= len(peer.log), "the stream skipped an entry"
            return
        peer.log.append(entry)
        if peer.claim is not None and peer.claim.step <= entry.step:
            peer.claim = None
        self.tell(peer, applied=((entry.step, digest_of(entry.step)),))
        if entry.step % self.settings.clock.snapshot_every == 0 or entry.step == self.settings.clock.steps:
            self.tell(peer, snapshots=(snapshot_at(entry.step),))

    def _publish(self, peer: PlayedPeer, tick: Tick) -> None:
        if not peer.alive or peer.tick is None or peer.tick.step != tick.step:
            return
        if peer.claim is not None and peer.claim.step == tick.step:
            return
        # whatever its life: node/swarm/publication.py keeps it from announcing another one
        peer.claim = claim_of(peer.tick, peer.number, compute_ms=peer.compute_ms)
        peer.holdings.add((peer.claim.step, key(peer.number), peer.claim.payload_sha256))
        self._say(peer, peer.claim)

    def _say(self, peer: PlayedPeer, claim: Claim) -> None:
        """Tell the coordinator, and gossip; both again with every tick of the step."""
        self.tell(peer, claim=claim, holdings=tuple(sorted(peer.holdings)))
        mine = (claim.step, key(peer.number), claim.payload_sha256)
        for other in self.peers:
            if other is not peer and other.alive and self.random.random() >= self.loss:
                self.after(10, lambda o=other, life=other.life: self._hold(o, life, mine))  # type: ignore[misc]

    def _hold(self, peer: PlayedPeer, life: int, held: tuple[int, bytes, bytes]) -> None:
        """Tell that a payload is held: by places, and by name if the coordinator could not match it, as the outbox does."""
        if peer.life == life and peer.alive and held[0] > len(peer.log):
            peer.holdings.add(held)
            said = _places(peer.tick, peer.holdings) if peer.number % 2 else None
            if said is None:
                self.tell(peer, holdings=(held,))
            else:
                self.tell(peer, held=said)
