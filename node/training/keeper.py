"""The keeper writes snapshots, momentum and archive behind the training: one thread, in order, on a part of a core.

The coordinator hears of a snapshot only after the disk has it: the keeper calls `stored` after the sync. Refuses a snapshot
while WAITING_BYTES_MAX of earlier states wait for the disk. The keeper leaves it out, and keeps the next one. ADR 30.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from node.mirror.snapshot_mirrors import SNAPSHOTS_KEPT, MirrorWriter
from node.snapshot.image import Image
from node.snapshot.pieces import SnapshotManifest
from node.snapshot.private import PrivateStateError, write_private
from node.snapshot.store import SnapshotStore
from node.training.replica import THREAD_SAFE, Describe, Replica
from node.training.telemetry import Spans
from protos.disk import DiskError
from protos.limits import SNAPSHOT_PIECE_BYTES
from protos.log import SignedEntry
from protos.process import usable_cores


class StepRecorder(Protocol):
    """See `node.archive.record.Recorder`."""

    @property
    def total_bytes(self) -> int:
        """Of the archive on the disk."""

    def limit(self, bytes_max: int) -> None:
        """Keep at most so many bytes from now on."""

    def begin(self, replica: Replica) -> None:
        """Before the keeper's thread: the replica may be further than the archive."""

    def end(self, envelope: bytes) -> None:
        """The signed end of the run."""

    def pop_due(self) -> bool:
        """Whether a segment should begin now."""

    def segment(self, step: int, total_bytes: int, pieces: Callable[[], Iterator[bytes]], describe: Describe) -> None:
        """Begin a segment with this state."""

    def record(self, signed: SignedEntry, payloads: Sequence[bytes], announcements: Mapping[bytes, bytes]) -> None:
        """Keep one entry with its payloads."""

    def close(self) -> None:
        """The files hold everything recorded."""


# The part of a core that writing a state may take while the training goes on. Pure: times come with each call.
#
# A swarm's peers all wait for the slowest one, so a step after a snapshot must not be longer than others. The writing is spread
# over most of the time until the next state comes. ADR 30.

CORE_PART_A_CORE: Final = 0.05
"""At most, and while nothing is known yet, for each core of the machine: with many cores some are idle. A low priority instead
would not do: on a busy machine a thread that the system has paused keeps Python's lock."""
CORE_PART_MAX: Final = 0.5
CORE_PART_MIN: Final = 0.01
CORE_PART_BEHIND: Final = 0.25
"""At least, while a later state waits already: a swarm with short steps makes its states faster than they are written."""
SPREAD: Final = 0.8
"""The part of the time to the next state in which a state should be on the disk: joiners wait for it."""


class CorePart:
    """Of one thread that writes states. It learns how often states come, and what a byte costs."""

    def __init__(self, cores: int) -> None:
        self._most = min(CORE_PART_A_CORE * cores, CORE_PART_MAX)
        self._came: float | None = None
        self._between: float | None = None
        self._seconds = 0.0
        self._bytes = 0

    def comes(self, now: float) -> None:
        """A state is there to be written, at `now` seconds."""
        if self._came is not None:
            self._between = now - self._came
        self._came = now

    def used(self, seconds: float, size: int) -> None:
        """`size` bytes were written with `seconds` of CPU time."""
        self._seconds += seconds
        self._bytes += size

    def of(self, size: int, now: float, *, behind: bool) -> float:
        """The part of a core for the `size` bytes of a state that are left at `now`; `behind`: a later one waits already."""
        if behind:
            return max(CORE_PART_BEHIND, self._most)
        if self._came is None or self._between is None or not self._bytes:
            return self._most
        needed, left = self._seconds / self._bytes * size, self._came + SPREAD * self._between - now
        return min(max(needed / left, CORE_PART_MIN), self._most) if left > 0 else self._most


