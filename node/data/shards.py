"""Samples over a set of token shards of which only a few are on this machine at a time. A pure function of index and manifest.

An epoch takes the shards in a random order, and the windows of each shard in a random order. So the samples of one step lie in
one shard or two, and all peers need the same shard at the same time. A peer keeps a few shards and fetches the next one.
The text is shuffled over the shards when they are built (`swarmentum data build`). ADR 47.

A window never crosses two shards. The end of the last shard is held out and never met in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from node.data.manifest import ShardManifest
from node.data.samples import BATCH_SAMPLES_MAX, HELD_OUT_FRACTION, Batch, Samples, permute
from node.data.tokens import FileTokens
from protos.assignment import Range
from protos.errors import DataError

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
