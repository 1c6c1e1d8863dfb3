"""An archive in a mirror: `swarmentum mirror` copies it there with an index, and `swarmentum verify ADDRESS` reads it back.

Nobody has to trust the mirror: the replay checks each byte that counts, and the hashes in the index tell a copy that broke off.
Refuses names that no archive has, a copy without a state, one that does not fit on the disk, and a folder with links or with
other files of an archive: a verdict is about what the address has.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, FailFast, Field, ValidationError

from node.data.download import one_line
from node.full_disk import is_full
from node.mirror.mirror_places import BLOCK_BYTES, BUCKETS, FOLDER, Place, WebPlace, place_at
from protos.address import SCHEMES
from protos.clocks import Waits
from protos.disk import DiskError, at_home
from protos.errors import NetworkError, OperatorError

INDEX: Final = "archive.json"
INDEX_BYTES_MAX: Final = 8 << 20
FILES_MAX: Final = 50_000
FILE_BYTES_MAX: Final = 1 << 50
TRIES: Final = 4
"""For one file; each goes on where the last one broke off."""
WAIT_SECONDS_MIN: Final = 1.0
WAIT_SECONDS_MAX: Final = 15.0
SPARE_BYTES: Final = 64 << 20
REFUSING: Final = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
"""What a place says that does not change by itself."""
_NAME: Final = re.compile(r"genesis|end|layout\.json|[0-9]{13}/(manifest|state\.safetensors|log|payloads)")
GENESIS: Final = "genesis"
_ALWAYS: Final = (GENESIS, "layout.json")
_OF_A_SEGMENT: Final = ("log", "manifest", "payloads", "state.safetensors")
_PART: Final = ".part"

T = TypeVar("T")
Told = Callable[[int, int], None]
"""Bytes that are done, and of how many."""


class IndexedFile(BaseModel, extra="forbid", frozen=True):
    """One file of the archive, `name` below its folder."""

    name: str = Field(pattern=f"^({_NAME.pattern})$")
    bytes: int = Field(ge=0, le=FILE_BYTES_MAX)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ArchiveIndex(BaseModel, extra="forbid", frozen=True):
    """Which files a copy of an archive has."""

    version: Literal[1] = 1
    files: Annotated[tuple[IndexedFile, ...], FailFast()] = Field(max_length=FILES_MAX)

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def copy_to(archive: Path, address: str, told: Told) -> ArchiveIndex:
    """Copy an archive into the folder at `address`; files that are there already, by the index there, stay.

    An archive that still grows is copied as far as it is now. Segments that a full archive has deleted stay in the copy. Raises
    NetworkError; OperatorError for a place that takes none, that is in the archive itself, or that has another run's archive.
    """
    places = _Places(address)
    if isinstance(places.of(INDEX)[0], WebPlace):
        raise OperatorError(f"{address}: nobody can write to a web address; name the folder or the bucket behind it")
    own, to = archive.resolve(), places.folder
    if to is not None and (to.is_relative_to(own) or own.is_relative_to(to)):
        raise OperatorError(f"{address}: the archive itself is {own}; name a folder outside of it")
    try:
        index = _index_of(archive)
    except FileNotFoundError as error:
        raise OperatorError(f"{error.filename} was deleted meanwhile: run the command again") from error
    there = {file.name: file for file in _trying(f"{address}/{INDEX}", lambda: _held(places))}
    of_run = next((file.sha256 for file in index.files if file.name == GENESIS), "")
    if GENESIS in there and there[GENESIS].sha256 != of_run:  # the sha256 of a genesis is the run's id
        raise OperatorError(
            f"{address}: the archive of run {there[GENESIS].sha256[:16]}... is there, and {own} is of run {of_run[:16]}...: "
            "name another folder, one for each run"
        )
    earlier = _trying(f"{address}/{INDEX}", lambda: _earlier(places, there, index))
    done = 0
    for file in index.files:
        known = there.get(file.name) == file
        _trying(f"{address}/{file.name}", partial(_write_file, places, file, archive / file.name, known=known))
        done += file.bytes
        told(done, index.total_bytes)
    index = ArchiveIndex(files=(*earlier, *index.files))
    # last: who finds the index finds all files
    _trying(f"{address}/{INDEX}", lambda: places.write(INDEX, iter((index.model_dump_json().encode(),))))
    return index


def fetch(address: str, folder: Path, told: Told) -> None:
    """Copy the archive at `address` into `folder`, which may have a part of it. Raises NetworkError, OperatorError."""
    places = _Places(address)
    index = _trying(f"{address}/{INDEX}", lambda: _read_index(places))
    _check_whole(address, index)
    _prepare(folder, index)
    missing = sum(_missing(folder, file) for file in index.files)
    if missing + SPARE_BYTES > (free := shutil.disk_usage(folder).free):
        raise OperatorError(
            f"{folder}: the archive takes {missing / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
        )
    done = 0
    for file in index.files:
        within = partial(_told_within, told, done, index.total_bytes)
        _trying(f"{address}/{file.name}", partial(_fetch_file, places, file, folder / file.name, within))
        done += file.bytes
        told(done, index.total_bytes)


def _check_whole(address: str, index: ArchiveIndex) -> None:
    """Raises OperatorError for an index that leaves out what every archive has."""
    names = {file.name for file in index.files}
    segments = {name.partition("/")[0] for name in names if "/" in name}
    wanted = {*_ALWAYS, *(f"{segment}/{name}" for segment in segments for name in _OF_A_SEGMENT)}
    if lacking := sorted(wanted - names) or ([] if segments else ["a segment"]):
        raise OperatorError(f"{address}: {INDEX} names no whole archive: {', '.join(lacking[:3])} is not there")


def _prepare(folder: Path, index: ArchiveIndex) -> None:
    """Make the folders. Raises OperatorError for a folder with links, or with files of another archive or state of it."""
    names = {file.name for file in index.files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            parent = (folder / name).parent
            parent.mkdir(exist_ok=True)
            for path in (parent, folder / name, folder / f"{name}{_PART}"):
                if (path.is_symlink() and path != folder) or (path != parent and path.exists() and not path.is_file()):
                    raise OperatorError(f"{path} is no plain file or folder; name another folder")
    except OSError as error:
        raise OperatorError(f"{error.filename}: {error.strerror}; name another folder") from error
    others = (str(path.relative_to(folder)) for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")))
    if (other := next((name for name in others if _NAME.fullmatch(name) and name not in names), None)) is not None:
        raise OperatorError(f"{folder / other} is not in the archive at that address; name another folder")


def _missing(folder: Path, file: IndexedFile) -> int:
    """How many bytes of a file are still to come, at most."""
    path, part = folder / file.name, folder / f"{file.name}{_PART}"
    if path.is_file() and path.stat().st_size == file.bytes:
        return 0
    return max(0, file.bytes - part.stat().st_size) if part.is_file() else file.bytes


def _told_within(told: Told, before: int, total: int, done: int) -> None:
    told(before + done, total)


class _Places:
    """The folders of an archive at an address: a place for each segment."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address) if "://" in address else None
        self.folder: Path | None = None
        """If it is a folder of this machine."""
        if address and (parts is None or (parts.scheme == FOLDER and not parts.netloc)):
            path = at_home(address) if parts is None else Path(unquote(parts.path))
            self.folder = path.absolute().resolve()
            address = str(self.folder)
        elif parts is None or parts.scheme not in {*SCHEMES, *BUCKETS} or parts.query or parts.fragment:
            raise OperatorError(
                f"{address}: expected a folder, or its address: https://..., http://..., file:///..., s3://... or hf://..."
            )
        above, _, own = address.rstrip("/").rpartition("/")
        if not above.strip("/") or not own or above.endswith(":/"):
            raise OperatorError(
                f"{address}: expected the address of a folder, such as https://example.org/runs/archive"
            )
        self._above, self._own = above, own
        self._known: dict[str, Place] = {}

    def of(self, name: str) -> tuple[Place, str]:
        """The place of a file, and its name there."""
        segment, _, own = name.rpartition("/")
        if segment not in self._known:
            below = f"{self._own}/{segment}" if segment else self._own
            self._known[segment] = place_at(self._above, below, trusted=True)
        return self._known[segment], own

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there, or if nobody may ask."""
        place, own = self.of(name)
        return None if isinstance(place, WebPlace) else place.size(own)

    def write(self, name: str, blocks: Iterator[bytes]) -> None:
        """A new file. Raises OSError, and what the library of a bucket raises."""
        place, own = self.of(name)
        if isinstance(place, WebPlace):
            raise OSError("nobody can write to a web address")
        place.write(own, blocks)


def _index_of(archive: Path) -> ArchiveIndex:
    # in this order: a log that grows meanwhile names no payload that is not copied
    names = sorted(str(path.relative_to(archive)) for path in archive.rglob("*") if path.is_file())
    found = []
    for name in (name for name in names if _NAME.fullmatch(name)):
        size = (archive / name).stat().st_size
        found.append(IndexedFile(name=name, bytes=size, sha256=_digest(archive / name, size).hexdigest()))
    return ArchiveIndex(files=tuple(found))


def _earlier(places: _Places, there: Mapping[str, IndexedFile], index: ArchiveIndex) -> tuple[IndexedFile, ...]:
    """The segments of the copy before the archive's first one, which is in the copy, too: none is missing between them."""
    first = min((file.name.partition("/")[0] for file in index.files if "/" in file.name), default="")
    if not any(name.startswith(f"{first}/") for name in there):
        return ()
    found = tuple(file for name, file in there.items() if "/" in name and name < first)
    whole = len(found) + len(index.files) <= FILES_MAX and all(places.size(it.name) == it.bytes for it in found)
    return found if whole else ()