ROOTS_KEPT: Final = 4  # manifests of snapshots that this peer computed: to compute a state again (recovery.py)
ASKED_SECONDS: Final = 60.0  # a snapshot of which a peer asked for a piece within this time stays, if the disk has room
WAITING_BYTES_MAX: Final = 256 << 20  # of states that wait for the disk, and of momentum; the first may be larger


def _copy_ahead(image: Image) -> None:
    with suppress(DiskError):  # the training thread raises it: it needs the copy
        image.detach()


class Keeper:
    """One replica's. It calls `stored(manifest, kept)` once it knows a root; if `kept`, the disk has the snapshot. It calls
    it, too, with False, when it has deleted one. Without `behind` everything happens at once, on the caller's thread."""

    def __init__(
        self,
        replica: Replica,
        store: SnapshotStore,
        private_path: Path,
        stored: Callable[[SnapshotManifest, bool], None],
        log: Any,
        *,
        behind: bool = True,
        snapshots_kept: int = SNAPSHOTS_KEPT,
        spans: Spans | None = None,
        mirror: MirrorWriter | None = None,
    ) -> None:
        self._replica, self._store, self._private_path = replica, store, private_path
        self._stored, self._log, self._behind = stored, log, behind
        self._snapshots_kept, self._spans, self._mirror = snapshots_kept, spans or Spans(), mirror
        self._lock = threading.Lock()
        self._manifests: dict[int, SnapshotManifest] = {}
        self._agreed: dict[int, bytes] = {}
        self._named = b""  # the root under which the run knows the agreed snapshot
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._ahead: deque[Callable[[], None]] = deque()  # jobs that are not begun, in order: a momentum waits for them
        self._images: dict[bool, list[Image]] = {False: [], True: []}  # of states, and of momentum
        self._hurry = threading.Event()
        self._late = False  # a snapshot was left out: what waits is written faster, and the next momentum is not saved
        self._part = CorePart(usable_cores())
        self._written = threading.Condition()
        self._archiving_bytes = 0
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def manifests(self) -> tuple[SnapshotManifest, ...]:
        """The snapshots that this replica computed or loaded, oldest first, stored here or by other peers."""
        with self._lock:
            return tuple(self._manifests[step] for step in sorted(self._manifests))

    # ---- the training thread's words ---------------------------------------------------------------------------------

    def snapshot(self, *, kept: bool) -> None:
        """Compute the root of the state that is here, and store it if `kept`. Returns at once."""
        replica = self._replica
        known = self._known(replica.step, replica.head)
        if known is not None and (not kept or self._store.has(known.root)):
            self._stored(known, self._store.has(known.root))
            return
        if not self._room(private=False):
            self._log.warning("the disk is slower than the snapshots: leaving this snapshot out", step=replica.step)
            self._late = True
            return
        image = replica.image()
        self._submit(partial(self._keep, image, replica.describer(image.total_bytes), kept, replica.step), image)

    def _known(self, step: int, head: bytes) -> SnapshotManifest | None:
        with self._lock:
            known = self._manifests.get(step)
        return known if known is not None and (step == 0 or known.entry_hash == head) else None

    def take_up(self) -> None:
        """Load the momentum that this peer saved before, if it is there and fits; otherwise the log says why it does not."""
        try:
            if self._replica.load_private(self._private_path):
                self._log.info("momentum taken up again", step=self._replica.step)
        except (PrivateStateError, ValueError) as error:  # not ours, damaged, or of another method
            step, why = self._replica.step, str(error)
            self._log.warning("starting with fresh momentum: the saved one cannot be used", step=step, why=why)

    def private(self) -> None:
        """Save the momentum that is here. Returns at once; saves nothing while over WAITING_BYTES_MAX wait for the disk, or if
        the last snapshot was left out: a snapshot is worth more."""
        late, self._late = self._late, False
        if late or not self._room(private=True):
            self._log.warning("the disk is too slow: not saving the momentum this time", step=self._replica.step)
            return
        image = self._replica.private_image()
        write = partial(write_private, partial(self._paced, image, private=True), self._private_path)
        self._submit(write, image, private=True)

    def archive(
        self,
        recorder: StepRecorder,
        signed: SignedEntry,
        payloads: Sequence[bytes],
        announcements: Mapping[bytes, bytes],
    ) -> None:
        """Record an entry that the replica has just applied. Waits while too many entries wait: an archive has no gaps."""
        size = sum(map(len, payloads))
        with self._written:
            self._written.wait_for(lambda: self._failed is not None or self._archiving_bytes <= WAITING_BYTES_MAX)
            self._archiving_bytes += size
        self._submit(partial(self._record, recorder, signed, payloads, announcements, size), None)
        if recorder.pop_due():
            image = self._replica.image()
            describe = self._replica.describer(image.total_bytes)
            pieces = partial(self._paced, image, SNAPSHOT_PIECE_BYTES)
            self._submit(partial(recorder.segment, self._replica.step, image.total_bytes, pieces, describe), image)

    def _record(
        self,
        recorder: StepRecorder,
        signed: SignedEntry,
        payloads: Sequence[bytes],
        announcements: Mapping[bytes, bytes],
        size: int,
    ) -> None:
        try:
            recorder.record(signed, payloads, announcements)
        finally:
            with self._written:
                self._archiving_bytes -= size
                self._written.notify_all()

    def adopt(self, manifest: SnapshotManifest) -> None:
        """The replica has loaded a snapshot that is in the store. Later snapshots are of a state that does not count."""
        with self._lock:
            self._manifests = {step: m for step, m in self._manifests.items() if step < manifest.step}
            self._manifests[manifest.step] = manifest
        for other in self._store.manifests():
            if other.step > manifest.step or (other.step == manifest.step and other.root != manifest.root):
                self._store.delete(other.root)
        self._store.drop_parts()
        self._retain()

    def here(self, step: int, root: bytes, named: bytes = b"") -> None:
        """An agreed snapshot of an earlier life is in the store: it stays until the next one. `named`: its root in the run."""
        with self._lock:
            self._agreed, self._named = {step: root}, named or root

    def agreed(self, step: int, root: bytes, named: bytes = b"") -> None:
        """A snapshot is agreed: it stays in the store until the next snapshot is agreed, even if other peers have it."""
        self.here(step, root, named)
        self._submit(self._retain, None)

    def make_room(self, size: int) -> bool:
        """Delete the oldest snapshots while `size` more bytes do not fit, but not the agreed one. Returns whether they fit."""
        with self._lock:
            wanted = set(self._agreed.values()) or {m.root for m in self._store.manifests()[-1:]}
        for manifest in self._store.make_room(size, wanted):
            self._stored(manifest, False)
        return self._store.fits(size)

    def root(self) -> bytes:
        """The root of the state that is here. The keeper computes it on this call, and remembers it."""
        replica = self._replica
        known = self._known(replica.step, replica.head)
        if known is None:
            image = replica.image()
            hashes = tuple(hashlib.sha256(piece).digest() for piece in image.pieces(SNAPSHOT_PIECE_BYTES))
            known = replica.describer(image.total_bytes)(hashes)
            with self._lock:
                self._manifests[known.step] = known
        return known.root

    def check(self) -> None:
        """Raise the error that ended the thread's work: DiskError, StoreFullError."""
        if self._failed is not None:
            raise self._failed

    def flush(self) -> None:
        """Wait until the disk has everything, at full speed. Raises the error that ended the thread's work."""
        self._hurry.set()
        self._jobs.join()
        self._hurry.clear()
        self.check()

    def abandon(self) -> None:
        """Begin nothing that waits, and end no state that is being written; wait for a momentum that is."""
        self._failed = self._failed or InterruptedError("the keeper was told to stop")
        self.close()

    def close(self) -> None:
        """Write everything that waits, and end the thread. Raises no error: `check` raised it, or nobody needs it any more."""
        if self._thread is not None:
            self._hurry.set()
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._mirror is not None:
            self._mirror.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _room(self, *, private: bool) -> bool:
        waiting = self._images[private] = [image for image in self._images[private] if image.waiting_bytes]
        return not waiting or sum(image.waiting_bytes for image in waiting) <= WAITING_BYTES_MAX

    def _submit(self, job: Callable[[], None], image: Image | None, *, private: bool = False) -> None:
        self.check()
        if not self._behind:
            job()
            return
        if image is not None:
            self._images[private].append(image)
            self._part.comes(time.monotonic())
            if self._jobs.unfinished_tasks and self._replica.device.type in THREAD_SAFE:  # the keeper is not there yet
                threading.Thread(target=_copy_ahead, args=(image,), name="keeper-copy", daemon=True).start()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="keeper", daemon=True)
            self._thread.start()
        if not private:
            self._ahead.append(job)
        self._jobs.put(job if private else self._go_ahead)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                if self._failed is None:
                    job()
            except Exception as error:  # noqa: BLE001 - the training thread raises it, at its next `check`
                self._failed = error
                with self._written:
                    self._written.notify_all()
            finally:
                self._jobs.task_done()

    def _go_ahead(self) -> None:
        while self._ahead and self._failed is None:
            self._ahead.popleft()()

    def _paced(self, image: Image, piece_bytes: int, *, private: bool = False) -> Iterator[bytes]:
        """An image's pieces, copied ahead of the training, and then at a pace that leaves the training its core. The rest of a
        momentum waits for what comes meanwhile: joiners replay the steps until a snapshot is on the disk."""
        if not self._behind:
            yield from image.pieces(piece_bytes)
            return
        image.detach()
        used = time.thread_time()
        for piece in image.pieces(piece_bytes):
            yield piece
            if not private:
                self.check()  # `abandon`: the model was perhaps moved while it was copied
            now = time.thread_time()
            self._part.used(now - used, len(piece))
            if left := image.waiting_bytes:  # a pause after the last piece would only keep the file from its name
                waiting = (*self._images[False], *self._images[True])
                behind = self._late or any(other is not image and other.waiting_bytes for other in waiting)
                part = self._part.of(left, time.monotonic(), behind=behind)
                self._hurry.wait((now - used) * (1 / part - 1))
            if private and self._ahead:
                self._go_ahead()
                now = time.thread_time()
            used = now

    def _keep(self, image: Image, describe: Describe, kept: bool, step: int) -> None:
        pieces, become = self._paced(image, SNAPSHOT_PIECE_BYTES), (image.become,) if self._behind else ()
        if kept and not self.make_room(image.total_bytes):
            self._log.warning("no room for this snapshot on the disk: other peers store it", step=step)
            kept = False
        with self._spans.timed(step, "snapshot", bytes=image.total_bytes, kept=kept):
            if kept:
                manifest = self._store.write(pieces, image.total_bytes, describe, *become)
            else:
                manifest = describe(tuple(hashlib.sha256(piece).digest() for piece in pieces))
        with self._lock:
            self._manifests[manifest.step] = manifest
        self._stored(manifest, kept)
        self._retain()

    def _retain(self) -> None:
        """Delete all snapshots but the newest ones and the agreed one."""
        stored = self._store.manifests()
        with self._lock:
            agreed, copied, named = set(self._agreed.values()), dict(self._agreed), self._named
            wanted = {m.root for m in stored[-self._snapshots_kept :]} | {m.root for m in stored if m.root in agreed}
            newest = sorted(self._manifests)[-ROOTS_KEPT:]
            self._manifests = {s: m for s, m in self._manifests.items() if s in newest or m.root in wanted}
        for step, root in copied.items() if self._mirror is not None else ():
            if self._mirror is not None and self._store.has(root):
                self._mirror.agreed(step, named, root)
        if len(wanted) == len(stored):
            return
        self._store.keep(wanted, ASKED_SECONDS)
        for manifest in stored:
            if not self._store.has(manifest.root):
                self._stored(manifest, False)
