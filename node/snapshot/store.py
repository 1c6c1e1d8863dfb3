"""Snapshots on the peer's disk. Each is a safetensors file, whose ranges are the pieces, and a manifest.

    <root>.manifest     the pieces' hashes. The store writes it before the state gets its name.
    <root>.state        the whole file, each byte on the disk.
    <root>.part         a snapshot that the peer fetches. After a restart, the peer checks each piece and continues.

A state has its name only once it is whole and synced. A kill at any point therefore leaves stray files at most. The store
deletes them when it opens the folder. The store verifies every piece that it reads; a piece that rotted counts as missing.

Refuses more bytes than its limit. The store deletes no snapshot by itself: the caller of `keep` names the snapshots that stay.
Several processes must not share a folder.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from node.snapshot.pieces import SnapshotManifest, check_piece, open_manifest
from protos.disk import check_no_folder, remove_left, sync_file, sync_folder, write_atomic, write_synced, writing
from protos.errors import OperatorError, Refusal
from protos.log import SignedEntry

STORED_BY: Final = 3
"""Peers that store a snapshot beside the anchors: three, because one may be gone and one slow."""


def stores(signed: SignedEntry, public_key: bytes) -> bool:
    """Whether a peer stores the snapshot after an entry: the log draws STORED_BY, so each peer knows all of them. Pure.

    Every peer computes the root, because its report may be needed to agree on the root. Only the drawn peers and the anchors
    write the pieces and serve them.

    Of the peers whose votes the entry holds, these are the first by the sha256 of the entry's hash and their key. Nobody knew
    the hash before the coordinator sealed the entry, so nobody could choose a key. Where fewer have votes, all others store it,
    too: with the only author the run lost its only state.
    """
    keys = {contribution.public_key for contribution in signed.entry.contributions}
    order = sorted(keys, key=lambda key: hashlib.sha256(signed.hash + key).digest())
    return len(order) < STORED_BY or public_key in order[:STORED_BY]


MANIFEST: Final = ".manifest"
STATE: Final = ".state"
PART: Final = ".part"
TEMPORARY: Final = ".incoming-"
HEADER_BYTES_MAX: Final = 1 << 20
"""Of a file of state: the names, places and shapes of thousands of tensors."""
NAME: Final = re.compile(r"([0-9a-f]{64})(\.manifest|\.state|\.part)")


class StoreFullError(OperatorError):
    """The snapshots do not fit the room that the operator gave."""


class SnapshotStore:
    """A folder of snapshots, for one process; safe to use from several of its threads."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            check_no_folder(path)
        self._folder, self.bytes_max = folder, bytes_max
        self._lock = threading.Lock()
        self._serial = itertools.count()
        self._manifests: dict[bytes, SnapshotManifest] = {}
        self._places: dict[bytes, tuple[bytes, int]] = {}
        self._asked_at: dict[bytes, float] = {}
        self._also: dict[bytes, SnapshotManifest] = {}
        self._open()

    def make_fit(self, snapshot_bytes: int, kept: int) -> None:
        """Raise the limit to `kept` snapshots and one that is written, as far as the disk has room, and to two at least."""
        size = snapshot_bytes + HEADER_BYTES_MAX
        there = self.total_bytes + shutil.disk_usage(self._folder).free
        self.bytes_max = max(2 * size, min(there, max(self.bytes_max, (kept + 1) * size)))

    def _open(self) -> None:
        """Take the whole snapshots. Delete the files that an earlier life left half written, and those of an older version."""
        found = {path.name: path for path in self._folder.iterdir()}
        for name, path in found.items():
            match = NAME.fullmatch(name)
            root = bytes.fromhex(match[1]) if match else b""
            manifest = self._manifest_on_disk(root) if match and f"{match[1]}{MANIFEST}" in found else None
            kinds = {kind for kind in (STATE, PART) if f"{root.hex()}{kind}" in found}
            if manifest is None or not kinds or (match and match[2] == PART and STATE in kinds):
                path.unlink(missing_ok=True)
            elif match and match[2] == STATE:
                if path.stat().st_size == manifest.total_bytes:
                    self._index(manifest)
                else:
                    path.unlink()

    def _manifest_on_disk(self, root: bytes) -> SnapshotManifest | None:
        try:
            manifest = open_manifest(self._path(root, MANIFEST).read_bytes())
        except (OSError, Refusal):
            return None
        return manifest if manifest.root == root else None

    def _index(self, manifest: SnapshotManifest) -> None:
        self._manifests[manifest.root] = manifest
        for index, digest in enumerate(manifest.piece_hashes):
            self._places.setdefault(digest, (manifest.root, index))

    @property
    def total_bytes(self) -> int:
        """Bytes of all states, whole or not."""
        return sum(path.stat().st_size for path in self._folder.iterdir() if path.suffix in (STATE, PART))

    def roots(self) -> frozenset[bytes]:
        """The roots of the whole snapshots that are here."""
        with self._lock:
            return frozenset(self._manifests)

    def manifests(self) -> tuple[SnapshotManifest, ...]:
        """The manifests of the whole snapshots that are here, oldest first."""
        with self._lock:
            return tuple(sorted(self._manifests.values(), key=lambda manifest: manifest.step))

    def has(self, root: bytes) -> bool:
        """Whether this snapshot is here, whole."""
        with self._lock:
            return root in self._manifests

    def file(self, root: bytes) -> Path:
        """The safetensors file of a snapshot that is here, for the caller to map."""
        assert self.has(root), "only of a snapshot that is here"
        return self._path(root, STATE)

    # ---- what others ask for -----------------------------------------------------------------------------------------

    def get(self, digest: bytes) -> bytes | None:
        """A piece, verified, or a manifest by its root; None if it is not here (any more)."""
        with self._lock:
            manifest, place = self._manifests.get(digest), self._places.get(digest)
            also = self._also.get(digest)
        if manifest is not None:
            self._asked_at[digest] = time.monotonic()
            return manifest.encoded
        if also is not None and self.has_pieces(also):
            return also.encoded
        if place is None:
            return None
        root, index = place
        self._asked_at[root] = time.monotonic()
        piece = self.piece(root, index)
        if piece is None:
            with self._lock:
                self._places.pop(digest, None)
        return piece

    def also_as(self, manifest: SnapshotManifest) -> None:
        """Serve this manifest, too, for as long as a snapshot with its pieces is here: they have it under another one."""
        with self._lock:
            self._also[manifest.root] = manifest

    def has_pieces(self, manifest: SnapshotManifest) -> bool:
        """Whether a snapshot with these pieces is here, whole, under whatever manifest."""
        with self._lock:
            return any(other.piece_hashes == manifest.piece_hashes for other in self._manifests.values())

    def piece(self, root: bytes, index: int) -> bytes | None:
        """Piece `index` of a snapshot that is here; None if it rotted."""
        with self._lock:
            manifest = self._manifests.get(root)
        if manifest is None:
            return None
        try:
            with self._path(root, STATE).open("rb") as file:
                piece = os.pread(file.fileno(), manifest.piece_length(index), index * manifest.piece_bytes)
            check_piece(manifest, index, piece)
        except (FileNotFoundError, Refusal):
            return None
        return piece

    # ---- what is written ---------------------------------------------------------------------------------------------

    def write(
        self,
        pieces: Iterable[bytes],
        total_bytes: int,
        describe: Callable[[tuple[bytes, ...]], SnapshotManifest],
        become: Callable[[Path], bool] = lambda _: False,
    ) -> SnapshotManifest:
        """Keep a state of this peer's own. The store hashes each piece once; `describe` makes the manifest of these hashes.
        `become` makes a file of these pieces the one that it gets, if there is such a file.

        The disk has the whole snapshot when this returns. Raises StoreFullError, DiskError."""
        with self._room(total_bytes, PART) as path:
            there = become(path)
            with path.open("r+b" if there else "wb") as file:
                hashes = tuple(hashlib.sha256(piece).digest() for piece in write_synced(file, pieces, there=there))
                sync_file(file)
            manifest = describe(hashes)
            self._name(manifest, path)
        return manifest

    @contextmanager
    def _room(self, size: int, suffix: str) -> Iterator[Path]:
        """A new file, if the limit has room for `size` bytes. The file is deleted if the caller's work fails."""
        used = self.total_bytes
        if not self.fits(size):
            raise StoreFullError(
                f"snapshot store {self._folder}: {used} bytes are used and {size} more do not fit "
                f"the limit of {self.bytes_max}; make room on the disk, or set snapshots_kept to fewer"
            )
        path = self._folder / f"{TEMPORARY}{next(self._serial)}{suffix}"
        with writing(path):
            try:
                yield path
            except BaseException:
                remove_left(path)
                raise

    def _name(self, manifest: SnapshotManifest, path: Path) -> None:
        """Make a snapshot of a synced file: write its manifest, and give it its name."""
        self._write_manifest(manifest)
        path.replace(self._path(manifest.root, STATE))
        sync_folder(self._folder)
        with self._lock:
            self._index(manifest)

    def _write_manifest(self, manifest: SnapshotManifest) -> None:
        fresh = self._folder / f"{TEMPORARY}{next(self._serial)}"
        write_atomic(self._path(manifest.root, MANIFEST), fresh, lambda file: file.write(manifest.encoded))

    def receive(self, manifest: SnapshotManifest) -> Receiving:
        """Begin to fetch another peer's snapshot. Pieces that an earlier life fetched are there. Raises StoreFullError."""
        path = self._path(manifest.root, PART)
        for other in self._folder.glob(f"*{PART}"):  # this peer fetches a newer one instead
            if other != path and NAME.fullmatch(other.name):
                other.unlink(missing_ok=True)
                other.with_suffix(MANIFEST).unlink(missing_ok=True)
        fresh_file = not path.exists()
        if fresh_file:
            with self._room(manifest.total_bytes, PART) as fresh:
                self._write_manifest(manifest)
                with fresh.open("wb") as file:
                    file.truncate(manifest.total_bytes)
                fresh.replace(path)
        return Receiving(manifest, path, self._name, empty=fresh_file)

    # ---- what may go -------------------------------------------------------------------------------------------------

    def make_room(self, size: int, wanted: Iterable[bytes]) -> tuple[SnapshotManifest, ...]:
        """Delete whole snapshots, the oldest first, but none of `wanted`, until `size` more bytes fit. Returns what is gone."""
        stay, gone = frozenset(wanted), list[SnapshotManifest]()
        for manifest in self.manifests():
            if self.total_bytes + size <= self.bytes_max:
                break
            if manifest.root not in stay:
                self.delete(manifest.root)
                gone.append(manifest)
        return tuple(gone)

    def fits(self, size: int) -> bool:
        """Whether `size` more bytes fit."""
        return self.total_bytes + size <= self.bytes_max

    def begun(self, root: bytes) -> bool:
        """Whether a part of this snapshot is here, whose room is taken already."""
        return self._path(root, PART).exists()

    def drop_parts(self) -> None:
        """Another snapshot is loaded: what was fetched of others is not needed, and would take their room."""
        for part in self._folder.glob(f"*{PART}"):
            if NAME.fullmatch(part.name):
                part.unlink(missing_ok=True)
                part.with_suffix(MANIFEST).unlink(missing_ok=True)

    def keep(self, roots: Iterable[bytes], asked_within_seconds: float = 0.0) -> int:
        """Delete every whole snapshot but these. Returns how many are deleted.

        The one of which a peer asked for a piece last, within `asked_within_seconds`, stays, too, while half of the room is
        free."""
        wanted, now = frozenset(roots), time.monotonic()
        gone, others = 0, sorted(self.roots() - wanted, key=lambda root: self._asked_at.get(root, -math.inf))
        for root in others:
            young = now - self._asked_at.get(root, -math.inf) < asked_within_seconds
            if young and root == others[-1] and 2 * self.total_bytes <= self.bytes_max:
                continue
            self.delete(root)
            gone += 1
        return gone

    def delete(self, root: bytes) -> None:
        """Delete a snapshot. Does nothing if the snapshot is not here."""
        with self._lock:
            manifest = self._manifests.pop(root, None)
            self._asked_at.pop(root, None)
            if manifest is None:
                return
            self._places = {}
            for other in self._manifests.values():
                for index, digest in enumerate(other.piece_hashes):
                    self._places.setdefault(digest, (other.root, index))
            self._path(root, STATE).unlink(missing_ok=True)
            self._path(root, MANIFEST).unlink(missing_ok=True)

    def _path(self, root: bytes, kind: str) -> Path:
        return self._folder / f"{root.hex()}{kind}"


