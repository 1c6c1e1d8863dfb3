"""Large files: the writer syncs them to the disk while it writes them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

SYNC_BYTES: Final = 16 << 20
"""Bytes of a large file between two syncs: a small file's sync waits for all bytes on their way to the same disk."""


def written(file: BinaryIO, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Write `pieces` one after the other, sync them every SYNC_BYTES, and give each back. The caller syncs the last ones."""
    waiting = 0
    for piece in pieces:
        file.write(piece)
        waiting += len(piece)
        if waiting >= SYNC_BYTES:
            file.flush()
            os.fsync(file.fileno())
            waiting = 0
        yield piece
