"""What the training needs of an archive. It imports no archive, which replays trainings: `node.archive.record` has this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from node.training.replica import Describe, Replica
from protos.log import SignedEntry


class StepRecorder(Protocol):
    """See `node.archive.record.Recorder`."""

    @property
    def total_bytes(self) -> int:
        """Of the archive on the disk."""

    def limit(self, bytes_max: int) -> None:
        """Keep at most so many bytes from now on."""

    def begin(self, replica: Replica) -> None:
        """Before the keeper's thread: the replica may be further than the archive."""

    def end(self, envelope: bytes) -> None:
        """The signed end of the run."""

    def pop_due(self) -> bool:
        """Whether a segment should begin now."""

    def segment(self, step: int, total_bytes: int, pieces: Callable[[], Iterator[bytes]], describe: Describe) -> None:
        """Begin a segment with this state."""

    def record(self, signed: SignedEntry, payloads: Sequence[bytes], announcements: Mapping[bytes, bytes]) -> None:
        """Keep one entry with its payloads."""

    def close(self) -> None:
        """The files hold everything recorded."""
