"""The state of one run as the coordinator sees it, and which moves between phases are legal. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from coordinator.events import Claim, Effect, SnapshotFact, Withdrawn
from coordinator.trust import Audit, Recent, Standing
from protos.assignment import Range
from protos.identity import public_key_of
from protos.limits import ENTRY_CONTRIBUTIONS_MAX
from protos.log import Tick
from protos.run_config import RunConfig
from protos.ticket import Ticket

DURATIONS_KEPT = 32
DIGEST_STEPS_KEPT = 64
SNAPSHOT_STEPS_KEPT = 4
# Agreed snapshots that a joiner may fall back to, as many as peers keep on their disks (node/replica.py), and one more.
SNAPSHOTS_KEPT = 4
WITHDRAWN_KEPT = 64
# Peers remembered, connected or not: more than can ever be connected or in a roster.
PEERS_KEPT = 4 * ENTRY_CONTRIBUTIONS_MAX
# Of a run in admission mode `invite`. All are kept: a guest stays one when its ticket has ended.
TICKETS_MAX = 4096
GUESTS_MAX = 16 * ENTRY_CONTRIBUTIONS_MAX


class Phase(Enum):
    """Of a run."""

    WAITING = "waiting"
    OPEN = "open"
    FINISHED = "finished"


class PeerPhase(Enum):
    """Of a peer."""

    ABSENT = "absent"
    SYNCING = "syncing"
    READY = "ready"


class TicketState(Enum):
    """Of a ticket. Only open ones admit somebody new; guests stay guests."""

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
    """One peer. `applied_step` is -1 until it has reported a state; `samples_per_second` 0 until measured.

    `pace`: the part of the share that its speed would give it; `missed`: how many steps waited for it in vain, less those
    that it made up for (both see `rules.paced`). `gone`: it hung up. An absent peer that is not gone is expected: this
    coordinator was started a moment ago.
    `tenure`: in how many snapshot periods (`clock.snapshot_every` steps each) an entry counted its votes, the last of them
    `last_period`. `anchor`: it applies only. `syncing_since_ms`: when it last began to get the state. `contradicted`: how
    often in a row what it reported was not what counts. `last_turn`: the last step in whose roster it was.
    """

    public_key: bytes
    phase: PeerPhase = PeerPhase.ABSENT
    gone: bool = False
    anchor: bool = False
    network: str = ""
    layout_digest: bytes = b""
    parameters: int = 0
    syncing_since_ms: int = 0
    contradicted: int = 0
    last_turn: int = 0
    tenure: int = 0
    last_period: int = -1
    device: str = ""
    addresses: tuple[str, ...] = ()
    applied_step: int = -1
    state_digest: bytes = b""
    samples_per_second: float = 0.0
    pace: float = 1.0
    missed: float = 0.0
    votes_accepted: int = 0
    loss: float = 0.0

    @property
    def is_here(self) -> bool:
        """Whether it is connected."""
        return self.phase is not PeerPhase.ABSENT


@dataclass(frozen=True)
class Voted:
    """A decided step: its roster, and those of it whose votes its entry counted."""

    roster: tuple[bytes, ...]
    counted: frozenset[bytes]


@dataclass(frozen=True)
class Quorum:
    """Whose word it takes that a payload is held: `needed` of the members in the mask `within`; with `anchor`, an anchor's."""

    within: int
    needed: int
    anchor: bool = False


@dataclass(frozen=True)
class OpenStep:
    """The open step. `holders[(author, payload hash)]` is a bit mask over the roster's order.

    `anchored` are the payloads that an anchor holds: these are certain to be had. `abstained`: members that have no votes for
    the step, and why, in their own words.

    So are `here` (connected), `gone` (hung up), `rarely` (has missed many steps: this one does not wait for it), and
    `counted`: the authors whose payload is held, by the quorum `counted_by` (None: not counted yet).
    At `most_at_ms` (0: not yet) those were most of the peers that it waits for. What follows from other fields is kept because
    it is asked for after every report (`rules.seen`, `quorum.counted`).
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
    holders: Mapping[tuple[bytes, bytes], int] = field(default_factory=dict)
    anchored: frozenset[tuple[bytes, bytes]] = frozenset()
    abstained: Mapping[bytes, str] = field(default_factory=dict)

    def bit(self, public_key: bytes) -> int:
        """The roster member's place in masks; 0 for anyone else."""
        place = self.tick.places.get(public_key)
        return 0 if place is None else 1 << place


