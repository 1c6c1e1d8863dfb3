"""Shards on this machine's disk: a folder that has all of them, or a bounded cache that is filled from the network.

A shard is trusted only after its bytes were hashed in this process. Refuses shards that differ from their manifest.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np

from node.data.shards import MANIFEST, MANIFEST_BYTES_MAX, Shard, ShardManifest, parse
from node.data.tokens import FileTokens, check_vocabulary
from protos.errors import DataError

OPEN_SHARDS_MAX: Final = 8
PART: Final = ".part"
"""End of the name of a shard that is not whole yet."""

Fetch = Callable[[int, Callable[[int], bool]], bool]
"""`fetch(shard, told)` brings a shard into the folder, tries until it has it, and says whether it has. `told(bytes)` answers
whether the shard is still wanted."""


class DamagedShardError(DataError):
    """A file is not the shard that the manifest names."""


def manifest_of(folder: Path) -> tuple[bytes, ShardManifest]:
    """The manifest file of a folder, and what it says. Raises DataError."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror}") from error
    return data, parse(data, str(path))


class Shards:
    """Opened shards of a folder, at most OPEN_SHARDS_MAX, each hashed and checked when it is opened."""

    def __init__(self, manifest: ShardManifest, folder: Path, vocabulary: int) -> None:
        self.manifest, self.folder, self._vocabulary = manifest, folder, vocabulary
        self._open: dict[int, FileTokens] = {}

    def path(self, shard: int) -> Path:
        return self.folder / self.manifest.shards[shard].name

    def open(self, shard: int) -> FileTokens:
        """The tokens of a shard that is in the folder. Raises DataError if they are not the manifest's."""
        if shard in self._open:
            return self._open[shard]
        known, path = self.manifest.shards[shard], self.path(shard)
        tokens = FileTokens(path, np.dtype(self.manifest.dtype).newbyteorder("<"), known.tokens)
        if not matches(path, known, self.manifest.width):
            raise DamagedShardError(
                f"data: {path} is not the file that {MANIFEST} names: its size or SHA-256 differs; "
                "copy it again from where the set comes from"
            )
        check_vocabulary(tokens, self._vocabulary, str(path))
        while len(self._open) >= OPEN_SHARDS_MAX:
            del self._open[next(iter(self._open))]
        self._open[shard] = tokens
        return tokens

    def close(self, shard: int) -> None:
        """Nobody needs it any more."""
        self._open.pop(shard, None)


def matches(path: Path, shard: Shard, width: int) -> bool:
    """Whether a file is this shard."""
    try:
        if path.stat().st_size != shard.tokens * width:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror}") from error


class Folder:
    """All shards are in a folder of this machine."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        missing = [shard.name for shard in shards.manifest.shards if not (shards.folder / shard.name).is_file()]
        if missing:
            raise DataError(
                f"data: {shards.folder} lacks {len(missing)} of {len(shards.manifest.shards)} shards, the first is "
                f"{missing[0]}; copy the whole folder"
            )

    def tokens(self, shard: int) -> FileTokens:
        return self._shards.open(shard)

    def want(self, shards: list[int]) -> None:
        """All are here."""

    def progress(self, shard: int) -> str:
        """All are here."""
        return ""


class Cache:
    """A few shards in a folder, fetched by a thread. It keeps at most `bytes_max`, and always what was wanted last."""

    def __init__(self, shards: Shards, bytes_max: int, fetch: Fetch) -> None:
        self._shards, self.bytes_max, self._fetch = shards, bytes_max, fetch
        self._lock = threading.Condition()
        self._wanted: list[int] = []
        self._here: dict[int, None] = {}  # the shard that was wanted longest ago comes first
        self._under_way: tuple[int, int] | None = None
        self._closed = False
        for shard in range(len(shards.manifest.shards)):
            if shards.path(shard).is_file():  # from an earlier life; hashed when it is opened
                self._here[shard] = None
        self._thread = threading.Thread(target=self._work, name="training data", daemon=True)
        self._thread.start()

    def tokens(self, shard: int) -> FileTokens | None:
        """See `Shelf`. A file that is not the manifest's shard is fetched again."""
        with self._lock:
            if shard not in self._here:
                return None
        try:
            return self._shards.open(shard)
        except DamagedShardError:
            with self._lock:
                self._here.pop(shard, None)
                self._shards.path(shard).unlink(missing_ok=True)
                self._lock.notify()
            return None

    def want(self, shards: list[int]) -> None:
        with self._lock:
            self._wanted = list(shards)
            for shard in shards:
                if shard in self._here:
                    self._here[shard] = self._here.pop(shard)
            self._lock.notify()

    def progress(self, shard: int) -> str:
        known = self._shards.manifest.shards[shard]
        with self._lock:
            under_way = self._under_way
        done = under_way[1] if under_way is not None and under_way[0] == shard else 0
        percent = 100 * done // (known.tokens * self._shards.manifest.width)
        return f"the training text of this step ({known.name}) is being downloaded: {percent} %"

    @property
    def total_bytes(self) -> int:
        """Of the shards that are here. From any thread."""
        with self._lock:
            return self._bytes_of(self._here)

    def limit(self, bytes_max: int) -> None:
        """Keep at most so much from now on, and always what was wanted last. From any thread."""
        with self._lock:
            self.bytes_max = bytes_max
            for old in list(self._here):
                if self._bytes_of(self._here) <= bytes_max:
                    return
                self._remove(old)

    def close(self) -> None:
        """End the thread, soon; what it has of a shard stays, and is resumed."""
        with self._lock:
            self._closed = True
            self._lock.notify()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._next() is not None)
                shard = self._next()
                if self._closed or shard is None:
                    return
                self._under_way = (shard, 0)
                self._make_room(shard)
            came = self._fetch(shard, lambda done, shard=shard: self._note(shard, done))  # type: ignore[misc]
            with self._lock:
                self._under_way = None
                if came:
                    self._here[shard] = None

    def _next(self) -> int | None:
        return next((shard for shard in self._wanted if shard not in self._here), None)

    def _note(self, shard: int, done: int) -> bool:
        with self._lock:
            self._under_way = (shard, done)
            return shard in self._wanted and not self._closed

    def _make_room(self, shard: int) -> None:
        """Remove shards that nobody wants, until there is room for one more; and what was fetched of others."""
        part = self._shards.path(shard).name + PART
        for old_part in self._shards.folder.glob(f"*{PART}"):
            if old_part.name != part:
                old_part.unlink(missing_ok=True)
        for old in list(self._here):
            if self._bytes_of([*self._here, shard]) <= self.bytes_max:
                return
            self._remove(old)

    def _bytes_of(self, shards: Iterable[int]) -> int:
        known = self._shards.manifest
        return sum(known.shards[shard].tokens * known.width for shard in shards)

    def _remove(self, shard: int) -> None:
        """Unless somebody wants it."""
        if shard not in self._wanted:
            del self._here[shard]
            self._shards.close(shard)
            self._shards.path(shard).unlink(missing_ok=True)
