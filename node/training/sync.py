"""A peer gets a state that it does not have: an agreed snapshot, piece by piece, from peers and mirrors at once.

The peer checks every byte against the agreed root before the model loads it. The peer fetches no piece that its disk has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from node.mirror.snapshot_mirrors import MirrorReader
from node.snapshot.pieces import SnapshotManifest, open_manifest
from node.snapshot.store import Piece, Receiving, SnapshotStore
from node.swarm.api import Swarm
from node.swarm.facts import Snapshot
from protos.errors import NetworkError, Reason, Refusal
from protos.limits import HASH_BYTES, SNAPSHOT_PIECE_BYTES, SNAPSHOT_PIECES_MAX
from protos.text import amount, duration

TOLD_SECONDS: Final = 5.0
"""The log has a line about it so often."""
RATE_SECONDS: Final = 0.5
"""No rate is told before: it would say nothing."""


class Loading:
    """How far the download of a state is, in words: bytes, rate, time left. Pure: the time comes with each question.

    One state's download.
    """

    def __init__(self) -> None:
        self.words = ""
        """For people; empty while no state is being loaded."""
        self._began: tuple[float, int] | None = None
        self._told_at = 0.0

    def came(self, done: int, total: int, now: float) -> bool:
        """`done` of `total` bytes are here, at `now` seconds. Whether the log should tell."""
        if self._began is None or done < self._began[1]:
            self._began, self._told_at = (now, done), now - TOLD_SECONDS
        since, first = self._began
        self.words = f"loading the state: {amount(done)} of {amount(total)}"
        if now - since >= RATE_SECONDS and done > first:
            rate = (done - first) / (now - since)
            self.words += f", {amount(rate)}/s"
            if done < total:
                self.words += f", {duration((total - done) / rate)} left"
        if done < total and now - self._told_at < TOLD_SECONDS:
            return False
        self._told_at = now
        return True

    def waits(self, words: str) -> None:
        """Nobody who has the state is here."""
        self.words = words

    def ended(self) -> None:
        """The state is here, or its download failed."""
        self.words, self._began = "", None


PULLS_AT_ONCE = 4
ROW_PIECES: Final = 64
"""Of one request to a mirror: peers take the pieces at the other end meanwhile."""
LOOK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 1.0
"""Before a mirror that erred is asked again, times its failures."""
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


def fetch_manifest(swarm: Swarm, snapshot: Snapshot, mirrors: MirrorReader | None, named_step: int) -> bytes:
    """The manifest of an agreed snapshot, from a peer, or else from a mirror. `named_step`: of the run that asks.

    Raises NetworkError."""
    size = manifest_bytes(snapshot)
    try:
        return swarm.fetch(snapshot.root, size, snapshot.holders)
    except NetworkError:
        found = None if mirrors is None else mirrors.manifest(named_step, snapshot.root, size)
        if found is None:
            raise
        return found


def fetch_snapshot(
    swarm: Swarm,
    store: SnapshotStore,
    snapshot: Snapshot,
    layout_digest: bytes,
    progress: Progress,
    make_room: Callable[[int], object],
    mirrors: MirrorReader | None = None,
) -> SnapshotManifest:
    """The manifest of an agreed snapshot. The store has the snapshot's file on return. Raises NetworkError or Refusal.

    `make_room`: called with the bytes that are needed, once a peer has answered.
    """
    encoded = store.get(snapshot.root)
    if encoded is None:
        encoded = fetch_manifest(swarm, snapshot, mirrors, snapshot.step)
    manifest = open_manifest(encoded)
    if manifest.step != snapshot.step or manifest.layout_digest != layout_digest:
        raise Refusal(Reason.WRONG_LAYOUT, f"the agreed snapshot is of step {manifest.step}, or of another layout")
    if not (store.has(manifest.root) or store.begun(manifest.root)):
        make_room(manifest.total_bytes)
    fetch_pieces(swarm, store, manifest, snapshot, progress, mirrors=mirrors)
    return manifest


def fetch_pieces(
    swarm: Swarm,
    store: SnapshotStore,
    manifest: SnapshotManifest,
    snapshot: Snapshot,
    progress: Progress,
    local: Piece | None = None,
    mirrors: MirrorReader | None = None,
) -> None:
    """Have a snapshot in the store whose manifest is verified. `snapshot`: as the run knows it, whose pieces these are.
    `local`: pieces that this machine has elsewhere. `progress` is called often, and may raise what ends the download.

    Raises NetworkError or Refusal.
    """
    if store.has(manifest.root):
        if all(store.piece(manifest.root, index) is not None for index in range(len(manifest.piece_hashes))):
            return
        store.delete(manifest.root)  # a piece rotted on this machine's own disk
    receiving = store.receive(manifest)
    try:
        with ThreadPoolExecutor(PULLS_AT_ONCE, thread_name_prefix="pieces") as pool:
            here = list(pool.map(lambda index: _is_here(receiving, index, local), range(len(manifest.piece_hashes))))
            share = PieceShare(manifest, [index for index, is_here in enumerate(here) if not is_here])
            try:
                for _ in range(PULLS_AT_ONCE):
                    pool.submit(_from_peers, share, swarm, manifest, snapshot.holders, receiving)
                if mirrors is not None:
                    share.mirror_begins()
                    taking = (share, mirrors, manifest, snapshot, receiving)
                    # nobody waits for its end: a silent mirror has deadlines of its own
                    threading.Thread(target=_from_mirrors, args=taking, name="mirrored-pieces", daemon=True).start()
                share.wait(lambda done: progress(done, manifest.total_bytes))
            finally:
                share.end()
        receiving.finish()
        if mirrors is not None:
            mirrors.tell(snapshot.step)
    finally:
        receiving.close()


def _is_here(receiving: Receiving, index: int, local: Piece | None) -> bool:
    """Whether a piece is on this machine's disk; one from elsewhere is kept here."""
    if receiving.has(index):
        return True
    data = None if local is None else local(index)
    if data is not None:
        receiving.put(index, data)
    return data is not None


