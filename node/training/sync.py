"""A peer gets a state that it does not have: an agreed snapshot, piece by piece, from several holders at once.

The peer checks every byte against the agreed root before the model loads it. The peer fetches no piece that its disk has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from node.snapshot.elsewhere import Piece
from node.snapshot.pieces import SnapshotManifest, open_manifest
from node.snapshot.store import SnapshotStore
from node.swarm.api import Swarm
from node.swarm.events import Snapshot
from protos.errors import Reason, Refusal
from protos.limits import HASH_BYTES, SNAPSHOT_PIECE_BYTES, SNAPSHOT_PIECES_MAX

PULLS_AT_ONCE = 4
Progress = Callable[[int, int], None]


def manifest_bytes(snapshot: Snapshot) -> int:
    """The size of a snapshot's manifest, which follows from the snapshot's size: every hash has one length."""
    pieces = -(-snapshot.total_bytes // SNAPSHOT_PIECE_BYTES)
    if not 0 < pieces <= SNAPSHOT_PIECES_MAX:
        raise Refusal(Reason.OUT_OF_RANGE, f"snapshot of {snapshot.total_bytes} bytes")
    blank = bytes(HASH_BYTES)
    made = SnapshotManifest(
        blank, snapshot.step, blank, blank, snapshot.total_bytes, SNAPSHOT_PIECE_BYTES, (blank,) * pieces
    )
    return len(made.encoded)


def fetch_snapshot(
    swarm: Swarm,
    store: SnapshotStore,
    snapshot: Snapshot,
    layout_digest: bytes,
    progress: Progress,
    make_room: Callable[[int], object],
) -> SnapshotManifest:
    """The manifest of an agreed snapshot. The store has the snapshot's file on return. Raises NetworkError or Refusal.

    `make_room`: called with the bytes that are needed, once a peer has answered.
    """
    encoded = store.get(snapshot.root)
    if encoded is None:
        encoded = swarm.fetch(snapshot.root, manifest_bytes(snapshot), snapshot.holders)
    manifest = open_manifest(encoded)
    if manifest.step != snapshot.step or manifest.layout_digest != layout_digest:
        raise Refusal(Reason.WRONG_LAYOUT, f"the agreed snapshot is of step {manifest.step}, or of another layout")
    if not (store.has(manifest.root) or store.begun(manifest.root)):
        make_room(manifest.total_bytes)
    fetch_pieces(swarm, store, manifest, snapshot.holders, progress)
    return manifest


def fetch_pieces(
    swarm: Swarm,
    store: SnapshotStore,
    manifest: SnapshotManifest,
    holders: Sequence[bytes],
    progress: Progress,
    local: Piece | None = None,
) -> None:
    """Have a snapshot in the store whose manifest is verified. `local`: pieces that this machine has elsewhere.

    Raises NetworkError or Refusal.
    """
    if store.has(manifest.root):
        if all(store.piece(manifest.root, index) is not None for index in range(len(manifest.piece_hashes))):
            return
        store.delete(manifest.root)  # a piece rotted on this machine's own disk
    receiving, done = store.receive(manifest), 0

    def piece(index: int) -> int:
        """Make sure that a piece is here; each piece starts with another holder."""
        size = manifest.piece_length(index)
        if not receiving.has(index):
            turn = index % max(len(holders), 1)
            data = None if local is None else local(index)
            data = data or swarm.fetch(manifest.piece_hashes[index], size, (*holders[turn:], *holders[:turn]))
            receiving.put(index, data)
        return size

    try:
        with ThreadPoolExecutor(PULLS_AT_ONCE, thread_name_prefix="pieces") as pool:
            for size in pool.map(piece, range(len(manifest.piece_hashes))):
                done += size
                progress(done, manifest.total_bytes)
        receiving.finish()
    finally:
        receiving.close()
