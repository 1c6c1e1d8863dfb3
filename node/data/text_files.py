"""Files of text: the one walker over folders, in the same order on every machine; and streams of packed and plain files.

Each entry that the walker does not give back is told to the tally. Refuses: hidden files, what systems and editors put beside
text, links out of the folder. A text is given back once, however many links lead to it. The layout of the hub's cache is known:
`blobs` are read through `snapshots`.

A file's first bytes decide whether it is packed, not its name; plain files are streams, too. Refuses: a stream that ends in the
middle, more than UNPACKED_RATIO_MAX times the packed bytes, and what is packed twice.
"""

from __future__ import annotations

import fnmatch
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import BinaryIO, Final, Protocol

import zstandard

from node.data.tally import LeftOutReason, Tally
from protos.errors import DataError

RUBBISH_NAMES: Final = frozenset(
    {"__macosx", "__pycache__", "thumbs.db", "desktop.ini", "ehthumbs.db", "$recycle.bin", "system volume information",
     "lost+found", "@eadir", "icon\r", "_success"}
)  # fmt: skip
RUBBISH_PATTERNS: Final = (
    "*~",
    "#*#",
    "*.swp",
    "*.swo",
    "*.bak",
    "*.orig",
    "*.lock",
    "*.crc",
    "cache-*.arrow",
    "tmp*.arrow",
)
PARTIAL_PATTERNS: Final = ("*.incomplete", "*.part", "*.partial", "*.crdownload", "*.download", "*.aria2", "*.tmp")
FILES_MAX: Final = 10_000_000
BLOBS, REFS, SNAPSHOTS, NO_EXIST = "blobs", "refs", "snapshots", ".no_exist"
MANIFEST_FILE: Final = "manifest.json"
STATE_FILE: Final = "building.json"
"""Beside the shards of a build that is not through."""
FIRST_SHARD: Final = "000000.bin"


def walk(root: Path, tally: Tally, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """The files below `root`, sorted. `skipped`: names of folders that are not meant. Raises DataError."""
    files, links = list[Path](), list[Path]()

    def unreadable(error: OSError) -> None:
        tally.leave(LeftOutReason.UNREADABLE, f"{error.filename}: {error.strerror}")

    for folder, below, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        if here != root and is_set(here):
            below.clear()
            tally.leave(LeftOutReason.OWN, here)
            continue
        names += [name for name in below if is_link(here / name)]
        below[:] = [name for name in _folders(here, below, tally) if name not in skipped]
        for name in sorted(names):
            path = here / name
            if (why := reason_of_name(name)) is not None:
                tally.leave(why, path, file_size(path))
            else:
                (links if is_link(path) else files).append(path)
        if len(files) + len(links) > FILES_MAX:
            raise DataError(f"data: {root} has more than {FILES_MAX:,} files; name a folder that has the text alone")
    found = [*_regular(files, tally), *_linked(root, files, links, tally)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def reason_of_name(name: str) -> LeftOutReason | None:
    """Why a file or folder of this name is left out; None if it is not."""
    low = name.lower()
    if low in RUBBISH_NAMES or any(fnmatch.fnmatchcase(low, pattern) for pattern in RUBBISH_PATTERNS):
        return LeftOutReason.RUBBISH
    if name.startswith("."):
        return LeftOutReason.HIDDEN
    if any(fnmatch.fnmatchcase(low, pattern) for pattern in PARTIAL_PATTERNS):
        return LeftOutReason.PARTIAL
    return None


def is_set(folder: Path) -> bool:
    """Whether a folder has token shards, whole or being built."""
    there = [stat.S_ISREG(mode_of(folder / name)) for name in (STATE_FILE, MANIFEST_FILE, FIRST_SHARD)]
    return there[0] or (there[1] and there[2])


def _folders(here: Path, below: list[str], tally: Tally) -> Iterator[str]:
    """The folders to look into."""
    of_cache = BLOBS in below and SNAPSHOTS in below
    revision = (
        _revision(here.parent, below, tally)
        if here.name == SNAPSHOTS and stat.S_ISDIR(mode_of(here.parent / BLOBS))
        else None
    )
    for name in sorted(below):
        if is_link(here / name) or (of_cache and name in (BLOBS, REFS, NO_EXIST)):
            continue
        if revision not in (None, name):
            tally.leave(LeftOutReason.REVISION, here / name)
        elif (why := reason_of_name(name)) is not None:
            tally.leave(why, here / name)
        else:
            yield name


def _revision(cache: Path, revisions: list[str], tally: Tally) -> str | None:
    """The snapshot of the hub's cache that is meant. Raises DataError if several could be."""
    if len(revisions) < 2:
        return None
    try:
        named = (cache / REFS / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = ""
    if named in revisions:
        return named
    raise DataError(
        f"data: {cache} has {len(revisions)} revisions, and refs/main names none of them: name one of "
        f"{cache / SNAPSHOTS}, such as {sorted(revisions)[0]}"
    )


def _regular(files: list[Path], tally: Tally) -> Iterator[Path]:
    for path in files:
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            tally.leave(LeftOutReason.UNREADABLE, f"{path}: {error.strerror}")
            continue
        if stat.S_ISREG(mode):
            yield path
        else:
            tally.leave(LeftOutReason.SPECIAL, path)


def _linked(root: Path, files: list[Path], links: list[Path], tally: Tally) -> Iterator[Path]:
    """Links to files that nothing else leads to."""
    homes = [root.resolve(), *_blobs_of(root)]
    known = {path.resolve() for path in files}
    for path in sorted(links):
        target = Path(os.path.realpath(path))
        if not target.exists():
            pointer = LeftOutReason.POINTER if ".git/annex/" in os.fspath(path.readlink()) else LeftOutReason.DANGLING
            tally.leave(pointer, f"{path} -> {path.readlink()}")
        elif target in known or (target.is_dir() and target.is_relative_to(homes[0])):
            tally.leave(LeftOutReason.LINK, path)
        elif not any(target.is_relative_to(home) for home in homes):
            tally.leave(LeftOutReason.OUTSIDE, f"{path} -> {target}", file_size(target))
        elif not target.is_file():
            tally.leave(LeftOutReason.SPECIAL, path)
        else:
            known.add(target)
            yield path


def _blobs_of(root: Path) -> list[Path]:
    """Where the links of a snapshot of the hub's cache lead to."""
    real = root.resolve()
    snapshots = [folder for folder in (real, *real.parents) if folder.name == SNAPSHOTS]
    return [blobs for folder in snapshots if (blobs := folder.parent / BLOBS).is_dir()]


def mode_of(path: Path) -> int:
    """The kind of what is at a place; 0 for nothing, or for what this process may not see."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def is_link(path: Path) -> bool:
    """Whether a link is there."""
    try:
        return stat.S_ISLNK(path.lstat().st_mode)
    except OSError:
        return False


def file_size(path: Path) -> int:
    """Bytes of a file; 0 for one that is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


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


def inner_name(path: PurePath) -> str:
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
