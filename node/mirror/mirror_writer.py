"""An anchor copies each agreed snapshot to a mirror, on a thread of its own: the newest one that waits, and never a list.

Keeps the newest snapshots there, and deletes older ones of this run. A failure is a line in the log: the anchor goes on, and
tries again at the next snapshot. Refuses pieces that rotted on the anchor's own disk.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from node.data.download import one_line
from node.mirror.mirror_places import BucketPlace, FolderPlace, WebPlace, place_at
from node.mirror.mirror_reader import MANIFEST, STATE, MirrorReader, file_name, folder_of_run, reader_of
from node.snapshot.pieces import SnapshotManifest, check_piece, open_manifest
from node.snapshot.store import SnapshotStore
from protos.errors import OperatorError

NAME: Final = re.compile(r"(\d{12})-[0-9a-f]{64}\.(manifest|state)")
CLOSE_SECONDS_MAX: Final = 5.0


class MirrorStoppedError(OSError):
    """The anchor ends: what it was writing stays unfinished."""


class MirrorWriter:
    """One anchor's. `kept`: snapshots that stay in the mirror."""

    def __init__(self, place: FolderPlace | BucketPlace, store: SnapshotStore, kept: int, log: Any) -> None:
        self._place, self._store, self._kept, self._log = place, store, kept, log
        self._changed = threading.Condition()
        self._next: tuple[int, bytes, bytes] | None = None
        self._done: bytes = b""
        self._ends = False
        self._thread: threading.Thread | None = None

    def agreed(self, step: int, named: bytes, root: bytes) -> None:
        """The run knows a snapshot by the root `named`, and the store has it as `root`. Returns at once."""
        with self._changed:
            if named == self._done or (self._next is not None and self._next[1] == named) or self._ends:
                return
            self._next = (step, named, root)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread; a copy that is under way stays unfinished."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS_MAX)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._ends)
                job, self._next = self._next, None
                if job is None or self._ends:
                    return
                self._done = job[1]
            try:
                self._copy(*job)
            except Exception as error:  # noqa: BLE001 - each library of a place has errors of its own
                with self._changed:
                    self._done = b""
                if isinstance(error, MirrorStoppedError):
                    return
                why = one_line(error)
                self._log.warning("mirror: snapshot not copied", step=job[0], mirror=self._place.address, why=why)

    def _copy(self, step: int, named: bytes, root: bytes) -> None:
        encoded = self._store.get(named)
        if encoded is None:
            raise OSError("the anchor has deleted it meanwhile")
        manifest, began = open_manifest(encoded), time.monotonic()
        with self._store.file(root).open("rb") as file:  # an open file outlasts its deletion
            state = file_name(step, named, STATE)
            if self._place.size(state) != manifest.total_bytes:
                self._place.write(state, self._pieces(manifest, file))
        # last: a peer that finds the manifest finds all pieces
        self._place.write(file_name(step, named, MANIFEST), iter((encoded,)))
        seconds = round(time.monotonic() - began, 1)
        self._log.info("mirror: snapshot copied", step=step, mirror=self._place.address, seconds=seconds)
        self._prune()

    def _pieces(self, manifest: SnapshotManifest, file: BinaryIO) -> Iterator[bytes]:
        for index in range(len(manifest.piece_hashes)):
            if self._ends:
                raise MirrorStoppedError("the anchor ends")
            piece = file.read(manifest.piece_length(index))
            check_piece(manifest, index, piece)
            yield piece

    def _prune(self) -> None:
        found = {name: match[1] for name in self._place.names() if (match := NAME.fullmatch(name))}
        stay = set(sorted(set(found.values()))[-self._kept :])
        for name in sorted(found):  # a manifest goes before its state
            if found[name] not in stay:
                self._place.delete(name)


def writer_to(address: str, run_id: bytes, store: SnapshotStore, kept: int, log: Any) -> MirrorWriter:
    """Raises OperatorError for a place that nobody can write to."""
    place = place_at(address, folder_of_run(run_id), trusted=True)
    if isinstance(place, WebPlace):
        raise OperatorError(
            f"mirror = {address}: nobody can write to a web address; name the folder or the bucket behind it, and put the web "
            "address into the run's [snapshots] mirrors"
        )
    return MirrorWriter(place, store, kept, log)


SNAPSHOTS_KEPT: Final = 2
"""Snapshots on the disk and in the mirror, unless the person wants more: the one that joiners are offered, and the one before
it, for joiners that cannot load the newer."""


@dataclass(frozen=True)
class SnapshotPlaces:
    """What a peer's own settings say about snapshots: how many stay, its mirror, and whether it trusts the places of the
    run.

    One peer's. `trusted`: the run may name folders, private networks and buckets that need this person's keys.
    """

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
