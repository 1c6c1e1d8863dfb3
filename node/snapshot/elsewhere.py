"""A snapshot in the folder of another run on this machine's disk, read only: a fork begins at one. ADR 5.

Refuses to change that folder, and pieces that are not what the manifest names: they count as missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from node.snapshot.pieces import SnapshotManifest, check_piece, open_manifest
from node.snapshot.store import MANIFEST, STATE
from protos.errors import Refusal

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
