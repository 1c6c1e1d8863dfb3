"""Pieces on the peer's disk, each under its own sha256.

A piece has its name only once it is whole and on the disk, so a kill at any point leaves stray temporary files at most;
they go when the folder is opened. Every read is verified: a piece that rotted is deleted and counts as missing.

Refuses: more bytes than its limit (it forgets nothing by itself: `keep` says what may go). Is not for a folder that
several processes share.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from node.snapshot.atomic import write_atomic
from protos.disk import check_no_folder, writing
from protos.errors import OperatorError

TEMPORARY: Final = ".incoming-"
NAME: Final = re.compile(r"[0-9a-f]{64}")


class StoreFullError(OperatorError):
    """The pieces do not fit the room that the operator gave."""


class PieceStore:
    """A folder of blobs by sha256, for one process; safe to use from several of its threads."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            check_no_folder(path)
        for stray in folder.glob(f"{TEMPORARY}*"):
            stray.unlink(missing_ok=True)
        self._folder, self.bytes_max = folder, bytes_max
        self._sizes = {
            bytes.fromhex(path.name): path.stat().st_size for path in folder.iterdir() if NAME.fullmatch(path.name)
        }
        self._total = sum(self._sizes.values())
        self._serial = itertools.count()
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return self._total

    def hashes(self) -> frozenset[bytes]:
        """What is here."""
        with self._lock:
            return frozenset(self._sizes)

    def has(self, digest: bytes) -> bool:
        with self._lock:
            return digest in self._sizes

    def put(self, piece: bytes) -> bytes:
        """Keep a piece; returns its sha256 when it is on the disk. Raises StoreFullError beyond the limit."""
        digest = hashlib.sha256(piece).digest()
        with self._lock:
            if digest in self._sizes:
                return digest
            if self._total + len(piece) > self.bytes_max:
                raise StoreFullError(
                    f"snapshot store {self._folder}: {self._total} bytes are used and {len(piece)} more do not fit "
                    f"its limit of {self.bytes_max}; raise the limit, or keep fewer snapshots"
                )
            temporary = self._folder / f"{TEMPORARY}{next(self._serial)}"
            write_atomic(self._path(digest), temporary, lambda file: file.write(piece))
            self._sizes[digest] = len(piece)
            self._total += len(piece)
        return digest

    def get(self, digest: bytes) -> bytes | None:
        """The piece, verified; None where it is not here (any more)."""
        if not self.has(digest):
            return None
        try:
            piece = self._path(digest).read_bytes()
        except FileNotFoundError:
            piece = b""
        if hashlib.sha256(piece).digest() != digest:
            self.delete(digest)
            return None
        return piece

    def delete(self, digest: bytes) -> None:
        """Forget a piece; nothing happens where it is not here."""
        with self._lock:
            self._path(digest).unlink(missing_ok=True)
            self._total -= self._sizes.pop(digest, 0)

    def keep(self, digests: Iterable[bytes]) -> int:
        """Delete every piece but these; returns how many went."""
        gone = self.hashes() - frozenset(digests)
        for digest in gone:
            self.delete(digest)
        return len(gone)

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()