def _from_peers(
    share: PieceShare, swarm: Swarm, manifest: SnapshotManifest, holders: Sequence[bytes], receiving: Receiving
) -> None:
    """One puller: each piece starts with another holder."""
    while (index := share.peer_takes()) is not None:
        turn = index % max(len(holders), 1)
        try:
            size = manifest.piece_length(index)
            receiving.put(index, swarm.fetch(manifest.piece_hashes[index], size, (*holders[turn:], *holders[:turn])))
        except NetworkError as error:
            share.peers_fail(index, error)
        except Exception as error:  # noqa: BLE001 - the thread that waits for the pieces raises it
            share.fail(error)
        else:
            share.came(index)


def _from_mirrors(
    share: PieceShare, mirrors: MirrorReader, manifest: SnapshotManifest, snapshot: Snapshot, receiving: Receiving
) -> None:
    try:
        while mirrors.usable and (row := share.mirror_row(mirrors.wrong)):
            failures = mirrors.failures
            for index, piece in mirrors.pieces(snapshot.step, snapshot.root, manifest, row, share.mirror_takes):
                share.mirror_keeps(receiving, index, piece)
            share.mirror_leaves()
            if mirrors.failures > failures:
                share.rests(RETRY_SECONDS * mirrors.failures)
    except Exception as error:  # noqa: BLE001 - the thread that waits for the pieces raises it
        share.fail(error)
    finally:
        share.mirror_ends()


