"""A build of token shards that is not through: what it has so far, beside its shards, so that it can go on after a break.

Kept for each shard, in one atomic step: the shards with their hashes, and the length of each document so far. Lengths and seed
decide the order, so a build that goes on encodes only documents that no shard has yet. Refuses to go on with another text.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from node.data.manifest import Shard
from node.data.permutation import Shuffle
from node.data.shard_cache import matches
from node.data.walk import STATE_FILE
from protos.disk import write_bytes, writing
from protos.errors import DataError

LENGTHS_FILE: Final = "building.lengths"
LENGTH_TYPE: Final = np.dtype("<u4")
STATE_FORMAT: Final = 1


@dataclass(frozen=True)
class Begun:
    """What is on the disk. `key`: of text, tokenizer and options. `texts_sha256`: of the documents whose lengths are known.

    `ended`: the text was read to its end. `lost`: what the tokenizer lost of these documents, see `Tally.saved`.
    """

    key: str
    shards: tuple[Shard, ...] = ()
    lengths: Sequence[int] = ()
    texts_sha256: str = ""
    ended: bool = False
    lost: dict[str, Any] = field(default_factory=lambda: {"left": {}, "notes": {}})

    def done(self, seed: int, tokens_max: int) -> set[int]:
        """The documents that lie in these shards as a whole: nobody needs their tokens again."""
        shuffle, written = Shuffle[_Length](seed, tokens_max), sum(shard.tokens for shard in self.shards)
        found = set[int]()
        for document in self._order(shuffle):
            written -= len(document)
            if written < 0:
                break
            found.add(document.number)
        return found

    def _order(self, shuffle: Shuffle[_Length]) -> Iterator[_Length]:
        for number, length in enumerate(self.lengths):
            yield from shuffle.add(_Length(number, length))
        if self.ended:
            yield from shuffle.rest()


@dataclass(frozen=True)
class _Length:
    """A document without its tokens."""

    number: int
    length: int

    def __len__(self) -> int:
        return self.length


@contextmanager
def begun(folder: Path, key: str, width: int) -> Iterator[Begun]:
    """What an earlier build left in `folder`, which belongs to this process meanwhile. Raises DataError and DiskError.

    `width`: bytes of a token.
    """
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if found and STATE_FILE not in found:
        raise DataError(f"data build: {folder} has something in it already; name a new folder")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not found:
            save(folder, Begun(key), 0)
        file = (folder / LENGTHS_FILE).open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                f"data build: another process builds in {folder}; wait for it, or name a new folder"
            ) from error
        yield _load(folder, key, width)


def save(folder: Path, state: Begun, known: int) -> None:
    """Put the state on the disk. `known`: how many lengths are there already. Raises DiskError."""
    path = folder / LENGTHS_FILE
    with writing(path), path.open("ab") as file:
        file.truncate(known * LENGTH_TYPE.itemsize)
        file.write(np.array(state.lengths[known:], dtype=LENGTH_TYPE).tobytes())
        file.flush()
        os.fsync(file.fileno())
    values = {
        "format": STATE_FORMAT,
        "key": state.key,
        "shards": [asdict(shard) for shard in state.shards],
        "lengths": len(state.lengths),
        "texts_sha256": state.texts_sha256,
        "ended": state.ended,
        "lost": state.lost,
    }
    write_bytes(folder / STATE_FILE, json.dumps(values).encode())


def close(folder: Path) -> None:
    """The build is through. Raises DiskError."""
    with writing(folder):
        for name in (LENGTHS_FILE, STATE_FILE):
            (folder / name).unlink(missing_ok=True)


def _load(folder: Path, key: str, width: int) -> Begun:
    path = folder / STATE_FILE
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != STATE_FORMAT:
            raise ValueError(f"its format is {values['format']!r}, and this version reads {STATE_FORMAT}")
        lengths = np.fromfile(folder / LENGTHS_FILE, dtype=LENGTH_TYPE, count=values["lengths"])
        if len(lengths) < values["lengths"]:
            raise ValueError(f"{LENGTHS_FILE} has {len(lengths)} of {values['lengths']} lengths")
        shards = [Shard(**shard) for shard in values["shards"]]
        state = Begun(
            values["key"],
            tuple(shards),
            tuple(lengths.tolist()),
            values["texts_sha256"],
            values["ended"],
            values["lost"],
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"data build: {path} cannot be read: {error}; delete {folder}, and start again") from error
    if state.key != key:
        raise DataError(
            f"data build: {folder} has the beginning of another build (its text, tokenizer or options differ): start that one "
            "again to finish it, name a new folder, or delete this one"
        )
    good = next((at for at, shard in enumerate(shards) if not _is_there(folder, shard, width)), len(shards))
    return replace(state, shards=state.shards[:good])  # a shard that is lost is built again, and those after it


def _is_there(folder: Path, shard: Shard, width: int) -> bool:
    return (folder / shard.name).is_file() and matches(folder / shard.name, shard, width)
