"""Files that gzip or zstd packed, as streams of what is in them; plain files, too. The first bytes decide, not the name.

Refuses: a stream that ends in the middle, more than UNPACKED_RATIO_MAX times the packed bytes, and what is packed twice.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import zstandard

from node.data.tally import LeftOutReason

GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPED: Final = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a frame that a reader skips; the first one is 0x50 to 0x5f."""
PACKED_INSIDE: Final = (GZIP_MAGIC, ZSTD_MAGIC, b"\xfd7zXZ\0", b"BZh91AY&SY", b"PK\x03\x04")
"""What text never begins with: another packer's file."""
PACKED_SUFFIXES: Final = (".gz", ".zst", ".zstd")
UNPACKED_FREE_BYTES: Final = 64 << 20
"""So much may come of any number of packed bytes."""
UNPACKED_RATIO_MAX: Final = 300
BUFFER_BYTES: Final = 1 << 18
FED_BYTES: Final = 1 << 11
"""Packed bytes at a time: zstd makes at most 64 MiB of so many."""
GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


class PackedError(ValueError):
    """A packed file that cannot be unpacked. The text says why."""

    def __init__(self, words: str, reason: LeftOutReason = LeftOutReason.DAMAGED) -> None:
        super().__init__(words)
        self.reason = reason


class _Frames(Protocol):
    """One gzip member or zstd frame: zlib's and zstandard's objects alike."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class Unpacked(io.RawIOBase):
    """What the members or frames of a packed file have in them, one after the other. Reads raise PackedError."""

    def __init__(self, file: BinaryIO, kind: str, size: int) -> None:
        self._file, self._kind, self._packed_size = file, kind, size
        self._frame: _Frames | None = None
        self._fed, self._ready, self._rest = 0, memoryview(b""), b""
        self.unpacked, self._cut = 0, False

    def readable(self) -> bool:
        return True

    @property
    def unread(self) -> int:
        """About how many unpacked bytes are not read yet, if the rest is packed as what was read.

        Nobody knows how much of a file is missing that was cut off: as much as it has is assumed.
        """
        if self._cut:
            return self.unpacked
        ratio = self.unpacked / self._fed if self._fed else 1.0
        return int(max(self._packed_size - self._fed, 0) * max(ratio, 1.0))

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            data = self._rest or self._file.read(FED_BYTES)
            if not data:
                if self._frame is not None:
                    self._cut = True
                    raise PackedError(f"the {self._kind} stream ends in the middle")
                return 0
            self._fed += 0 if self._rest else len(data)
            self._rest = b""
            self._unpack(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, data: bytes) -> None:
        if self._frame is None:
            if self.unpacked and not data.strip(b"\0"):  # tapes pad with zeros, and gzip itself ignores them
                return
            self._frame = self._new()
        try:
            self._ready = memoryview(self._frame.decompress(data))
        except (zlib.error, zstandard.ZstdError) as error:
            raise PackedError(f"no whole {self._kind} stream: {error}") from error
        if not self.unpacked and bytes(self._ready[:12]).startswith(PACKED_INSIDE):
            raise PackedError("what is in it is packed once more: unpack it once", LeftOutReason.PACKED)
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        self.unpacked += len(self._ready)
        if self.unpacked > max(UNPACKED_FREE_BYTES, UNPACKED_RATIO_MAX * self._fed):
            self._ready = memoryview(b"")
            raise PackedError(f"it unpacks to more than {UNPACKED_RATIO_MAX} times its size")

    def _new(self) -> _Frames:
        if self._kind == "gzip":
            return zlib.decompressobj(GZIP_WINDOW)
        return zstandard.ZstdDecompressor().decompressobj()


def kind_of(start: bytes) -> str:
    """`gzip`, `zstd`, or empty for a file that is not packed, by its first bytes."""
    if start.startswith(GZIP_MAGIC):
        return "gzip"
    skipped = start[1:4] == ZSTD_SKIPPED and start[:1] and start[0] >> 4 == 5
    return "zstd" if start.startswith(ZSTD_MAGIC) or skipped else ""


def inner_name(path: Path) -> str:
    """The name in lower case, without the ending of a packer."""
    name = path.name.lower()
    return next((name.removesuffix(suffix) for suffix in PACKED_SUFFIXES if name.endswith(suffix)), name)


@contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedReader, Unpacked | None]]:
    """The content of a file, unpacked, and the unpacker if there is one. Raises OSError and PackedError."""
    with path.open("rb") as file:
        kind = kind_of(file.read(4))
        file.seek(0)
        if not kind:
            if path.suffix.lower() in PACKED_SUFFIXES and path.stat().st_size:
                raise PackedError(f"it is named {path.suffix} and is no such file")
            yield file, None
            return
        unpacked = Unpacked(file, kind, path.stat().st_size)
        yield io.BufferedReader(unpacked, BUFFER_BYTES), unpacked