@dataclass(frozen=True)
class Issued:
    """A ticket that the operator made."""

    ticket: Ticket
    revoked: bool = False


@dataclass(frozen=True)
class Run:
    """Everything that decides what happens next. What is not restored from the journal is told again by the peers."""

    run_id: bytes
    config: RunConfig
    phase: Phase = Phase.WAITING
    reason: str = "no peer has joined yet"
    # from the journal
    head_step: int = 0
    head_hash: bytes = b""
    roster: tuple[bytes, ...] = ()  # of the last tick
    left: frozenset[bytes] = frozenset()  # those of it that said goodbye, or were excluded, and have not joined again
    layout_digest: bytes = b""
    parameters: int = 0
    next_sample: int = 0
    returned_samples: tuple[Range, ...] = ()
    snapshots: tuple[SnapshotFact, ...] = ()  # agreed and not withdrawn, the newest last
    withdrawn: tuple[Withdrawn, ...] = ()  # oldest first
    voted: Mapping[int, Voted] = field(
        default_factory=dict
    )  # of the last steps, and of those that a snapshot is due at
    loss: float = 0.0
    payload_bytes_total: int = 0
    standings: Mapping[bytes, Standing] = field(default_factory=dict)
    recent_checks: Recent = field(default_factory=Recent)  # what is typical nowadays
    audits: Mapping[int, Audit] = field(default_factory=dict)  # of the last steps, until they are judged
    tickets: Mapping[bytes, Issued] = field(default_factory=dict)  # by ticket id, oldest first
    guests: Mapping[bytes, bytes] = field(default_factory=dict)  # public key -> ticket id, in the order of joining
    anchor_guests: frozenset[bytes] = frozenset()  # those of them that joined with an anchor's ticket
    anchor_late: bool = False
    """The last step got no word from the anchor that was here: the next does not wait for it before it says something."""
    # from the peers
    peers: Mapping[bytes, Peer] = field(default_factory=dict)
    step: OpenStep | None = None
    durations_ms: tuple[int, ...] = ()
    reported_digests: Mapping[int, Mapping[bytes, bytes]] = field(default_factory=dict)
    agreed_digests: Mapping[int, bytes] = field(default_factory=dict)
    reported_snapshots: Mapping[int, Mapping[bytes, SnapshotFact]] = field(default_factory=dict)
    finish_by_ms: int = 0
    finished_told: bool = False
    lost_until: int = 0  # the log goes on to this step, as a peer has proven: no step opens before it is there again

    def with_phase(self, phase: PeerPhase) -> list[Peer]:
        """Peers in a phase, sorted by public key."""
        return sorted((p for p in self.peers.values() if p.phase is phase), key=lambda p: p.public_key)

    @property
    def ready(self) -> list[Peer]:
        """Peers that take part in the next tick: all that are ready but anchors, which do not train."""
        return [peer for peer in self.with_phase(PeerPhase.READY) if not peer.anchor]

    @property
    def snapshot(self) -> SnapshotFact | None:
        """The newest agreed one."""
        return self.snapshots[-1] if self.snapshots else None

    @property
    def anchors(self) -> frozenset[bytes]:
        """Public keys that the operator named, in the configuration or by a ticket that they joined with."""
        return self.anchor_guests.union(map(_public_key_of, self.config.trust.anchors))

    @property
    def anchored(self) -> bool:
        """Whether states and snapshots count only from anchors."""
        return self.config.trust.anchored or bool(self.config.trust.anchors) or bool(self.anchor_guests)

    @property
    def anchors_here(self) -> set[bytes]:
        """Anchors that are connected."""
        return {key for key, peer in self.peers.items() if peer.anchor and peer.is_here}

    def is_withdrawn(self, step: int) -> bool:
        """Whether the operator withdrew what was agreed about the state after this step."""
        return any(gone.from_step <= step <= gone.to_step for gone in self.withdrawn)


_public_key_of = lru_cache(maxsize=256)(public_key_of)

Outcome = tuple[Run, list[Effect]]
"""The run after something happened, and what is to be done, in this order."""
