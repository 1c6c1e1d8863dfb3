"""The payloads that this peer holds, on its disk, by hash. The peer deletes them by step, once no joiner needs them.

The bytes of others' payloads are bounded, too: beyond the limit, or half of what the disk has left, the oldest step goes first,
and the peer logs it once. The peer's own stay: each author keeps its votes, so a run whose disks are all full can replay its
log. The payloads that were used last are also in memory, and the peer's own last one always is: many pull it, and
the peer reads and hashes it for none of them. Payloads outlive the process, so a swarm whose peers all died can replay its log.
The peer syncs its own and the sums that it makes, and no others: a file that a power cut damaged counts as missing.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections import OrderedDict
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

import structlog

from protos import slices
from protos.disk import FULL, check_no_folder, replace_file, sync_file, sync_folder, writing
from protos.errors import Refusal
from protos.limits import PAYLOADS_GB
from protos.text import amount

PAYLOADS_BYTES_MAX = int(PAYLOADS_GB * 10**9)
RECENT_BYTES_MAX = 64 << 20
"""Bytes of payloads that are also in memory: those used last, none larger than this. The peer's own last payload comes on top,
so the memory is at most these bytes and one payload (PAYLOAD_BYTES_MAX)."""
_NAME = re.compile(r"(\d{1,13})-([0-9a-f]{64})")


class Payloads:
    """A folder of files `<step>-<sha256>`. Not thread-safe: only the network thread uses it."""

    def __init__(self, folder: Path, bytes_max: int = PAYLOADS_BYTES_MAX) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.bytes_max = folder, bytes_max
        self._steps: dict[bytes, int] = {}
        self._sizes: dict[bytes, int] = {}
        for path in folder.iterdir():
            check_no_folder(path)
            if match := _NAME.fullmatch(path.name):
                sha256 = bytes.fromhex(match[2])
                self._steps[sha256], self._sizes[sha256] = int(match[1]), path.stat().st_size
            else:
                path.unlink(missing_ok=True)  # half written when the process was killed
        self._total = sum(self._sizes.values())
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._mine = set[bytes]()  # as far as this peer knows: the log names those of an earlier life
        self._own_names: tuple[bytes, ...] = ()
        self._own = (b"", b"")  # the hash and the bytes of the peer's own last payload, which is not in `_recent`
        self.dropped_step = 0
        """The newest step whose payloads were deleted to make room, although a joiner might need them; 0: no step."""

    @property
    def total_bytes(self) -> int:
        """Of all payloads. From any thread."""
        return self._total

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self._folder

    def get(self, sha256: bytes) -> bytes | None:
        """The payload, verified; None if it is not here."""
        if sha256 not in self._steps:
            return None
        if sha256 == self._own[0]:
            return self._own[1]
        if sha256 in self._recent:
            self._recent.move_to_end(sha256)
            return self._recent[sha256]
        try:
            data = self._path(sha256).read_bytes()
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).digest() != sha256:
            self._forget(sha256)
            return None
        self._remember(sha256, data)
        return data

    def _remember(self, sha256: bytes, data: bytes) -> None:
        """Keep a verified payload in memory. Those that were not used for the longest time are then on the disk only."""
        if len(data) > RECENT_BYTES_MAX:
            return
        self._recent[sha256] = data
        self._recent_bytes += len(data)
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._recent_bytes -= len(self._recent.popitem(last=False)[1])

    def keep_own(self, sha256: bytes) -> bool:
        """This is the peer's own last payload: keep it in memory, however large, until the next one. False if not here."""
        data = self.get(sha256)
        if data is not None:
            self._remember_own(sha256, data)
        return data is not None

    def _remember_own(self, sha256: bytes, data: bytes) -> None:
        """Keep a verified payload in memory until the next own one. The own one before is then one of those used last."""
        (before, old), self._own = self._own, (sha256, data)
        self._recent_bytes -= len(self._recent.pop(sha256, b""))
        if before != sha256 and before in self._steps:
            self._remember(before, old)

    def put(self, step: int, sha256: bytes, data: bytes, *, own: bool = False) -> bool:
        """Keep a payload whose hash the caller has checked; `own`: see `keep_own`. False if it was here. Raises DiskError."""
        if sha256 in self._steps:
            if own:
                self._remember_own(sha256, data)
            return False
        path = self._folder / f"{step}-{sha256.hex()}"
        with writing(self._folder):
            while True:
                try:
                    self._write(self._folder / "incoming", data, path)
                    break
                except OSError as error:  # others decide how large votes are: these put no peer out of the run
                    if error.errno not in FULL or not self._drop_before(step, "the disk is full"):
                        raise
            free = shutil.disk_usage(self._folder).free
        self._steps[sha256], self._sizes[sha256] = step, len(data)
        self._total += len(data)
        (self._remember_own if own else self._remember)(sha256, data)
        most = (self._total + free) // 2  # snapshots need room, too
        nearly = most < self.bytes_max  # then the step before stays: slow peers may still pull its votes
        why = "the disk is nearly full" if nearly else f"votes take more than {amount(self.bytes_max)}"
        while self._total > min(most, self.bytes_max) and self._drop_before(step - nearly, why):
            pass
        return True

    def _drop_before(self, step: int, why: str) -> bool:
        """Make room: drop others' payloads of the oldest step. False if there are none before `step`."""
        others = {name: at for name, at in self._steps.items() if name not in self._mine}
        oldest = min(others.values(), default=step)
        if oldest >= step:
            return False
        if not self.dropped_step:
            structlog.get_logger("peer").warning(
                "dropping other peers' votes of the oldest steps, which joiners may miss", step=oldest, why=why
            )
        self.dropped_step = max(self.dropped_step, oldest)
        for sha256 in [name for name, at in others.items() if at == oldest]:
            self._forget(sha256)
        return True

    def _write(self, temporary: Path, data: bytes, path: Path) -> None:
        replace_file(
            path, temporary, lambda file: file.write(data), synced=False
        )  # a payload is checked when it is read

    def put_whole(self, step: int, data: bytes, ranges: int) -> bool:
        """Keep this peer's own payload, in a run with so many ranges, as the blobs that others pull. Raises as `put` does."""
        (name, head), *parts = slices.blobs_of(data, ranges)
        self._own_names = (name, *(sha256 for sha256, _ in parts))
        self._mine.update(self._own_names)
        for sha256, part in parts:
            self.put(step, sha256, part)
        return self.put(step, name, head, own=True)

    def sync_own(self) -> None:
        """`sync` what `put_whole` kept last."""
        self.sync(self._own_names)

    def sync(self, names: Iterable[bytes]) -> None:
        """These are on the disk on return: the log may name them, and a power cut may undo every other copy. From any thread.
        Raises DiskError."""
        with writing(self._folder):
            for name in names:
                with suppress(FileNotFoundError), self._path(name).open("rb") as file:  # decided, and dropped
                    sync_file(file)
            sync_folder(self._folder)

    def keep_mine(self, name: bytes, ranges: int) -> None:
        """The log says that these votes are this peer's: they stay until snapshots cover them, however full the disk is."""
        if (head := self.get(name)) is not None:
            self._mine |= {name, *(it.sha256 for it in _listed(head, ranges))}

    def whole(self, name: bytes, ranges: int) -> bytes | None:
        """A payload's bytes in a run with so many ranges; None if a slice, or all of it, is not here, or it is no payload."""
        head = self.get(name)
        if head is None or ranges == 1:
            return head
        parts = [head]
        for it in (named := _listed(head, ranges)):
            part = self.get(it.sha256)
            if part is None or len(part) != it.total_bytes:
                return None
            parts.append(part)
        return b"".join(parts) if named else None

    def forget_until(self, step: int) -> None:
        """Drop the payloads of this step and of all before."""
        for sha256 in [name for name, at in self._steps.items() if at <= step]:
            self._forget(sha256)

    def keep_only(self, step: int, names: Container[bytes]) -> None:
        """Drop what is here of a step, but for the sums of its votes: nobody replays the step by its payloads."""
        for name in [name for name, at in self._steps.items() if at == step and name not in names]:
            self._forget(name)

    def _forget(self, sha256: bytes) -> None:
        self._path(sha256).unlink(missing_ok=True)
        del self._steps[sha256]
        self._mine.discard(sha256)
        self._recent_bytes -= len(self._recent.pop(sha256, b""))
        if sha256 == self._own[0]:
            self._own = (b"", b"")
        self._total -= self._sizes.pop(sha256)

    def _path(self, sha256: bytes) -> Path:
        return self._folder / f"{self._steps.get(sha256, 0)}-{sha256.hex()}"


def _listed(head: bytes, ranges: int) -> tuple[slices.Slice, ...]:
    """The slices that the first blob of a payload names; none if it is no list of so many."""
    if ranges == 1 or len(head) != slices.list_bytes(ranges):
        return ()
    try:
        return slices.open_list(head)
    except Refusal:
        return ()