def _start_of(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while size and (block := file.read(min(BLOCK_BYTES, size))):
            size -= len(block)
            yield block
    if size:
        raise OperatorError(f"{path} has become shorter meanwhile: run the command again")


def _held(places: _Places) -> tuple[IndexedFile, ...]:
    """The files of the index that is there; none without one that can be read."""
    if places.size(INDEX) is None:
        return ()
    try:
        return _read_index(places).files
    except OperatorError:
        return ()


def _read_index(places: _Places) -> ArchiveIndex:
    place, name = places.of(INDEX)
    data = b"".join(place.read(name, 0, INDEX_BYTES_MAX, exactly=False))
    try:
        index = ArchiveIndex.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        why = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise OperatorError(f"{place.address}: {INDEX} is no index of an archive: {why}") from error
    if len({file.name for file in index.files}) < len(index.files):
        raise OperatorError(f"{place.address}: {INDEX} names a file twice")
    return index


def _write_file(places: _Places, file: IndexedFile, path: Path, *, known: bool) -> None:
    """`known`: the index there has this file already."""
    if not known or places.size(file.name) != file.bytes:
        places.write(file.name, _start_of(path, file.bytes))


def _fetch_file(places: _Places, file: IndexedFile, path: Path, told: Callable[[int], None]) -> None:
    if path.is_file() and path.stat().st_size == file.bytes and _digest(path, file.bytes).hexdigest() == file.sha256:
        return
    part = path.with_name(path.name + _PART)
    start = part.stat().st_size if part.is_file() else 0
    if start > file.bytes:
        start = 0
    digest = _digest(part, start) if start else hashlib.sha256()
    with part.open("ab" if start else "wb") as written:
        for block in _bytes_of(places, file, start):
            digest.update(block)
            written.write(block)
            start += len(block)
            told(start)
    if start < file.bytes:
        raise OSError(f"it ends after {start} of {file.bytes} bytes")
    if digest.hexdigest() != file.sha256:
        part.unlink()
        raise OSError("its bytes are not those that the index names")
    part.replace(path)


def _bytes_of(places: _Places, file: IndexedFile, start: int) -> Iterator[bytes]:
    """From byte `start` on, as many as the index names: a file that grows while it is read has them all."""
    place, name = places.of(file.name)
    left = file.bytes - start
    if left:
        for block in place.read(name, start, FILE_BYTES_MAX, exactly=False):
            yield block[:left]
            left -= len(block)
            if left <= 0:
                return


def _digest(path: Path, size: int) -> hashlib._Hash:
    """SHA-256 of the first bytes of a file."""
    digest = hashlib.sha256()
    for block in _start_of(path, size):
        digest.update(block)
    return digest


def _trying(what: str, work: Callable[[], T]) -> T:
    """What `work` returns, tried again after errors of the network. Raises NetworkError with the last one; DiskError."""
    waits = Waits(WAIT_SECONDS_MIN, WAIT_SECONDS_MAX)
    for left in reversed(range(TRIES)):
        try:
            return work()
        except OperatorError:
            raise
        except Exception as error:  # each library of a place has errors of its own
            if is_full(error):
                raise DiskError(
                    f"{what}: no room is left. Make room, and start again: what is there is used"
                ) from error
            if isinstance(error, OSError) and error.errno in REFUSING:
                raise DiskError(
                    f"{what}: {error.strerror}; name another place, or allow this user to use it"
                ) from error
            if not left:
                raise NetworkError(f"{what}: {one_line(error)}") from error
        time.sleep(waits.next())
    raise AssertionError
