"""The state of one run as the coordinator sees it, and which moves between phases are legal. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, reduce
from operator import or_

from coordinator.clock.effects import DecayStarted, Effect, SettingsChanged, SnapshotFact, Withdrawn
from coordinator.clock.events import Claim
from coordinator.clock.findings import Doubts, RecentChecks
from coordinator.clock.operator_orders import OperatorOrders
from coordinator.clock.trust import Standing, StepChecks
from protos.accounts import NOBODY, Owner
from protos.assignment import Range
from protos.changes import SNAPSHOT_EVERY, Settings, merged
from protos.identity import public_key_of
from protos.invite import Ticket
from protos.limits import ENTRY_CONTRIBUTIONS_MAX
from protos.log import Contribution
from protos.orders import End
from protos.run_config import RunConfig
from protos.slices import Aggregate
from protos.tick import Tick

DURATIONS_KEPT = 32
DIGEST_STEPS_KEPT = 64
SNAPSHOT_STEPS_KEPT = 4
# Agreed snapshots that a joiner may fall back to: as many as peers keep on their disks (node/training/keeper.py), and one more.
SNAPSHOTS_KEPT = 4
WITHDRAWN_KEPT = 64
# Peers remembered, connected or not: more than can ever be connected or in a roster.
PEERS_KEPT = 4 * ENTRY_CONTRIBUTIONS_MAX
# Limits of a run in admission mode `invite`. Nothing is forgotten: a guest stays a guest after its ticket has ended.
TICKETS_MAX = 4096
GUESTS_MAX = 16 * ENTRY_CONTRIBUTIONS_MAX
# Changes of settings that a run remembers, with the steps since which they count.
CHANGES_MAX = 64
EVALUATED_STEPS_KEPT = 4


class Phase(Enum):
    """The phase of a run."""

    WAITING = "waiting"
    OPEN = "open"
    FINISHED = "finished"


class PeerPhase(Enum):
    """The phase of a peer."""

    ABSENT = "absent"
    SYNCING = "syncing"
    READY = "ready"


class TicketState(Enum):
    """The state of a ticket. Only an open ticket admits a new peer; guests stay guests."""

    OPEN = "open"
    USED_UP = "used up"
    EXPIRED = "expired"
    REVOKED = "revoked"


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.WAITING, Phase.OPEN, Phase.FINISHED}),  # finished by an entry that came back
    Phase.OPEN: frozenset({Phase.OPEN, Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset({Phase.FINISHED}),
}
PEER_MOVES: dict[PeerPhase, frozenset[PeerPhase]] = {
    PeerPhase.ABSENT: frozenset({PeerPhase.ABSENT, PeerPhase.SYNCING}),
    PeerPhase.SYNCING: frozenset({PeerPhase.SYNCING, PeerPhase.READY, PeerPhase.ABSENT}),
    PeerPhase.READY: frozenset({PeerPhase.READY, PeerPhase.SYNCING, PeerPhase.ABSENT}),
}


@dataclass(frozen=True)
class Peer:
    """One peer. `applied_step` is -1 until the peer has reported a state; `samples_per_second` is 0 until measured.

    `pace`: the part of the share by speed that the peer gets. `missed`: the number of steps that waited for the peer in vain,
    less those that it made up for. `rules.paced` changes both. `gone`: the peer hung up. An absent peer that is not gone is
    expected, because this coordinator has just started. `tenure`: the number of snapshot periods (`clock.snapshot_every` steps
    each) in which an entry counted the peer's votes, the last of them `last_period`. `anchor`: the peer only applies.
    `syncing_since_ms`: when the peer last began to get the state. `paused_since_ms`: when the peer's owner paused it, None if
    it takes part. `contradicted`: how many reported states in a row did not count. `last_turn`: the last step in whose roster
    the peer was. `silence`: the step from which it abstained last, why, whether its loss or gradient is not finite (None: it
    does not say), and whether it never votes in it; None once it votes. `owner`: as it names it now; `owner_kept`: as the
    journal has it, of `owner_step`.
    """

    public_key: bytes
    phase: PeerPhase = PeerPhase.ABSENT
    gone: bool = False
    anchor: bool = False
    network: str = ""
    layout_digest: bytes = b""
    parameters: int = 0
    syncing_since_ms: int = 0
    paused_since_ms: int | None = None
    contradicted: int = 0
    last_turn: int = 0
    tenure: int = 0
    last_period: int = -1
    device: str = ""
    software_version: str = ""
    addresses: tuple[str, ...] = ()
    applied_step: int = -1
    state_digest: bytes = b""
    samples_per_second: float = 0.0
    pace: float = 1.0
    missed: float = 0.0
    votes_accepted: int = 0
    loss: float = 0.0
    silence: tuple[int, str, bool | None, bool] | None = None
    owner: Owner = NOBODY
    owner_kept: Owner = NOBODY
    owner_step: int = 0

    @property
    def is_here(self) -> bool:
        """Whether the peer is connected."""
        return self.phase is not PeerPhase.ABSENT

    @property
    def is_paused(self) -> bool:
        """Whether its owner has paused it: it applies steps, and votes in none."""
        return self.paused_since_ms is not None


@dataclass(frozen=True)
class Voted:
    """A decided step: its roster, and the members whose votes its entry counted. Of an entry without votes: the step before."""

    roster: tuple[bytes, ...]
    counted: frozenset[bytes]


@dataclass(frozen=True)
class Electors:
    """The electors of a step. They count while the run has the same settings, standings and vote of the step."""

    step: int
    keys: frozenset[bytes]
    voted: Voted | None
    standings: Mapping[bytes, Standing]
    config: RunConfig


@dataclass(frozen=True)
class Quorum:
    """The holders that a payload needs: `needed` of the members in the mask `within`; with `anchor`, an anchor.

    `ranges`: those that each slice of it needs, if the step's aggregators take slices.
    """

    within: int
    needed: int
    anchor: bool = False
    ranges: tuple[Quorum, ...] = ()


@dataclass(frozen=True)
class Summing:
    """The votes of a step that aggregators add up: no others count. `digest`: over their payload hashes, in this order.

    `sums`: what each aggregator made of them. `until_ms`: after that the step asks other aggregators.
    """

    contributions: tuple[Contribution, ...]
    trials: tuple[Contribution, ...]
    digest: bytes
    until_ms: int
    sums: Mapping[bytes, Aggregate] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenStep:
    """The open step. Masks are over the roster's order.

    `claimed` is the mask of the authors that claimed a payload. `held[reporter]` is the mask of the authors whose claimed
    payload a member holds, and `by_anchor[anchor]` the same for an anchor. Payloads without a claim are kept by (author,
    payload hash). `named` has the mask of their holders, and `named_by_anchor` the names that each anchor holds. `abstained`
    has the members without votes for the step, or that have lost them, each with its reason.

    Other masks are `here` (connected), `gone` (hung up) and `rarely` (missed many steps, so this step does not wait for it).
    `counted` is the mask of the authors whose payload the quorum `counted_by` holds (None: not counted yet). `most_at_ms` is
    the time at which most of the awaited peers were counted (0: not yet). Three fields follow from others, and are kept
    because every report needs them. `tally` counts the holders of each author's payload in the quorum (`holder_counts.py`), and
    `masks` has the authors whose slice each range's quorum holds.
    `checked` is the last mask of a report, with its digest. `earlier` has the claims of members of earlier attempts that are
    none now. `summing`: the votes that count are decided, and not yet added up.
    """

    tick: Tick
    opened_ms: int
    deadline_at_ms: int
    here: int = 0
    gone: int = 0
    rarely: int = 0
    counted: int = 0
    counted_by: Quorum | None = None
    most_at_ms: int = 0
    claims: Mapping[bytes, Claim] = field(default_factory=dict)
    claimed: int = 0
    held: Mapping[bytes, int] = field(default_factory=dict)
    named: Mapping[tuple[bytes, bytes], int] = field(default_factory=dict)
    by_anchor: Mapping[bytes, int] = field(default_factory=dict)
    named_by_anchor: Mapping[bytes, frozenset[tuple[bytes, bytes]]] = field(default_factory=dict)
    tally: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()
    checked: tuple[int, bytes] = (0, b"")
    abstained: Mapping[bytes, str] = field(default_factory=dict)
    earlier: Mapping[bytes, Claim] = field(default_factory=dict)
    summing: Summing | None = None

    @property
    def anchored(self) -> int:
        """Mask of the authors whose claimed payload an anchor holds: every peer can get such a payload."""
        return reduce(or_, self.by_anchor.values(), 0)

    @property
    def anchor_named(self) -> frozenset[tuple[bytes, bytes]]:
        """The (author, payload hash) of unclaimed payloads that an anchor holds."""
        return frozenset().union(*self.named_by_anchor.values())

    def bit(self, public_key: bytes) -> int:
        """The roster member's place in masks; 0 for any other key."""
        place = self.tick.places.get(public_key)
        return 0 if place is None else 1 << place


