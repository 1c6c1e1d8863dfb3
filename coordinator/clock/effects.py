"""The effects that the machine returns for an event. The runtime carries them out in their order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coordinator.clock.records import Record, SnapshotFact
from protos.log import Contribution
from protos.tick import Tick


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
    """Send `to`, which holds another payload of an author, the announcement that the coordinator has from this author."""

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
