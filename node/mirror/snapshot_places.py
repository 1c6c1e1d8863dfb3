"""What a peer's own settings say about snapshots: how many stay, its mirror, and whether it trusts the places of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.mirror.mirror_reader import MirrorReader, reader_of
from node.mirror.mirror_writer import MirrorWriter, writer_to
from node.snapshot.store import SnapshotStore

SNAPSHOTS_KEPT: Final = 2
"""Snapshots on the disk and in the mirror, unless the person wants more: the one that joiners are offered, and the one before
it, for joiners that cannot load the newer."""


@dataclass(frozen=True)
class SnapshotPlaces:
    """One peer's. `trusted`: the run may name folders, private networks and buckets that need this person's keys."""

    kept: int = SNAPSHOTS_KEPT
    mirror: str | None = None
    trusted: bool = False

    def writer(self, run_id: bytes, store: SnapshotStore, log: Any) -> MirrorWriter | None:
        """What copies agreed snapshots to the mirror; None without one. Raises OperatorError if nobody can write there."""
        return None if self.mirror is None else writer_to(self.mirror, run_id, store, self.kept, log)

    def reader(
        self, run_mirrors: Sequence[str], run_id: bytes, log: Any, paced: Callable[[int], None]
    ) -> MirrorReader | None:
        """The mirrors to read from now; None without any."""
        return reader_of(run_mirrors, self.mirror, run_id, log, paced, trusted=self.trusted)
