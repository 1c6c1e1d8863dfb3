"""What can happen to a run (events), what the machine wants done (effects), and what must survive a crash (records).

Values only: no clock, randomness, sockets, asyncio or logging here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protos.equivocation import Offence
from protos.log import Entry, Tick, Verdict
from protos.ticket import Ticket

# ---- events: what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """A peer asks to take part; its signature is verified, and so is its ticket's. `unix_ms`: when, by the wall clock.

    `network`: the block of public network addresses that it calls from (protos/network.py); empty for a private one.
    `anchor`: it wants to apply only, and its word on states and snapshots to count.
    """

    public_key: bytes
    device: str
    parameters: int
    layout_digest: bytes
    addresses: tuple[str, ...]
    ticket: Ticket | None = None
    unix_ms: int = 0
    network: str = ""
    anchor: bool = False


@dataclass(frozen=True)
class Connected:
    """The peer's event stream is open and has the whole log."""

    public_key: bytes


@dataclass(frozen=True)
class Disconnected:
    """The peer's event stream broke, or the peer left for good (`leaving`)."""

    public_key: bytes
    leaving: bool = False


@dataclass(frozen=True)
class Claim:
    """A payload that its author announced for the open step; `envelope`: in which words."""

    step: int
    parent_hash: bytes
    payload_sha256: bytes
    payload_bytes: int
    samples: int
    tokens: int
    loss: float
    compute_ms: int
    envelope: bytes = b""


@dataclass(frozen=True)
class SnapshotFact:
    """A snapshot: the state after `step`, named by the hash of its manifest."""

    step: int
    root: bytes
    total_bytes: int


@dataclass(frozen=True)
class Reported:
    """What a peer announces, holds (step, author, payload hash), has applied (step, state digest), stored and checked."""

    public_key: bytes
    claim: Claim | None = None
    holdings: tuple[tuple[int, bytes, bytes], ...] = ()
    applied: tuple[tuple[int, bytes], ...] = ()
    snapshots: tuple[SnapshotFact, ...] = ()
    addresses: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    offences: tuple[Offence, ...] = ()
    """Of others, proven."""
    bad_snapshots: tuple[SnapshotFact, ...] = ()
    """Agreed ones that it loaded and found wrong."""
    abstained: tuple[int, str] | None = None
    """The step for which it has no votes and will have none, and why, in its own printable words."""


@dataclass(frozen=True)
class EntriesReturned:
    """A peer has entries that this coordinator signed and does not have; `newest_step`: of the newest that it has."""

    public_key: bytes
    entries: tuple[EntryCommitted, ...]
    newest_step: int


@dataclass(frozen=True)
class TimerFired:
    """The time that the last `Arm` asked for has come."""


@dataclass(frozen=True)
class TicketAsked:
    """The operator wants this ticket to count."""

    ticket: Ticket
    unix_ms: int


@dataclass(frozen=True)
class RevocationAsked:
    """The operator wants a ticket to admit nobody else; `with_peers`: who joined with it has to leave."""

    ticket_id: bytes
    with_peers: bool


@dataclass(frozen=True)
class ExclusionAsked:
    """The operator wants a peer to take part no more; `reason`: in the operator's words."""

    public_key: bytes
    reason: str


@dataclass(frozen=True)
class ReadmissionAsked:
    """The operator wants an excluded peer to be admitted again."""

    public_key: bytes


@dataclass(frozen=True)
class WithdrawalAsked:
    """The operator wants the agreed snapshots of this step and later ones not to count, nor the state digests since."""

    step: int


Asked = TicketAsked | RevocationAsked | ExclusionAsked | ReadmissionAsked | WithdrawalAsked
"""What the operator asks."""
Event = Joined | Connected | Disconnected | Reported | EntriesReturned | TimerFired | Asked

# ---- records: what must survive a crash ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutFixed:
    """The parameter layout of an anchor, or of the agreed initial state: everyone else's must be the same."""

    layout_digest: bytes
    parameters: int


@dataclass(frozen=True)
class TickOpened:
    """A step was opened; its samples are handed out."""

    tick: Tick


@dataclass(frozen=True)
class EntryCommitted:
    """A step is decided. `body` is what is signed, `hash` its hash."""

    entry: Entry
    body: bytes
    hash: bytes


