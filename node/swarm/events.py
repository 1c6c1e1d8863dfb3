"""What the network thread tells the training thread: values with bytes and numbers in them, no tensors, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from node.wire.codec import Update
from protos.assignment import Range
from protos.errors import SwarmentumError
from protos.log import SignedEntry, Tick


@dataclass(frozen=True)
class Snapshot:
    """An agreed snapshot and who holds it. `root` is the sha256 of its manifest, `total_bytes` the file's size."""

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
    """The next entry of the log, with its votes: only the valid ones, which is the same set on every replica."""

    signed: SignedEntry
    updates: tuple[Update, ...]
    payloads: tuple[bytes, ...] = ()
    """For an archive: as they travelled, in order of the entry's contributions; b"" for one that is too long to count. Without
    an archive none."""
    announcements: Mapping[bytes, bytes] = field(default_factory=dict)
    """Author -> its signed announcement of its payload, of those that were heard."""
    by_author: Mapping[bytes, Update] = field(default_factory=dict)
    """Author -> its valid votes; those of peers on probation, too, where they are at hand."""


@dataclass(frozen=True)
class Agreed:
    """A snapshot is agreed: what is older than the one before it may go."""

    snapshot: Snapshot


@dataclass(frozen=True)
class Resync:
    """This peer's state after `step` is not what counts; or votes of the log are `lost`: only a newer snapshot helps."""

    snapshot: Snapshot | None
    reason: str
    lost: bool = False
    step: int = 0


@dataclass(frozen=True)
class Waiting:
    """No step is open; the reason is for people."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """The last step is committed and everyone who is here has applied it."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The network side cannot go on."""

    error: SwarmentumError


Event = Opened | Committed | Agreed | Resync | Waiting | Finished | Failed


@dataclass(frozen=True)
class Welcome:
    """The coordinator's answer to a join."""

    snapshots: tuple[Snapshot, ...]
    """The agreed snapshots, newest first; none before the first."""
    head_step: int
