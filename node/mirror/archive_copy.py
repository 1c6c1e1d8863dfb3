"""An archive in a mirror: `swarmentum mirror` copies it there with an index, and `swarmentum verify ADDRESS` reads it back.

Nobody has to trust the mirror: the replay checks each byte that counts, and the hashes in the index tell a copy that broke off.
Refuses names that no archive has, more bytes than the index promises, and a copy that does not fit on the disk.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from node.data.download import one_line
from node.mirror.mirror_places import BLOCK_BYTES, Place, WebPlace, place_at
from protos.errors import NetworkError, OperatorError
from protos.waits import Waits

INDEX: Final = "archive.json"
INDEX_BYTES_MAX: Final = 32 << 20
FILES_MAX: Final = 100_000
TRIES: Final = 4
"""For one file; each goes on where the last one broke off."""
WAIT_SECONDS_MIN: Final = 1.0
WAIT_SECONDS_MAX: Final = 15.0
SPARE_BYTES: Final = 64 << 20
_NAME: Final = re.compile(r"genesis|end|layout\.json|\d{13}/(manifest|state\.safetensors|log|payloads)")
_PART: Final = ".part"

T = TypeVar("T")
Told = Callable[[int, int], None]
"""Bytes that are done, and of how many."""


class IndexedFile(BaseModel, extra="forbid", frozen=True):
    """One file of the archive, `name` below its folder."""

    name: str = Field(pattern=f"^({_NAME.pattern})$")
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ArchiveIndex(BaseModel, extra="forbid", frozen=True):
    """Which files a copy of an archive has."""

    version: Literal[1] = 1
    files: tuple[IndexedFile, ...] = Field(max_length=FILES_MAX)

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def copy_to(archive: Path, address: str, told: Told) -> ArchiveIndex:
    """Copy an archive into the folder at `address`; files that are there already, by the index there, stay.

    An archive that still grows is copied as far as it is now. Raises NetworkError; OperatorError for a place that takes none.
    """
    places = _Places(address)
    if isinstance(places.of(INDEX)[0], WebPlace):
        raise OperatorError(f"{address}: nobody can write to a web address; name the folder or the bucket behind it")
    index = _index_of(archive)
    there = {file.name: file for file in _held(places)}
    done = 0
    for file in index.files:
        if there.get(file.name) != file or places.size(file.name) != file.bytes:
            _trying(f"{address}/{file.name}", partial(_write_file, places, file, archive / file.name))
        done += file.bytes
        told(done, index.total_bytes)
    # last: who finds the index finds all files
    _trying(f"{address}/{INDEX}", lambda: places.write(INDEX, iter((index.model_dump_json().encode(),))))
    return index


def fetch(address: str, folder: Path, told: Told) -> None:
    """Copy the archive at `address` into `folder`, which may have a part of it. Raises NetworkError, OperatorError."""
    places = _Places(address)
    index = _trying(f"{address}/{INDEX}", lambda: _read_index(places))
    missing = sum(file.bytes for file in index.files if not (folder / file.name).is_file())
    folder.mkdir(parents=True, exist_ok=True)
    if missing + SPARE_BYTES > (free := shutil.disk_usage(folder).free):
        raise OperatorError(
            f"{folder}: the archive takes {missing / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
        )
    done = 0
    for file in index.files:
        (folder / file.name).parent.mkdir(exist_ok=True)
        within = partial(_told_within, told, done, index.total_bytes)
        _trying(f"{address}/{file.name}", partial(_fetch_file, places, file, folder / file.name, within))
        done += file.bytes
        told(done, index.total_bytes)


def _told_within(told: Told, before: int, total: int, done: int) -> None:
    told(before + done, total)


class _Places:
    """The folders of an archive at an address: a place for each segment."""

    def __init__(self, address: str) -> None:
        address = address if "://" in address else str(Path(address).expanduser().absolute())
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
    except (OSError, OperatorError):
        return ()


def _read_index(places: _Places) -> ArchiveIndex:
    place, name = places.of(INDEX)
    data = b"".join(place.read(name, 0, INDEX_BYTES_MAX, exactly=False))
    try:
        index = ArchiveIndex.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise OperatorError(f"{place.address}: {INDEX} is no index of an archive: {where}: {first['msg']}") from error
    if len({file.name for file in index.files}) < len(index.files):
        raise OperatorError(f"{place.address}: {INDEX} names a file twice")
    return index


def _write_file(places: _Places, file: IndexedFile, path: Path) -> None:
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
        place, name = places.of(file.name)
        blocks = place.read(name, start, file.bytes - start, exactly=False) if file.bytes > start else iter(())
        for block in blocks:
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


def _digest(path: Path, size: int) -> hashlib._Hash:
    """SHA-256 of the first bytes of a file."""
    digest = hashlib.sha256()
    for block in _start_of(path, size):
        digest.update(block)
    return digest


def _trying(what: str, work: Callable[[], T]) -> T:
    """What `work` returns, tried again after errors of the network. Raises NetworkError with the last one."""
    waits = Waits(WAIT_SECONDS_MIN, WAIT_SECONDS_MAX)
    for left in reversed(range(TRIES)):
        try:
            return work()
        except OperatorError:
            raise
        except Exception as error:  # each library of a place has errors of its own
            if not left:
                raise NetworkError(f"{what}: {one_line(error)}") from error
        time.sleep(waits.next())
    raise AssertionError
