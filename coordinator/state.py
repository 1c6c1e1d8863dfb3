"""The state of one run as the coordinator sees it, and which moves between phases are legal. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from coordinator.events import Claim, Effect, SnapshotFact
from coordinator.trust import Audit, Recent, Standing
from protos.assignment import Range
from protos.limits import ENTRY_CONTRIBUTIONS_MAX
from protos.log import Tick
from protos.run_config import RunConfig
from protos.ticket import Ticket

DURATIONS_KEPT = 32
DIGEST_STEPS_KEPT = 64
SNAPSHOT_STEPS_KEPT = 4
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
    Phase.WAITING: frozenset({Phase.WAITING, Phase.OPEN}),
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
    """

    public_key: bytes
    phase: PeerPhase = PeerPhase.ABSENT
    gone: bool = False
    device: str = ""
    addresses: tuple[str, ...] = ()
    applied_step: int = -1
    state_digest: bytes = b""
    samples_per_second: float = 0.0
    pace: float = 1.0
    missed: float = 0.0
    votes_accepted: int = 0
    loss: float = 0.0


@dataclass(frozen=True)
class OpenStep:
    """The open step. `holders[(author, payload hash)]` is a bit mask over the roster's order.

    So are `here` (connected), `gone` (hung up), `rarely` (has missed many steps: this one does not wait for it), and
    `counted`: the authors whose payload enough of the electors hold, when those were `counted_within` (-1: not counted yet).
    At `most_at_ms` (0: not yet) those were most of the peers that it waits for. What follows from other fields is kept because
    it is asked for after every report (`rules.seen`, `rules.counted`).
    """

    tick: Tick
    opened_ms: int
    deadline_at_ms: int
    here: int = 0
    gone: int = 0
    rarely: int = 0
    counted: int = 0
    counted_within: int = -1
    most_at_ms: int = 0
    claims: Mapping[bytes, Claim] = field(default_factory=dict)
    holders: Mapping[tuple[bytes, bytes], int] = field(default_factory=dict)

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
    snapshot: SnapshotFact | None = None
    loss: float = 0.0
    payload_bytes_total: int = 0
    standings: Mapping[bytes, Standing] = field(default_factory=dict)
    recent_checks: Recent = field(default_factory=Recent)  # what is typical nowadays
    audits: Mapping[int, Audit] = field(default_factory=dict)  # of the last steps, until they are judged
    tickets: Mapping[bytes, Issued] = field(default_factory=dict)  # by ticket id, oldest first
    guests: Mapping[bytes, bytes] = field(default_factory=dict)  # public key -> ticket id, in the order of joining
    # from the peers
    peers: Mapping[bytes, Peer] = field(default_factory=dict)
    step: OpenStep | None = None
    durations_ms: tuple[int, ...] = ()
    reported_digests: Mapping[int, Mapping[bytes, bytes]] = field(default_factory=dict)
    agreed_digests: Mapping[int, bytes] = field(default_factory=dict)
    reported_snapshots: Mapping[int, Mapping[bytes, SnapshotFact]] = field(default_factory=dict)
    finish_by_ms: int = 0
    finished_told: bool = False

    def with_phase(self, phase: PeerPhase) -> list[Peer]:
        """Peers in a phase, sorted by public key."""
        return sorted((p for p in self.peers.values() if p.phase is phase), key=lambda p: p.public_key)

    @property
    def ready(self) -> list[Peer]:
        """Peers that take part in the next tick."""
        return self.with_phase(PeerPhase.READY)


Outcome = tuple[Run, list[Effect]]
"""The run after something happened, and what is to be done, in this order."""
