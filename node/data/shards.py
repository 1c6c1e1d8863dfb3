"""A set of token shards: its manifest, whose SHA-256 names it, and the samples over shards of which only a few are here.

The shards of a set are raw little-endian token files. The manifest, a small JSON file beside them, may come from a stranger's
server, so `parse` is its door. Samples are a pure function of index and manifest.

An epoch takes the shards in a random order, and the windows of each shard in a random order. So the samples of one step lie in
one shard or two, and all peers need the same shard at the same time. A peer keeps a few shards and fetches the next one.
The text is shuffled over the shards when they are built (`swarmentum data build`). ADR 47.

A window never crosses two shards. The end of the last shard is held out and never met in training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from typing import Annotated, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from node.data.samples import BATCH_SAMPLES_MAX, HELD_OUT_FRACTION, Batch, Samples, permute
from node.data.tokens import TOKEN_TYPES, FileTokens
from protos.assignment import Range
from protos.errors import DataError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
MANIFEST_BYTES_MAX: Final = 32 << 20
SHARDS_MAX: Final = 1 << 17
SHARD_BYTES_MAX: Final = 1 << 32
TEXT_CHARACTERS_MAX: Final = 1000
REASONS_MAX: Final = 64
COUNT_MAX: Final = 1 << 62
STRICT: Final = ConfigDict(strict=True)

Count = Annotated[int, Field(ge=1)]
Sha256Hex = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
Words = Annotated[str, Field(max_length=TEXT_CHARACTERS_MAX)]


@dataclass(frozen=True, config=STRICT)
class Shard:
    """One file of a set."""

    name: Annotated[str, Field(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\z")]
    tokens: Annotated[Count, Field(le=SHARD_BYTES_MAX)]
    sha256: Sha256Hex
    """Of the file, in hex digits."""


@dataclass(frozen=True, config=STRICT)
class ShardManifest:
    """A set of shards. `tokenizer_sha256`: of the tokenizer's description, which differs if two encode differently."""

    tokenizer: Words
    tokenizer_sha256: Sha256Hex
    vocabulary: Annotated[Count, Field(le=1 << 32)]
    dtype: Annotated[str, Field(pattern=rf"\A({'|'.join(TOKEN_TYPES)})\z")]
    shards: Annotated[tuple[Shard, ...], Field(min_length=1, max_length=SHARDS_MAX)]
    source: Words = ""
    """For people: the text that the tokens come from."""
    left_out: Annotated[
        tuple[tuple[Annotated[str, Field(pattern=r"\A[a-z0-9_]{1,40}\z")], Annotated[Count, Field(le=COUNT_MAX)]], ...],
        Field(max_length=REASONS_MAX),
        BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, dict) else value),
    ] = ()
    """For people: what of the text is not in the tokens, by reason. A manifest without it is as it always was."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = {shard.name for shard in self.shards}
        if len(names) < len(self.shards) or MANIFEST in names:
            raise ValueError(f"two shards have one name, or one is named {MANIFEST}")
        if any(shard.tokens > SHARD_BYTES_MAX // self.width for shard in self.shards):
            raise ValueError(f"a shard has more than {SHARD_BYTES_MAX >> 30} GiB")
        return self

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return np.dtype(self.dtype).itemsize

    @property
    def tokens(self) -> int:
        """Of all shards."""
        return sum(shard.tokens for shard in self.shards)

    def encode(self) -> bytes:
        """The file."""
        values = {"format": FORMAT, **asdict(self)}
        left = dict(values.pop("left_out"))
        return json.dumps(values | ({"left_out": left} if left else {}), indent=1).encode() + b"\n"


def sha256_of(data: bytes) -> str:
    """The name of a set: the hash of its manifest file, in hex digits."""
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes, place: str) -> ShardManifest:
    """The manifest that `data` is. `place` is for the error. Raises DataError."""
    try:
        if len(data) > MANIFEST_BYTES_MAX:
            raise ValueError(f"it has more than {MANIFEST_BYTES_MAX >> 20} MiB")
        values = json.loads(data)
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        if found != FORMAT:
            raise ValueError(f"its format is {found!r}, and this version reads format {FORMAT}")
        # earlier versions wrote names of folders that are no UTF-8, and read sets without the name of a tokenizer
        text = json.dumps({"tokenizer": ""} | values, ensure_ascii=False).encode(errors="replace")
        return TypeAdapter(ShardManifest).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        why = (f"{key} is {str(first['input'])[:40]!r}: " if key else "") + first["msg"]
        raise DataError(f"data: {place} is no manifest of token shards: {why}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"data: {place} is no manifest of token shards: {error}") from error


AHEAD_SHARDS: Final = 1
"""Shards after those of a step that are fetched before a step needs them."""
EPOCHS_KEPT: Final = 4
Places = npt.NDArray[np.int64]


class ShardStore(Protocol):
    """Where the shards are."""

    def tokens(self, shard: int) -> FileTokens | None:
        """The tokens of a shard; None if it is not here yet."""

    def want(self, shards: list[int]) -> None:
        """Fetch these shards in this order, and keep them. Others may leave this machine."""

    def progress(self, shard: int) -> str:
        """How far the fetching is, in words."""


class ShardedSamples(Samples):
    """Training and validation windows over shards."""

    def __init__(self, manifest: ShardManifest, shelf: ShardStore, context: int, seed: int) -> None:
        if context < 1:
            raise DataError(f"data.context = {context}: expected at least 1 token")
        counts = np.array([(shard.tokens - 1) // context for shard in manifest.shards], dtype=np.int64)
        if counts.min() < 1 or counts.sum() < 2:
            short = manifest.shards[int(counts.argmin())]
            raise DataError(
                f"data: the shard {short.name} has {short.tokens} tokens, and a context of {context} needs at least "
                f"{context + 1} in each shard, and two windows in all; build larger shards or lower the context"
            )
        self._shelf, self._seed, self.context = shelf, seed, context
        alone = int(len(counts) == 1)
        held_out = max(1, int(counts.sum() * HELD_OUT_FRACTION))
        self.validation_windows = min(held_out, int(counts[-1]) - alone)
        self._counts = counts.copy()
        self._counts[-1] -= self.validation_windows
        self.windows = int(self._counts.sum())
        self.reading_seconds = 0.0
        self._epoch = lru_cache(EPOCHS_KEPT)(self._order_of_shards)

    def batch(self, start: int, stop: int) -> Batch:
        """Samples start..stop-1, int64 [stop - start, context + 1]; indices are unbounded. DataError if a shard is not here."""
        assert 0 <= start <= stop, (start, stop)
        assert stop - start <= BATCH_SAMPLES_MAX, f"{stop - start} samples in a batch"
        parts = [self._read(shard, windows) for shard, windows in self._places(start, stop)]
        return np.concatenate([np.empty((0, self.context + 1), dtype=np.int64), *parts])

    def validation(self, samples_max: int | None = None) -> Batch:
        """Held-out windows, spread evenly over the end of the last shard, int64 [n, context + 1]."""
        count = self.validation_windows if samples_max is None else min(samples_max, self.validation_windows)
        chosen = np.arange(count, dtype=np.int64) * self.validation_windows // max(1, count)
        return self._read(len(self._counts) - 1, int(self._counts[-1]) + chosen)

    def away(self, ranges: Iterable[Range]) -> str:
        """See `Samples.away`. Asks for the shards of these samples, and for the next ones."""
        wanted = list(dict.fromkeys(shard for part in ranges for shard in self._shards(part)))
        ahead = [shard for shard in self._after(wanted, ranges) if shard not in wanted]
        self._shelf.want([*wanted, *ahead[:AHEAD_SHARDS]])
        missing = [shard for shard in wanted if self._shelf.tokens(shard) is None]
        return self._shelf.progress(missing[0]) if missing else ""

    def _after(self, wanted: list[int], ranges: Iterable[Range]) -> Iterator[int]:
        """The shards that training comes to after these ranges."""
        stop = max((part.stop for part in ranges), default=0)
        for _ in range(len(wanted) + AHEAD_SHARDS):
            epoch, position = divmod(stop, self.windows)
            shards, ends = self._epoch(epoch)
            at = int(np.searchsorted(ends, position, side="right"))
            yield int(shards[at])
            stop = epoch * self.windows + int(ends[at])

    def _shards(self, part: Range) -> Iterator[int]:
        return (shard for shard, _ in self._places(part.start, part.stop))

    def _places(self, start: int, stop: int) -> Iterator[tuple[int, Places]]:
        """(shard, its windows) of samples start..stop-1, a pair for each shard and epoch that the range touches."""
        while start < stop:
            epoch, position = divmod(start, self.windows)
            shards, ends = self._epoch(epoch)
            at = int(np.searchsorted(ends, position, side="right"))
            shard, end = int(shards[at]), int(ends[at])
            windows = int(self._counts[shard])
            inside, count = position - (end - windows), min(stop - start, end - position)
            order = permute(np.arange(inside, inside + count), windows, (self._seed << 33) + 2 * shard + 1, epoch)
            yield shard, order
            start += count

    def _order_of_shards(self, epoch: int) -> tuple[Places, Places]:
        """(the shards in the epoch's order, the position in the epoch at which each ends); shards without windows left out."""
        trained = np.flatnonzero(self._counts)
        order = trained[permute(np.arange(len(trained)), len(trained), self._seed << 33, epoch)]
        return order, np.cumsum(self._counts[order])

    def _read(self, shard: int, windows: Places) -> Batch:
        tokens = self._shelf.tokens(shard)
        if tokens is None:
            self._shelf.want([shard])
            raise DataError(f"data: {self._shelf.progress(shard)}")
        return tokens.windows(windows * self.context, self.context + 1).astype(np.int64)
