"""Facts of a session, as frozen values of bytes and numbers: events for the training thread, and facts for the coordinator.

No event has tensors or protobuf. The outbox compares the coordinator's facts to know which ones it has. A fact holds no more
than that comparison needs, and is a name for one thing that a report can carry.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from node.blobs.payloads import Payloads
from protos.accounts import Owner
from protos.assignment import Range
from protos.changes import Settings
from protos.errors import SwarmentumError
from protos.log import SignedEntry
from protos.orders import End
from protos.slices import Aggregate, Update
from protos.tick import Tick
from protos.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class Snapshot:
    """An agreed snapshot and its holders. `root` is the sha256 of its manifest, `total_bytes` the file's size."""

    step: int
    root: bytes
    total_bytes: int
    holders: tuple[bytes, ...]


@dataclass(frozen=True)
class Opened:
    """A step is open. `ranges` are this peer's samples; None if it is not in the roster."""

    tick: Tick
    ranges: tuple[Range, ...] | None
    deadline_ms: int


@dataclass(frozen=True)
class Committed:
    """The next entry of the log, with its valid votes, or votes that add up to their sum. Every replica has the same."""

    signed: SignedEntry
    updates: tuple[Update, ...]
    payloads: tuple[bytes, ...] = ()
    """For an archive: the payloads as they travelled, in order of the entry's contributions; b"" for one that is too long to
    count. Of an entry with an aggregate the sum alone. Empty without an archive."""
    announcements: Mapping[bytes, bytes] = field(default_factory=dict)
    """Author -> its signed announcement of its payload, if this peer has received one."""
    by_author: Mapping[bytes, Update] = field(default_factory=dict)
    """Author -> its valid votes; also the votes of peers on probation, if this peer holds them. Of an entry with an aggregate
    only what this peer checks."""
    came: float = field(default=0.0, compare=False)
    """When the entry came and began to wait for its payloads, in seconds of the monotonic clock."""
    whole: float = field(default=0.0, compare=False)
    """When the last of its payloads was here."""

    @property
    def authors(self) -> tuple[bytes, ...]:
        """Of the `updates`, in their order; nobody in particular is the author of a sum."""
        if self.signed.entry.aggregate is not None:
            return ()
        return tuple(c.public_key for c in self.signed.entry.contributions if c.public_key in self.by_author)


@dataclass(frozen=True)
class Agreed:
    """A snapshot is agreed: snapshots older than the one before it may go."""

    snapshot: Snapshot


@dataclass(frozen=True)
class Resync:
    """This peer's state after `step` does not count; or votes of the log are `lost`, and the peer needs a newer snapshot."""

    snapshot: Snapshot | None
    reason: str
    lost: bool = False
    step: int = 0


@dataclass(frozen=True)
class Waiting:
    """No step is open; the reason is for people."""

    reason: str
    words: ClassVar[str] = "waiting"


@dataclass(frozen=True)
class NotCounted:
    """The coordinator decided a step without the votes that this peer had announced; the reason is for people."""

    step: int
    reason: str
    words: ClassVar[str] = "these votes do not count"


@dataclass(frozen=True)
class Ended:
    """The operator ended the run before its last planned step. `envelope`: the end as the coordinator signed it."""

    end: End
    envelope: bytes


@dataclass(frozen=True)
class Finished:
    """The last step is committed, and every connected peer has applied it."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The network side cannot go on."""

    error: SwarmentumError


Event = Opened | Committed | Agreed | Resync | Waiting | NotCounted | Ended | Finished | Failed


@dataclass(frozen=True)
class Welcome:
    """The coordinator's answer to a join."""

    snapshots: tuple[Snapshot, ...]
    """The agreed snapshots, newest first; none before the first."""
    head_step: int
    settings: Settings = ()
    """As in the entry of `head_step`."""


@dataclass(frozen=True)
class Published:
    """This peer has announced a payload for a step; `envelope` is the signed announcement."""

    step: int
    envelope: bytes


@dataclass(frozen=True)
class Abstained:
    """This peer sends no votes for a step; `reason` is one printable line. `not_finite`: its loss or gradient is not.
    `lost`: it never will, because it has announced votes that it lost, or may have."""

    step: int
    reason: str
    not_finite: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Held:
    """This peer holds the payload with hash `payload_sha256` by `author` (a public key)."""

    author: bytes
    payload_sha256: bytes


