"""Token shards from text: `swarmentum data build`. Documents are shuffled, tokenised, and cut into files of equal size.

The text is a file, a folder, a JSON Lines, Parquet or Arrow file, or a dataset that the `datasets` library opens. Documents
stream through: neither the text nor the tokens have to fit into memory. A build that broke off goes on, and gives the same
bytes as a build in one go. Refuses to write into a folder that has something else in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from node.data.corpus import survey
from node.data.samples import SHUFFLED_TOKENS, Shuffle, shuffled
from node.data.shard_cache import matches
from node.data.shards import MANIFEST, SHARDS_MAX, TEXT_CHARACTERS_MAX, Shard, ShardManifest, sha256_of
from node.data.sources import HUB, Source, documents
from node.data.tally import ALLOW, Reading, Tally
from node.data.text_files import STATE_FILE
from node.data.tokenizer import Encoder, Tokenizer
from node.data.tokens import parts_of
from protos.disk import write_bytes, writing
from protos.errors import DataError

LENGTHS_FILE: Final = "building.lengths"
LENGTH_TYPE: Final = np.dtype("<u4")
STATE_FORMAT: Final = 1


@dataclass(frozen=True)
class Begun:
    """A build that is not through: what it has on the disk so far, beside its shards, so that it can go on after a break.

    Kept for each shard, in one atomic step: the shards with their hashes, and the length of each document so far. Lengths and
    seed decide the order, so a build that goes on encodes only documents that no shard has yet. Refuses to go on with another
    text. `key`: of text, tokenizer and options. `texts_sha256`: of the documents whose lengths are known.

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
            held = isinstance(error, BlockingIOError)
            why = "another process builds there; wait for it" if held else f"its disk locks no files ({error.strerror})"
            raise DataError(f"data build: {folder}: {why}, or name a new folder") from error
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


__all__ = ["Built", "Source", "build", "shuffled", "texts"]

SHARD_TOKENS: Final = 1 << 24
HOW: Final = f"start again with {ALLOW}: the build goes on where it stopped"

Told = Callable[[int, int, int], None]
"""Called with the documents, tokens and shards so far."""
Ids = npt.NDArray[Any]


@dataclass(frozen=True)
class Built:
    """A set that is ready. `sha256` names it in `run.toml`."""

    folder: Path
    sha256: str
    documents: int
    tokens: int
    shards: int
    reading: Reading = field(default_factory=Reading)


def build(
    source: Source,
    tokenizer: Tokenizer,
    name: str,
    folder: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    seed: int = 0,
    allow_left_out: bool = False,
    told: Told = lambda documents, tokens, shards: None,
) -> Built:
    """Write shards of `shard_tokens` tokens and their manifest. `name`: of the tokenizer. Raises DataError and DiskError.

    Goes on with what an earlier build of the same text left in `folder`. Raises LeftOutError if much text is left out, unless
    that is allowed: before the first shard if the first text shows it, and before the manifest.
    """
    if not source.place.startswith(HUB):
        survey(source, tokenizer).check(allowed=allow_left_out)
    fingerprint = sha256_of(tokenizer.fingerprint())
    key = json.dumps([asdict(source), fingerprint, name, seed, shard_tokens, SHUFFLED_TOKENS])
    with begun(folder, sha256_of(key.encode()), Encoder(tokenizer, Tally()).dtype.itemsize) as state:
        texts_ = _Texts(source, tokenizer, state, state.done(seed, SHUFFLED_TOKENS))
        made = list(state.shards)
        for number, tokens in enumerate(_cut(shuffled(texts_.tokens(), seed), shard_tokens, texts_.encoder.dtype)):
            if number < len(state.shards):
                continue
            if number == SHARDS_MAX:
                raise DataError(f"data build: more than {SHARDS_MAX} shards; give a larger --shard-tokens")
            data = tokens.tobytes()
            made.append(Shard(f"{number:06}.bin", len(tokens), sha256_of(data)))
            write_bytes(folder / made[-1].name, data)
            texts_.save(folder, made)
            told(len(texts_.lengths), sum(texts_.lengths), len(made))
        reading = texts_.reading()
        reading.check(source.place, allowed=allow_left_out, how=HOW)
        left_out, dtype = tuple(reading.counts().items()), texts_.encoder.dtype.name
        # names of folders may be long, and no UTF-8
        told_name, place = (it[:TEXT_CHARACTERS_MAX].encode(errors="replace").decode() for it in (name, source.place))
        manifest = ShardManifest(told_name, fingerprint, tokenizer.vocabulary, dtype, tuple(made), place, left_out)
        encoded = manifest.encode()
        write_bytes(folder / MANIFEST, encoded)
        close(folder)
    return Built(folder, sha256_of(encoded), len(texts_.lengths), manifest.tokens, len(made), reading)


