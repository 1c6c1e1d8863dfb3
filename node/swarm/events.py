"""The events that the network thread sends to the training thread: values of bytes and numbers, no tensors, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from node.wire.codec import Update
from protos.assignment import Range
from protos.changes import Settings
from protos.errors import SwarmentumError
from protos.log import SignedEntry
from protos.orders import End
from protos.tick import Tick


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
