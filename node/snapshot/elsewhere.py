"""A snapshot in the folder of another run on this machine's disk, read only: a fork begins at one. ADR 5.

Refuses to change that folder, and pieces that are not what the manifest names: they count as missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from node.snapshot.pieces import SnapshotManifest, check_piece, open_manifest
from node.snapshot.store import MANIFEST, STATE
from protos.errors import Reason, Refusal
from protos.start import StartingState

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


# A fork's state of step 0 is a snapshot of its parent run: the same pieces under two manifests. Pure. ADR 5.
#
# The genesis names the parent run's manifest by its root. The fork's own manifest has the fork's run id and step 0. Each
# follows from the other, so a peer that has the fork's snapshot of step 0 serves the parent run's snapshot, too.
#
# Refuses a manifest whose root or size is another one than the genesis names.


def of_parent(own: SnapshotManifest, start: StartingState) -> SnapshotManifest:
    """The parent run's manifest of the pieces that the fork's own manifest of step 0 names."""
    return replace(own, run_id=start.run_id, step=start.step, entry_hash=start.entry_hash)


def of_fork(manifest: SnapshotManifest, run_id: bytes) -> SnapshotManifest:
    """The fork's own manifest of step 0, from the parent run's."""
    return replace(manifest, run_id=run_id, step=0, entry_hash=run_id)


def is_start(own: SnapshotManifest, start: StartingState) -> bool:
    """Whether this manifest of step 0 names the pieces that the genesis names."""
    return of_parent(own, start).root == start.root and own.total_bytes == start.total_bytes


def check_start(manifest: SnapshotManifest, start: StartingState, layout_digest: bytes) -> None:
    """Raises Refusal unless this is the manifest of the parent run that the genesis names, in this run's layout."""
    if manifest.root != start.root or (manifest.run_id, manifest.step) != (start.run_id, start.step):
        raise Refusal(Reason.HASH_MISMATCH, f"the starting state is not that of {start}")
    if manifest.entry_hash != start.entry_hash or manifest.total_bytes != start.total_bytes:
        raise Refusal(Reason.HASH_MISMATCH, "the starting state has another size or entry than the genesis says")
    if manifest.layout_digest != layout_digest:
        raise Refusal(Reason.WRONG_LAYOUT, "the starting state has another parameter layout than this run's model")
