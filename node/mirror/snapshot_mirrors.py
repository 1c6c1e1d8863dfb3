"""Mirrors of agreed snapshots: `MirrorReader` takes them from there, and `MirrorWriter` of an anchor copies them there.

A reader takes the manifest by its root, and pieces in a row, each checked by its hash. Nobody has to trust a mirror. One that
errs is asked again later, and after FAILURES_MAX it is left out: that is a line in the log, and the peers have the same pieces.

A writer has a thread of its own, and copies the newest snapshot that waits, never a list. It keeps the newest ones there, and
deletes older ones of this run. A failure is a line in the log: the anchor goes on, and tries again at the next snapshot.
Refuses pieces that rotted on the own disk of the anchor.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

from node.data.download import one_line
from node.mirror.mirror_places import BucketPlace, FolderPlace, Place, WebPlace, place_at
from node.snapshot.pieces import SnapshotManifest, check_piece, open_manifest
from node.snapshot.store import SnapshotStore
from protos.errors import NetworkError, OperatorError, Refusal
from protos.start import RUN_DIGITS_SHOWN

FAILURES_MAX: Final = 3
"""Of one mirror, for one snapshot."""
MANIFEST: Final = ".manifest"
STATE: Final = ".state"


def file_name(step: int, root: bytes, kind: str) -> str:
    """Of the snapshot that the run knows by this root. The names are in the order of the steps."""
    return f"{step:012d}-{root.hex()}{kind}"


def folder_of_run(run_id: bytes) -> str:
    """The folder of a run in each mirror."""
    return run_id.hex()[:RUN_DIGITS_SHOWN]


@dataclass
class _Asked:
    place: Place
    failures: int = 0
    wrong: set[int] = field(default_factory=set)
    """Pieces of which it had other bytes."""


class MirrorReader:
    """The mirrors of a run, for one download. `paced(bytes)` counts bytes that came, and waits as the owner's caps ask."""

    def __init__(self, places: Sequence[Place], log: Any, paced: Callable[[int], None]) -> None:
        self._asked = [_Asked(place) for place in places]
        self._log, self._paced = log, paced
        self.received = 0
        self.failures = 0

    @property
    def usable(self) -> bool:
        """Whether a mirror is left to ask."""
        return bool(self._asked)

    @property
    def wrong(self) -> set[int]:
        """Pieces that no mirror gives: each had other bytes."""
        return set.intersection(*(asked.wrong for asked in self._asked)) if self._asked else set()

    def manifest(self, step: int, root: bytes, most: int) -> bytes | None:
        """The manifest's bytes, whose hash is the root; None if no mirror has it."""
        while self._asked:
            asked = self._asked[0]
            try:
                name = file_name(step, root, MANIFEST)
                data = b"".join(self._counted(asked.place.read(name, 0, most, exactly=False)))
                if hashlib.sha256(data).digest() == root:
                    return data
                self._failed(asked, "its manifest is another one")
            except Exception as error:  # noqa: BLE001 - each library of a place has errors of its own
                self._failed(asked, one_line(error))
        return None

    def pieces(
        self, step: int, root: bytes, manifest: SnapshotManifest, wanted: range, goes_on: Callable[[int], bool]
    ) -> Iterator[tuple[int, bytes]]:
        """Pieces in a row, from the first of `wanted` on, for as long as `goes_on(index)` says so before each. Ends early if
        the mirror gives no more. `manifest` is verified."""
        asked = next((asked for asked in self._asked if wanted.start not in asked.wrong), None)
        if asked is None or not goes_on(wanted.start):
            return
        first, size = wanted.start * manifest.piece_bytes, sum(map(manifest.piece_length, wanted))
        index, held = wanted.start, bytearray()
        try:
            blocks = asked.place.read(file_name(step, root, STATE), first, size, exactly=True)
            for block in self._counted(blocks):
                held += block
                while index in wanted and len(held) >= (length := manifest.piece_length(index)):
                    piece = bytes(held[:length])
                    del held[:length]
                    check_piece(manifest, index, piece)
                    yield index, piece
                    index += 1
                    if index in wanted and not goes_on(index):
                        return
            if index in wanted:
                self._failed(asked, f"it ends before piece {index} is whole")
            else:
                asked.failures = 0
        except Refusal as refusal:
            asked.wrong.add(index)
            self._failed(asked, refusal.detail)
        except Exception as error:  # noqa: BLE001 - each library of a place has errors of its own
            self._failed(asked, one_line(error))

    def tell(self, step: int) -> None:
        """The download of a snapshot is over: the log says what came from mirrors."""
        if self.received:
            self._log.info("mirror: bytes came from there", step=step, bytes=self.received)

    def _counted(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.received += len(block)
            try:
                self._paced(len(block))
            except (CancelledError, RuntimeError) as error:  # the peer ends, and so does its network side
                raise NetworkError("the peer ends") from error
            yield block

    def _failed(self, asked: _Asked, why: str) -> None:
        """A mirror erred: the others come before it now."""
        self._asked.remove(asked)
        asked.failures += 1
        self.failures += 1
        left_out = asked.failures >= FAILURES_MAX
        if not left_out:
            self._asked.append(asked)
        self._log.warning("mirror: a failure", mirror=asked.place.address, why=why, left_out=left_out)


def reader_of(
    addresses: Sequence[str], own: str | None, run_id: bytes, log: Any, paced: Callable[[int], None], *, trusted: bool
) -> MirrorReader | None:
    """The mirrors that this peer may read: its `own`, and those of the run. None if there are none."""
    places = list[Place]()
    named = [(own, True)] if own is not None else []
    for address, allowed in (*named, *((address, trusted) for address in addresses)):
        try:
            places.append(place_at(address, folder_of_run(run_id), trusted=allowed))
        except OperatorError as error:
            log.warning("mirror: not used", mirror=address, why=str(error))
    return MirrorReader(places, log, paced) if places else None


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