@dataclass(frozen=True)
class Issued:
    """A ticket that the operator made."""

    ticket: Ticket
    revoked: bool = False


@dataclass(frozen=True)
class Run:
    """The whole state of a run. Peers report again the part that is not restored from the journal."""

    run_id: bytes
    config: RunConfig
    """The settings in force: those of the genesis, and the operator's changes."""
    defined: RunConfig | None = None
    """The settings of the genesis; None: the same as `config`."""
    phase: Phase = Phase.WAITING
    reason: str = "no peer has joined yet"
    # These fields come from the journal.
    head_step: int = 0
    head_hash: bytes = b""
    roster: tuple[bytes, ...] = ()  # of the last tick
    left: frozenset[bytes] = frozenset()  # its members that left or were excluded, and have not joined again
    layout_digest: bytes = b""
    parameters: int = 0
    next_sample: int = 0
    returned_samples: tuple[Range, ...] = ()
    snapshots: tuple[SnapshotFact, ...] = ()  # agreed and not withdrawn, the newest last
    withdrawn: tuple[Withdrawn, ...] = ()  # oldest first
    voted: Mapping[int, Voted] = field(default_factory=dict)  # of the last steps, and of steps with a snapshot
    loss: float = 0.0
    payload_bytes_total: int = 0
    standings: Mapping[bytes, Standing] = field(default_factory=dict)
    recent_checks: RecentChecks = field(default_factory=RecentChecks)  # the typical figures of late
    checks: Mapping[int, StepChecks] = field(default_factory=dict)  # of the last steps, until they are judged
    tickets: Mapping[bytes, Issued] = field(default_factory=dict)  # by ticket id, oldest first
    guests: Mapping[bytes, bytes] = field(default_factory=dict)  # public key -> ticket id, in the order of joining
    anchor_guests: frozenset[bytes] = frozenset()  # guests that joined with an anchor's ticket
    resting: Mapping[bytes, int] = field(default_factory=dict)
    """Peers that failed as aggregators, and the step until which they are none."""
    anchor_late: bool = False
    """The anchor reported nothing in the last step: the next step does not wait for the anchor before it reports something."""
    pause: str | None = None
    """Why the operator paused the run, in the operator's words or empty; None: it is not paused."""
    ended: End | None = None
    """The operator ended the run before its last planned step."""
    decay: DecayStarted | None = None  # of the learning rate, as the operator started it
    archived: bool = False
    changes: tuple[SettingsChanged, ...] = ()  # of settings, oldest first
    orders: OperatorOrders = field(default_factory=OperatorOrders)
    evaluations: Mapping[int, Mapping[bytes, bytes]] = field(default_factory=dict)
    """Signed evaluations of the last evaluated states, by step and author."""
    unlogged: tuple[bytes, ...] = ()  # evaluations that no entry has yet
    # These fields come from the peers.
    peers: Mapping[bytes, Peer] = field(default_factory=dict)
    step: OpenStep | None = None
    durations_ms: tuple[int, ...] = ()
    doubts: Doubts = field(default_factory=Doubts)
    added: tuple[Contribution, ...] = ()  # the votes of the newest entry, if it has their sum
    electors: Electors | None = None
    """They follow from other fields (`rules.py`), and are kept because every report of a state needs them."""
    reported_digests: Mapping[int, Mapping[bytes, bytes]] = field(default_factory=dict)
    agreed_digests: Mapping[int, bytes] = field(default_factory=dict)
    reported_snapshots: Mapping[int, Mapping[bytes, SnapshotFact]] = field(default_factory=dict)
    finish_by_ms: int = 0
    finished_told: bool = False
    # A peer has proven that the log goes to this step. No step opens before the log is as long again.
    lost_until: int = 0

    def with_phase(self, phase: PeerPhase) -> list[Peer]:
        """Peers in a phase, sorted by public key."""
        return sorted((p for p in self.peers.values() if p.phase is phase), key=lambda p: p.public_key)

    @property
    def trainers(self) -> list[Peer]:
        """Peers that have the state and train: all that are ready but anchors. Some may be paused."""
        return [peer for peer in self.with_phase(PeerPhase.READY) if not peer.anchor]

    @property
    def ready(self) -> list[Peer]:
        """Peers that take part in the next tick: the trainers that are not paused."""
        return [peer for peer in self.trainers if not peer.is_paused]

    @property
    def paused_count(self) -> int:
        """How many peers with the state are paused."""
        return sum(peer.phase is PeerPhase.READY and peer.is_paused for peer in self.peers.values())

    @property
    def ready_count(self) -> int:
        """The number of peers that take part in the next tick."""
        return sum(
            peer.phase is PeerPhase.READY and not peer.anchor and not peer.is_paused for peer in self.peers.values()
        )

    @property
    def last_step(self) -> int:
        """The last step of the run: where the operator ended it, or as planned."""
        return self.config.clock.steps if self.ended is None else self.ended.step

    @property
    def steps(self) -> int:
        """The steps that the run will have, as far as is known: to its last step, or to the end of a decay."""
        return self.last_step if self.decay is None else min(self.last_step, self.decay.last_step)

    def settings_at(self, step: int) -> Settings:
        """The settings of a step that are not those of the genesis."""
        return changed_settings(change for change in self.changes if change.after_step < step)

    def snapshot_is_due(self, step: int) -> bool:
        """Whether peers store the state after this step, by the settings of that step."""
        every = dict(self.settings_at(step)).get(SNAPSHOT_EVERY)
        clock = (self.defined or self.config).clock
        return step % (clock.snapshot_every if every is None else int(every)) == 0 or step == self.last_step

    @property
    def unconfirmed_steps(self) -> int:
        """How many of the newest steps have no agreed state digest."""
        return self.head_step - max(self.agreed_digests, default=0)

    @property
    def is_paused(self) -> bool:
        """Whether the operator paused the run."""
        return self.pause is not None

    @property
    def snapshot(self) -> SnapshotFact | None:
        """The newest agreed snapshot."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def anchors(self) -> frozenset[bytes]:
        """Public keys that the operator named, in the configuration or by a ticket that they joined with."""
        return self.anchor_guests.union(map(_public_key_of, self.config.trust.anchors))

    @property
    def anchored(self) -> bool:
        """Whether states and snapshots count only if anchors report them."""
        return self.config.trust.anchored or bool(self.config.trust.anchors) or bool(self.anchor_guests)

    @property
    def anchors_here(self) -> set[bytes]:
        """Anchors that are connected."""
        return {key for key, peer in self.peers.items() if peer.anchor and peer.is_here}

    def is_withdrawn(self, step: int) -> bool:
        """Whether a withdrawal covers the state after this step."""
        return any(gone.from_step <= step <= gone.to_step for gone in self.withdrawn)


def changed_settings(changes: Iterable[SettingsChanged]) -> Settings:
    """The settings after these changes, in this order."""
    found: Settings = ()
    for change in changes:
        found = merged(found, change.settings)
    return found


_public_key_of = lru_cache(maxsize=256)(public_key_of)

Outcome = tuple[Run, list[Effect]]
"""The run after an event, and the effects to carry out, in this order."""