@dataclass(frozen=True)
class Applied:
    """This peer has applied a step; `digest` is the digest of the state after it."""

    step: int
    digest: bytes


@dataclass(frozen=True)
class Stored:
    """This peer knows the root of its snapshot after a step; `kept` says whether other peers can pull its pieces here."""

    step: int
    root: bytes
    kept: bool


@dataclass(frozen=True)
class FoundBad:
    """An agreed snapshot does not hold the state that the log names."""

    step: int
    root: bytes


@dataclass(frozen=True)
class Checked:
    """This peer has checked the votes of `subject` (a public key) for a step."""

    step: int
    subject: bytes


@dataclass(frozen=True)
class Accused:
    """`author` (a public key) announced two payloads for one step."""

    author: bytes


@dataclass(frozen=True)
class Reachable:
    """Other peers can dial this peer at these multiaddresses."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Paused:
    """This peer's owner has paused it, or lets it take part again."""

    paused: bool


@dataclass(frozen=True)
class Owned:
    """This peer names its owner."""

    owner: Owner


@dataclass(frozen=True)
class EvaluatedState:
    """This peer has evaluated the state after a step."""

    step: int


@dataclass(frozen=True)
class VotesSummed:
    """This peer has added up the votes of one attempt at a step: `payloads` is the digest over their hashes."""

    step: int
    attempt: int
    payloads: bytes
    aggregate: Aggregate


@dataclass(frozen=True)
class FoundFalse:
    """This peer added the range `number` of a step up again: the entry's sum is not that of its votes."""

    step: int
    number: int


Fact: TypeAlias = (
    Published
    | Abstained
    | Held
    | Applied
    | Stored
    | FoundBad
    | Checked
    | EvaluatedState
    | Accused
    | Reachable
    | Paused
    | Owned
    | VotesSummed
    | FoundFalse
)


# The agreed snapshots that a peer knows, and with them, the payloads that no peer needs any more.
#
# Keeps the newest two snapshots, and the list of withdrawals. Holds no pieces: the training thread has them (node/snapshot).

# Payloads and snapshots stay at least this long after a newer snapshot is agreed: a joiner may still load and replay them.
RETAIN_SECONDS = 60.0
SNAPSHOTS_KEPT = 2


def snapshot_of(ref: pb.SnapshotRef) -> Snapshot:
    """From the wire."""
    return Snapshot(ref.step, ref.root, ref.total_bytes, tuple(ref.holders))


class AgreedSnapshots:
    """The newest, by step. Not thread-safe."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads
        self._known: list[Snapshot] = []
        self._agreed_at: dict[int, float] = {}
        self._withdrawn: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def newest(self) -> Snapshot | None:
        """None before the first."""
        return self._known[-1] if self._known else None

    def is_withdrawn(self, step: int) -> bool:
        """Whether a withdrawal covers the state after this step."""
        return any(first <= step <= last for first, last in self._withdrawn)

    def withdraw(self, withdrawn: Iterable[pb.Withdrawn]) -> None:
        """All withdrawals so far, of the operator or of an anchor."""
        self._withdrawn = tuple((gone.from_step, gone.to_step) for gone in withdrawn)
        self._known = [known for known in self._known if not self.is_withdrawn(known.step)]

    def remember(self, snapshot: Snapshot) -> None:
        """A snapshot is agreed. A joiner that cannot use the newest one loads the one before, and needs the payloads after it.

        So a payload goes only after the *second* snapshot that follows it has been there for RETAIN_SECONDS.
        """
        now = time.monotonic()
        self._agreed_at.setdefault(snapshot.step, now)
        others = [known for known in self._known if known.step != snapshot.step]
        self._known = sorted([*others, snapshot], key=lambda known: known.step)[-SNAPSHOTS_KEPT:]
        settled = sorted(step for step, at in self._agreed_at.items() if now - at > RETAIN_SECONDS)
        if len(settled) >= SNAPSHOTS_KEPT:
            before = settled[-SNAPSHOTS_KEPT]
            self._payloads.forget_until(before)
            self._agreed_at = {step: at for step, at in self._agreed_at.items() if step >= before}
