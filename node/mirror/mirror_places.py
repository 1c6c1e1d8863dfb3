"""The places of mirrors: a folder, a web server, and buckets that fsspec knows. All can be read alike.

Refuses, of a run's own addresses, what its operator has no right to name on somebody else's machine: folders, private networks,
and this person's keys for buckets. `trusted` allows them.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from node.data.download import CONNECT_SECONDS_MAX, SILENCE_SECONDS_MAX, WebReader
from protos.address import is_web
from protos.disk import at_home, remove_left
from protos.errors import OperatorError

BLOCK_BYTES: Final = 1 << 20
BUCKET_BLOCK_BYTES: Final = 8 << 20
"""Of one request to a bucket."""
NAMES_MAX: Final = 10_000
TEMPORARY: Final = ".incoming-"
TEMPORARY_SECONDS_MAX: Final = 86_400.0
"""A file that was begun so long ago is nobody's any more."""
FOLDER: Final = "file"
BUCKETS: Final = {"s3": "s3fs", "hf": "huggingface_hub"}
"""Scheme -> the package that reads it."""


def place_at(address: str, below: str, *, trusted: bool) -> Place:
    """The folder `below` of a mirror. OperatorError for an address that this machine may not or cannot use."""
    if is_web(address):
        return WebPlace(address, below, private=trusted)
    scheme = urlsplit(address).scheme.lower() if "://" in address else FOLDER
    if scheme in BUCKETS:
        return BucketPlace(address, below, scheme, trusted=trusted)
    if not trusted:
        raise OperatorError(
            f"mirror {address}: the run names a folder of this machine; if you trust the run's operator, join with --allow-data"
        )
    return FolderPlace(address, below)


class FolderPlace:
    """A folder of this machine, or of a disk that it has mounted."""

    def __init__(self, address: str, below: str) -> None:
        path = unquote(urlsplit(address).path) if address.startswith(f"{FOLDER}://") else address
        self.address, self._path, self._is_swept = address, at_home(path) / below, False

    def read(self, name: str, start: int, most: int, *, exactly: bool) -> Iterator[bytes]:
        """At most `most` bytes of a file from byte `start` on; `exactly`: these. Raises OSError."""
        # a pipe of this name would else wait for ever
        handle = os.open(self._path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(f"{self._path / name} is no file")
            file.seek(start)
            while most and (block := file.read(min(BLOCK_BYTES, most))):
                most -= len(block)
                yield block
            if file.read(1) and not exactly:
                raise OSError(f"{self._path / name} is larger than was promised")

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there."""
        path = self._path / name
        return path.stat().st_size if path.is_file() else None

    def write(self, name: str, blocks: Iterable[bytes]) -> None:
        """A new file, under its name once it is whole."""
        self._path.mkdir(parents=True, exist_ok=True)
        if not self._is_swept:  # once: an archive has thousands of files
            self._sweep()
        fresh = self._path / f"{TEMPORARY}{secrets.token_hex(4)}"  # several anchors may write here
        try:
            with fresh.open("wb") as file:
                for block in blocks:
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path / name)
        finally:
            remove_left(fresh)

    def names(self) -> list[str]:
        """At most NAMES_MAX. Removes files that were begun long ago."""
        self._sweep()
        found = []
        for entry in os.scandir(self._path):
            if entry.name.startswith(TEMPORARY):
                continue
            found.append(entry.name)
            if len(found) == NAMES_MAX:
                break
        return found

    def _sweep(self) -> None:
        """Remove what writers began long ago and never ended: they were killed. As far as it is there, and ours to remove."""
        self._is_swept = True
        with suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.name.startswith(TEMPORARY) and time.time() - entry.stat().st_mtime > TEMPORARY_SECONDS_MAX:
                        Path(entry.path).unlink()

    def delete(self, name: str) -> None:
        """Does nothing if the file is not there."""
        (self._path / name).unlink(missing_ok=True)


class WebPlace:
    """A folder of a web server that knows byte ranges. It is read only."""

    def __init__(self, address: str, below: str, *, private: bool) -> None:
        self.address, self._base = address, f"{address.rstrip('/')}/{below}/"
        self._web = WebReader(private=private)

    def read(self, name: str, start: int, most: int, *, exactly: bool) -> Iterator[bytes]:
        """See `FolderPlace`. Raises httpx2.HTTPError and DataError, too."""
        return self._web.blocks(self._base + name, start, most, exactly=exactly)


class BucketPlace:
    """A folder of a bucket (s3://) or of a repository of the Hugging Face hub (hf://)."""

    def __init__(self, address: str, below: str, scheme: str, *, trusted: bool) -> None:
        self.address, self._base = address, f"{address.rstrip('/')}/{below}/"
        try:
            import fsspec

            self._files: Any = fsspec.filesystem(scheme, skip_instance_cache=True, **_options(scheme, trusted=trusted))
        except ImportError as error:
            raise OperatorError(
                f"mirror {address}: {scheme}:// needs the packages fsspec and {BUCKETS[scheme]}: "
                "pip install 'swarmentum[mirror]'"
            ) from error

    def read(self, name: str, start: int, most: int, *, exactly: bool) -> Iterator[bytes]:
        """See `FolderPlace`; what the bucket's library raises comes, too."""
        path = self._base + name
        if not exactly and (size := self.size(name) or 0) > most:
            raise OSError(f"{path} has {size} bytes, more than was promised")
        while most:
            block: bytes = self._files.cat_file(path, start=start, end=start + min(BUCKET_BLOCK_BYTES, most))
            if not block:
                return
            start, most = start + len(block), most - len(block)
            yield block

    def size(self, name: str) -> int | None:
        """See `FolderPlace`; what the bucket's library raises comes, too."""
        self._files.invalidate_cache()
        try:
            return int(self._files.size(self._base + name))
        except FileNotFoundError:
            return None

    def write(self, name: str, blocks: Iterable[bytes]) -> None:
        """See `FolderPlace`; what the bucket's library raises comes, too."""
        file = self._files.open(self._base + name, "wb", block_size=BUCKET_BLOCK_BYTES)
        try:
            for block in blocks:
                file.write(block)
        except BaseException:
            with suppress(Exception):
                file.discard()
                file.closed = True  # else the garbage collector uploads the part
            with suppress(Exception):
                self.delete(name)
            raise
        file.close()

    def names(self) -> list[str]:
        """See `FolderPlace`; what the bucket's library raises comes, too."""
        self._files.invalidate_cache()
        return [str(path).rsplit("/", 1)[-1] for path in self._files.ls(self._base, detail=False)[:NAMES_MAX]]

    def delete(self, name: str) -> None:
        """See `FolderPlace`; what the bucket's library raises comes, too."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self._base + name)


def _options(scheme: str, *, trusted: bool) -> dict[str, Any]:
    """A place that the run names gets no keys of this person. Each wait on the network has a deadline."""
    if scheme == "hf":
        return {} if trusted else {"token": False}
    deadlines = {
        "connect_timeout": CONNECT_SECONDS_MAX,
        "read_timeout": SILENCE_SECONDS_MAX,
        "retries": {"max_attempts": 2},
    }
    return {"anon": not trusted, "config_kwargs": deadlines}


Place: TypeAlias = FolderPlace | WebPlace | BucketPlace
