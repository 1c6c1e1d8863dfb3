"""How a peer gets a state that it does not have: an agreed snapshot, piece by piece, from several holders at once.

Every byte is checked against the agreed root before the model sees it; what is on the disk already is not fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from node.snapshot.pieces import Manifest, assemble, check_piece, open_manifest
from node.snapshot.store import PieceStore
from node.swarm.api import Swarm
from node.swarm.events import Snapshot
from protos.errors import NetworkError, Reason, Refusal
from protos.limits import HASH_BYTES, SNAPSHOT_PIECE_BYTES, SNAPSHOT_PIECES_MAX

PULLS_AT_ONCE = 4
Progress = Callable[[int, int], None]


def manifest_bytes(snapshot: Snapshot) -> int:
    """The size of a snapshot's manifest, which follows from the snapshot's size: every hash has one length."""
    pieces = -(-snapshot.total_bytes // SNAPSHOT_PIECE_BYTES)
    if not 0 < pieces <= SNAPSHOT_PIECES_MAX:
        raise Refusal(Reason.OUT_OF_RANGE, f"snapshot of {snapshot.total_bytes} bytes")
    blank = bytes(HASH_BYTES)
    made = Manifest(blank, snapshot.step, blank, blank, snapshot.total_bytes, SNAPSHOT_PIECE_BYTES, (blank,) * pieces)
    return len(made.encoded)


def fetch_snapshot(
    swarm: Swarm, store: PieceStore, snapshot: Snapshot, layout_digest: bytes, progress: Progress
) -> tuple[Manifest, bytes]:
    """The manifest and the safetensors bytes of an agreed snapshot. Raises NetworkError or Refusal."""
    encoded = store.get(snapshot.root)
    if encoded is None:
        encoded = swarm.fetch(snapshot.root, manifest_bytes(snapshot), snapshot.holders)
    manifest = open_manifest(encoded)
    if manifest.step != snapshot.step or manifest.layout_digest != layout_digest:
        raise Refusal(Reason.WRONG_LAYOUT, f"the agreed snapshot is of step {manifest.step} and another layout")
    done = 0
    with ThreadPoolExecutor(PULLS_AT_ONCE, thread_name_prefix="pieces") as pool:
        for size in pool.map(
            lambda index: _piece(swarm, store, snapshot, manifest, index), range(len(manifest.piece_hashes))
        ):
            done += size
            progress(done, manifest.total_bytes)
    store.put(encoded)
    pieces = (_present(store, digest) for digest in manifest.piece_hashes)
    return manifest, assemble(manifest, pieces)


def _piece(swarm: Swarm, store: PieceStore, snapshot: Snapshot, manifest: Manifest, index: int) -> int:
    """Make sure that a piece is in the store; each piece starts with another holder."""
    digest, size = manifest.piece_hashes[index], manifest.piece_length(index)
    if store.get(digest) is None:
        turn = index % max(len(snapshot.holders), 1)
        holders = (*snapshot.holders[turn:], *snapshot.holders[:turn])
        piece = swarm.fetch(digest, size, holders)
        check_piece(manifest, index, piece)
        store.put(piece)
    return size


def _present(store: PieceStore, digest: bytes) -> bytes:
    piece = store.get(digest)
    if piece is None:
        raise NetworkError(f"piece {digest.hex()[:16]} rotted on this machine's own disk; fetching it again")
    return piece