class Receiving:
    """A snapshot that this peer fetches. Several threads may use it at once, but only one for each piece."""

    def __init__(
        self, manifest: SnapshotManifest, path: Path, name: Callable[[SnapshotManifest, Path], None], *, empty: bool
    ) -> None:
        self._manifest, self._path, self._name, self._empty = manifest, path, name, empty
        self._file = path.open("r+b", buffering=0)

    def has(self, index: int) -> bool:
        """Whether a piece is here from an earlier life. The store reads and verifies it."""
        if self._empty:
            return False
        length, start = self._manifest.piece_length(index), index * self._manifest.piece_bytes
        piece = os.pread(self._file.fileno(), length, start)
        return hashlib.sha256(piece).digest() == self._manifest.piece_hashes[index]

    def put(self, index: int, piece: bytes) -> None:
        """Keep a piece. Raises Refusal unless the manifest names the piece, and DiskError."""
        check_piece(self._manifest, index, piece)
        with writing(self._path):
            written = os.pwrite(self._file.fileno(), piece, index * self._manifest.piece_bytes)
            assert written == len(piece), "a file takes a piece at once or not at all"

    def finish(self) -> None:
        """All pieces are here: the snapshot is whole from now on."""
        with writing(self._path):
            os.fsync(self._file.fileno())
            self._name(self._manifest, self._path)

    def close(self) -> None:
        """Close the file. The pieces that are here stay for the next try."""
        self._file.close()


Piece: TypeAlias = Callable[[int], bytes | None]
"""A piece by its index; None if it is not there, or has rotted."""


def snapshot_in(folder: Path, root: bytes) -> tuple[SnapshotManifest, Piece] | None:
    """The snapshot `root` of a folder that a `SnapshotStore` of another run wrote; None if it is not there."""
    state = folder / f"{root.hex()}{STATE}"
    try:
        manifest = open_manifest((folder / f"{root.hex()}{MANIFEST}").read_bytes())
        if manifest.root != root or state.stat().st_size != manifest.total_bytes:
            return None
    except (OSError, Refusal):
        return None

    def piece(index: int) -> bytes | None:
        try:
            with state.open("rb") as file:
                data = os.pread(file.fileno(), manifest.piece_length(index), index * manifest.piece_bytes)
            check_piece(manifest, index, data)
        except (OSError, Refusal):
            return None
        return data

    return manifest, piece