class PieceShare:
    """The missing pieces of a snapshot, shared among peers, which take the first ones, and a mirror, which gives the last.

    So nobody waits for a slow source: peers take what the mirror has not begun, and at the end also the piece that it is at.
    """

    def __init__(self, manifest: SnapshotManifest, missing: Iterable[int]) -> None:
        self._manifest, self._changed = manifest, threading.Condition()
        self._open, self._asked = set(missing), set[int]()  # nobody is at it; a peer is asked for it
        self._missing = set(self._open)
        self._done = manifest.total_bytes - sum(map(manifest.piece_length, self._missing))
        self._news = 0
        self._row, self._at = range(0), -1  # what the mirror is to give, and the piece that it is at
        self._mirror = self._over = False
        self._peers_failed: NetworkError | None = None
        self._failed: Exception | None = None

    @property
    def _ended(self) -> bool:
        return self._over or self._failed is not None

    def peer_takes(self) -> int | None:
        """A piece to ask peers for. Waits while there may be one later; None: there is nothing to do for peers any more."""
        with self._changed:
            while not self._ended and self._missing and self._peers_failed is None:
                ahead = [index for index in self._open if index not in self._row]
                if ahead or self._open:
                    index = min(ahead) if ahead else max(self._open)
                    self._open.remove(index)
                elif self._at in self._missing and self._at not in self._asked:
                    index = self._at
                else:
                    self._changed.wait(LOOK_SECONDS)
                    continue
                self._asked.add(index)
                return index
        return None

    def peers_fail(self, index: int, error: NetworkError) -> None:
        """No peer gives a piece now."""
        with self._changed:
            self._asked.discard(index)
            if index in self._missing and index != self._at:
                self._open.add(index)
            self._peers_failed = error
            self._tell()

    def mirror_begins(self) -> None:
        """A mirror takes part."""
        self._mirror = True

    def mirror_row(self, without: set[int]) -> range:
        """Pieces in a row that a mirror may give. Waits while peers may leave some; empty: nothing is to do for it."""
        with self._changed:
            while not self._ended and self._missing:
                wanted = self._open - without
                if wanted:
                    first = last = max(wanted)
                    while first - 1 in wanted and last - first + 1 < ROW_PIECES:
                        first -= 1
                    self._row = range(first, last + 1)
                    return self._row
                if self._open or self._peers_failed is not None:
                    break
                self._changed.wait(LOOK_SECONDS)
        return range(0)

    def mirror_takes(self, index: int) -> bool:
        """Whether the mirror may go on with this piece: no peer has taken it."""
        with self._changed:
            if self._over or index not in self._open:
                return False
            self._open.remove(index)
            self._at = index
            return True

    def mirror_leaves(self) -> None:
        """The mirror's row has ended, perhaps within a piece."""
        with self._changed:
            if self._at in self._missing and self._at not in self._asked:
                self._open.add(self._at)
            self._row, self._at = range(0), -1
            self._tell()

    def mirror_ends(self) -> None:
        """No mirror takes part any more."""
        self.mirror_leaves()
        with self._changed:
            self._mirror = False
            self._tell()

    def rests(self, seconds: float) -> None:
        """Wait, unless the download ends meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or not self._missing, seconds)

    def came(self, index: int) -> None:
        """A piece is on the disk."""
        with self._changed:
            self._came(index)

    def mirror_keeps(self, receiving: Receiving, index: int, piece: bytes) -> None:
        """Put a mirror's piece on the disk, unless the download is over: its file is closed then."""
        with self._changed:
            if not self._over:
                receiving.put(index, piece)
                self._came(index)

    def _came(self, index: int) -> None:
        self._done += self._manifest.piece_length(index) if index in self._missing else 0
        for pieces in (self._missing, self._open, self._asked):
            pieces.discard(index)
        self._tell()

    def _tell(self) -> None:
        self._news += 1
        self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The download cannot go on, whatever the source: a full disk, or the person stops."""
        with self._changed:
            self._failed = self._failed or error
            self._tell()

    def end(self) -> None:
        """Nobody waits for the pieces any more."""
        with self._changed:
            self._over = True
            self._tell()

    def wait(self, told: Callable[[int], None]) -> None:
        """Until all pieces are here. `told(bytes)`: so many are. Raises the failure, or NetworkError if no source is left."""
        while True:
            with self._changed:
                if self._failed is not None:
                    raise self._failed
                done, left, news = self._done, len(self._missing), self._news
                if left and self._peers_failed is not None and not self._mirror:
                    raise self._peers_failed
            told(done)
            if not left:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._news != news, LOOK_SECONDS)  # noqa: B023 - called before the next turn