class _Texts:
    """The documents of a source as ids. Those that lie in shards already are zeros of the same length."""

    def __init__(self, source: Source, tokenizer: Tokenizer, state: Begun, done: set[int]) -> None:
        self._source, self._state, self._done = source, state, done
        self.encoder = Encoder(tokenizer, Tally.restored(state.lost))
        self._again = Encoder(tokenizer, Tally())
        self.lengths, self._tally, self._ended = list(state.lengths), Tally(), False
        self._known, self._hashed = len(state.lengths), hashlib.sha256()

    def tokens(self) -> Iterator[Ids]:
        """One document after the other. Raises DataError if the text is another than at the build's beginning."""
        for number, document in enumerate(documents(self._source, self._tally)):
            self._hashed.update(hashlib.sha256(document.data).digest())
            if number >= len(self._state.lengths):
                ids = tokenised(document.text(), self.encoder, document.path)
                self.lengths.append(len(ids))
            elif number in self._done:
                ids = np.broadcast_to(np.zeros(1, dtype=self.encoder.dtype), (self.lengths[number],))
            else:
                ids = tokenised(document.text(), self._again, document.path)
            self._check(number + 1, len(ids) == self.lengths[number])
            yield ids
        self._check(self._tally.documents, self._tally.documents >= len(self._state.lengths))
        self._ended = True

    def _check(self, read: int, same: bool) -> None:
        known = len(self._state.lengths)
        if not same or (known and read == known and self._hashed.hexdigest() != self._state.texts_sha256):
            raise DataError(
                f"data build: the text of {self._source.place} is another than when this build began: delete the folder of the "
                "shards, or name a new one, and start again"
            )

    def save(self, folder: Path, made: list[Shard]) -> None:
        """After each shard."""
        behind, lost = self._tally.documents < len(self._state.lengths), self.encoder.tally.saved()
        texts_sha256 = self._state.texts_sha256 if behind else self._hashed.hexdigest()
        ended = self._state.ended if behind else self._ended
        state = Begun(self._state.key, tuple(made), self.lengths, texts_sha256, ended, lost)
        save(folder, state, self._known)
        self._known = len(self.lengths)

    def reading(self) -> Reading:
        """What was read and lost, of the whole text."""
        self._tally.join(self.encoder.tally)
        return self._tally.reading()


def tokenised(text: str, encoder: Encoder, place: object) -> Ids:
    """One document's ids, and the tokenizer's end of a text after them; a newline if it has none."""
    end = encoder.tokenizer.end
    parts = parts_of(text if end is not None else text + "\n")
    ids = [encoder.encode(part, place) for part in parts]
    return np.concatenate([*ids, np.array([] if end is None else [end], dtype=encoder.dtype)])


def _cut(documents: Iterable[Ids], size: int, dtype: np.dtype[Any]) -> Iterator[Ids]:
    """All tokens in runs of `size`. A short rest joins the last full run, so that no shard is too short for a window."""
    waiting, tokens = [np.empty(0, dtype=dtype)], 0
    for document in documents:
        waiting.append(document)
        tokens += len(document)
        if tokens >= 2 * size:
            joined = np.concatenate(waiting)
            full = tokens // size - 1
            yield from (joined[at * size : (at + 1) * size] for at in range(full))
            waiting, tokens = [joined[full * size :]], tokens - full * size
    if tokens:
        yield np.concatenate(waiting)


def texts(source: Source, *, allow_left_out: bool = False) -> Iterator[str]:
    """The documents of a source, in its order. Raises DataError that names the file, the row and what was expected."""
    tally = Tally()
    for document in documents(source, tally):
        yield document.text()
    tally.reading().check(source.place, allowed=allow_left_out)