@dataclass(frozen=True)
class PeerLeft:
    """A roster member of the open strict step said goodbye: the step no longer waits for it."""

    step: int
    public_key: bytes


@dataclass(frozen=True)
class SnapshotAgreed:
    """Enough of the peers that have a say stored the same snapshot."""

    snapshot: SnapshotFact


@dataclass(frozen=True)
class Withdrawn:
    """Snapshots of these steps, and state digests after them, do not count any more; `to_step` is the last one."""

    from_step: int
    to_step: int


@dataclass(frozen=True)
class Judged:
    """The verdicts on the votes of a step, all that counted; `arrival`: its authors as they were heard."""

    step: int
    verdicts: tuple[Verdict, ...]
    arrival: tuple[bytes, ...]


@dataclass(frozen=True)
class TicketMade:
    """The operator made a ticket."""

    ticket: Ticket


@dataclass(frozen=True)
class TicketUsed:
    """An identity joined with a ticket: it is a guest from now on, and one use is gone."""

    ticket_id: bytes
    public_key: bytes


@dataclass(frozen=True)
class TicketRevoked:
    """A ticket admits nobody else; `with_peers`: its guests are guests no more."""

    ticket_id: bytes
    with_peers: bool


@dataclass(frozen=True)
class Equivocated:
    """A peer announced two payloads for one step: it takes part no more."""

    offence: Offence


@dataclass(frozen=True)
class PeerExcluded:
    """The operator excluded a peer: it takes part no more, until the operator readmits it."""

    public_key: bytes
    reason: str


@dataclass(frozen=True)
class PeerReadmitted:
    """The operator ended a peer's exclusion: it may join again, and nothing is held against it."""

    public_key: bytes


Record = (
    LayoutFixed
    | TickOpened
    | EntryCommitted
    | PeerLeft
    | SnapshotAgreed
    | Withdrawn
    | Judged
    | TicketMade
    | TicketUsed
    | TicketRevoked
    | Equivocated
    | PeerExcluded
    | PeerReadmitted
)

# ---- effects: what the runtime shall do, in this order ---------------------------------------------------------------


class NoticeKind(Enum):
    """What a notice is about."""

    SNAPSHOT = "snapshot"
    RESYNC = "resync"
    FINISHED = "finished"
    WAITING = "waiting"


@dataclass(frozen=True)
class Append:
    """Journal this record, durably, before any effect that follows."""

    record: Record


@dataclass(frozen=True)
class SendTick:
    """Tell `to` (None: everyone) that a step is open, and how long."""

    tick: Tick
    deadline_ms: int
    to: bytes | None = None


@dataclass(frozen=True)
class SendEntry:
    """Tell everyone the journalled entry of this step."""

    step: int


@dataclass(frozen=True)
class SendAnnouncement:
    """Tell `to`, which holds another payload of an author, in which words the author announced one to the coordinator."""

    envelope: bytes
    to: bytes


@dataclass(frozen=True)
class SendNotice:
    """Tell `to` (None: everyone) something; of a re-sync, `step` is the one after which the state differs."""

    kind: NoticeKind
    reason: str
    snapshot: SnapshotFact | None = None
    to: bytes | None = None
    step: int = 0


@dataclass(frozen=True)
class Arm:
    """Fire the timer at this time of the runtime's monotonic clock, in ms, instead of any earlier request."""

    at_ms: int


class Denial(Enum):
    """Why a peer is not admitted; the label of the metric `swarmentum_joins_refused_total`."""

    EXCLUDED = "excluded"
    NOT_LISTED = "not_listed"
    TICKET = "ticket"
    FULL = "full"
    LAYOUT = "layout"
    ANCHOR = "anchor"


@dataclass(frozen=True)
class Refuse:
    """The event, or a part of it, was not taken; the reason goes back to the peer, or the operator (empty key).

    `denial`: it was a join.
    """

    public_key: bytes
    reason: str
    denial: Denial | None = None


@dataclass(frozen=True)
class EndStream:
    """The peer is not to be told anything more; it may join again, if it may."""

    public_key: bytes


Effect = Append | SendTick | SendEntry | SendAnnouncement | SendNotice | Arm | Refuse | EndStream
