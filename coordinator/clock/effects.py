"""What the machine decides, as values: effects, which the runtime carries out in their order, and the records among them.

A record goes to the journal, and is durable before any peer is told of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from protos.accounts import Owner
from protos.changes import Settings
from protos.equivocation import Offence
from protos.invite import Ticket
from protos.log import Contribution, Entry, Verdict
from protos.orders import End
from protos.tick import Tick


@dataclass(frozen=True)
class SnapshotFact:
    """A snapshot: the state after `step`, named by the hash of its manifest. `kept`: whether the peer that reports it stores
    its pieces, too. The field does not count when two snapshots are compared."""

    step: int
    root: bytes
    total_bytes: int
    kept: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class LayoutFixed:
    """The parameter layout of an anchor, or of the agreed initial state: every other peer's must be the same."""

    layout_digest: bytes
    parameters: int


@dataclass(frozen=True)
class TickOpened:
    """The coordinator has opened a step; the roster has its samples."""

    tick: Tick


@dataclass(frozen=True)
class EntryCommitted:
    """A step is decided. `body` is the signed text, `hash` its hash."""

    entry: Entry
    body: bytes
    hash: bytes


@dataclass(frozen=True)
class PeerLeft:
    """A roster member of the open strict step left the run: the step no longer waits for it."""

    step: int
    public_key: bytes


@dataclass(frozen=True)
class SnapshotAgreed:
    """Enough electors stored the same snapshot."""

    snapshot: SnapshotFact


@dataclass(frozen=True)
class Withdrawn:
    """Snapshots of these steps, and state digests after them, do not count any more; `to_step` is the last one."""

    from_step: int
    to_step: int


@dataclass(frozen=True)
class Judged:
    """All verdicts that counted on the votes of a step; `arrival`: the step's authors in the order of their announcements.
    `samples`: of each of them, in this order; empty in a journal of an older version."""

    step: int
    verdicts: tuple[Verdict, ...]
    arrival: tuple[bytes, ...]
    samples: tuple[int, ...] = ()


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


@dataclass(frozen=True)
class RunPaused:
    """The operator paused the run; `reason`: in the operator's words, or empty. No step opens before `RunResumed`."""

    reason: str


@dataclass(frozen=True)
class RunResumed:
    """The operator lets a paused run go on."""


@dataclass(frozen=True)
class RunEnded:
    """The operator ended the run after the newest entry. An open step is given up: its tick has no entry."""

    end: End


@dataclass(frozen=True)
class DecayStarted:
    """The operator lets the learning rate decay after this step, over so many steps. The last of them ends the run."""

    after_step: int
    steps: int

    @property
    def last_step(self) -> int:
        """The last step of the decay."""
        return self.after_step + self.steps


@dataclass(frozen=True)
class SettingsChanged:
    """The operator changed these settings of the run, and no others: they count for the steps after this one."""

    after_step: int
    settings: Settings


@dataclass(frozen=True)
class Evaluated:
    """A peer evaluated the state after `step`: the envelope that it signed. `public_key`: the peer's."""

    step: int
    public_key: bytes
    envelope: bytes


@dataclass(frozen=True)
class RunArchived:
    """The operator archived the finished run, so that nobody is served; or took it out of the archive (not `archived`)."""

    archived: bool


@dataclass(frozen=True)
class OwnerNamed:
    """A peer with votes that count names its owner, or another one. Written at most once in OWNER_STEPS_MIN steps. ADR 35."""

    step: int
    public_key: bytes
    owner: Owner


@dataclass(frozen=True)
class OrderSigned:
    """An operator signed an order, at this time of the wall clock. With the last signature that it needs it is obeyed: this is
    then the record of the exclusion, the change or the end, too."""

    body: bytes
    public_key: bytes
    signature: bytes
    unix_ms: int


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
    | RunPaused
    | RunResumed
    | RunEnded
    | RunArchived
    | DecayStarted
    | OwnerNamed
    | SettingsChanged
    | Evaluated
    | OrderSigned
)


class NoticeKind(Enum):
    """The subject of a notice."""

    SNAPSHOT = "snapshot"
    RESYNC = "resync"
    FINISHED = "finished"
    WAITING = "waiting"
    VOTE = "vote"
    DOUBTED = "doubted"


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
class SendSumRequest:
    """Ask `to`, an aggregator of this step and attempt, for the sum of these votes."""

    step: int
    attempt: int
    contributions: tuple[Contribution, ...]
    to: bytes


@dataclass(frozen=True)
class SendAnnouncement:
    """Send `to` the announcement that the coordinator has from an author: of `to` itself, which comes back in an open step, or
    of one whose other payload `to` holds."""

    envelope: bytes
    to: bytes


@dataclass(frozen=True)
class SendNotice:
    """Send `to` (None: all followers) a notice. In a re-sync, `step` is the step after which the state differs;
    about a vote, it is the step that was decided; about a doubted sum, that of the sum, which is of the range `number`."""

    kind: NoticeKind
    reason: str
    snapshot: SnapshotFact | None = None
    to: bytes | None = None
    step: int = 0
    number: int = 0


@dataclass(frozen=True)
class Arm:
    """Fire the timer at this time of the runtime's monotonic clock, in ms, instead of any earlier request."""

    at_ms: int


class Denial(Enum):
    """The reason why a peer is not admitted; the label of the metric `swarmentum_joins_refused_total`."""

    EXCLUDED = "excluded"
    NOT_LISTED = "not_listed"
    TICKET = "ticket"
    FULL = "full"
    LAYOUT = "layout"
    ANCHOR = "anchor"
    VERSION = "version"


@dataclass(frozen=True)
class Refuse:
    """The event, or a part of it, was refused. The reason goes back to the peer, or to the operator (empty key).

    `denial`: it was a join.
    """

    public_key: bytes
    reason: str
    denial: Denial | None = None


@dataclass(frozen=True)
class EndStream:
    """The peer gets no further event. The peer may try to join again."""

    public_key: bytes


Effect = Append | SendTick | SendEntry | SendSumRequest | SendAnnouncement | SendNotice | Arm | Refuse | EndStream
