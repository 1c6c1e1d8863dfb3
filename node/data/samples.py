"""Which tokens a sample index means: a pure function of the seed, the index and the number of windows.

The tokens are cut in windows of context + 1; neighbours share one token, so that every token but the first is
predicted once an epoch. Index i is position i mod windows of epoch i // windows; each epoch has an order of its own. A
tail of the tokens is held out and never met in training.

Refuses: a source that is too short; token ids outside of the vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from node.data.tokens import FileTokens, Tokens
from protos.assignment import BLOCK, MixturePhase, Range, split_samples
from protos.errors import DataError

ROUNDS: Final = 6
ITEMS_MAX: Final = 1 << 62  # so that the domain of at most 2^62 fits 64 bits

Index = npt.NDArray[np.uint64]


def permute(positions: npt.ArrayLike, n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The place of each position (0..n-1) in a pseudo-random order of this seed and epoch; int64, the shape of `positions`.

    A Feistel network over 2*h bits is a bijection with every round function, in O(1) memory. The numbers 0..n-1 lie in the
    smallest such domain. A result outside of 0..n-1 is encrypted again until it lies inside. This cycle walking keeps it a
    bijection on 0..n-1. It needs at most 4 passes on average, because the domain is at most 4 n. Six rounds with a strong
    mixer give a fair shuffle, not secrecy.
    """
    assert 1 <= n <= ITEMS_MAX, n
    values = np.array(positions, dtype=np.uint64, ndmin=1)
    assert not values.size or int(values.max()) < n, "position outside of 0..n-1"
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = _keys(seed, epoch)
    values = _feistel(values, half, keys)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64).reshape(np.shape(positions))


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """One 64-bit key a round."""
    stream = hashlib.shake_128(f"swarmentum sample order {seed} {epoch}".encode()).digest(8 * ROUNDS)
    return [np.uint64(int.from_bytes(stream[8 * r : 8 * r + 8], "little")) for r in range(ROUNDS)]


def _feistel(values: Index, half: np.uint64, keys: list[np.uint64]) -> Index:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(x: Index) -> Index:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014); arithmetic is modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# The order of the documents in token shards: each is drawn at random from those that wait. Seed and lengths decide.

SHUFFLED_TOKENS: Final = 1 << 26
"""Tokens of the documents that wait at once to be drawn: 256 MB of memory at most."""

D = TypeVar("D", bound=Sized)


class Shuffle(Generic[D]):
    """Documents that wait. Only their lengths and the seed decide who is drawn."""

    def __init__(self, seed: int, tokens_max: int = SHUFFLED_TOKENS) -> None:
        self._waiting, self._tokens, self._max = list[D](), 0, tokens_max
        self._drawn = random.Random(seed)  # noqa: S311

    def add(self, document: D) -> Iterator[D]:
        """Let a document wait; those that are drawn to make room for it."""
        self._waiting.append(document)
        self._tokens += len(document)
        while self._tokens > self._max:
            yield self._draw()

    def rest(self) -> Iterator[D]:
        """All that wait."""
        while self._waiting:
            yield self._draw()

    def _draw(self) -> D:
        at = self._drawn.randrange(len(self._waiting))
        self._waiting[at], self._waiting[-1] = self._waiting[-1], self._waiting[at]
        chosen = self._waiting.pop()
        self._tokens -= len(chosen)
        return chosen


def shuffled(documents: Iterable[D], seed: int, tokens_max: int = SHUFFLED_TOKENS) -> Iterator[D]:
    """The documents in another order: each is drawn at random from those that wait, which hold up to `tokens_max` tokens."""
    shuffle = Shuffle[D](seed, tokens_max)
    for document in documents:
        yield from shuffle.add(document)
    yield from shuffle.rest()


HELD_OUT_FRACTION: Final = 0.01
BATCH_SAMPLES_MAX: Final = 1 << 20

Batch = npt.NDArray[np.int64]


class Samples:
    """Training and validation windows over tokens, which are never copied whole."""

    def __init__(self, tokens: Tokens, context: int, seed: int) -> None:
        if context < 1:
            raise DataError(f"data.context = {context}: expected at least 1 token")
        needed = 2 * (context + 1)
        if len(tokens) < needed:
            raise DataError(
                f"data: the source has {len(tokens)} tokens, and a context of {context} needs at least {needed} "
                "(one window to train on and one to hold out); give more text or lower the context"
            )
        self._tokens, self._seed = tokens, seed
        self.context = context
        self.reading_seconds = 0.0
        """The seconds that `micro_batches` has taken so far: with a slow source, most of a step."""
        self.validation_windows = max(1, int(len(tokens) // context * HELD_OUT_FRACTION))
        self._split = len(tokens) - (self.validation_windows * context + 1)
        self.windows = (self._split - 1) // context

    def batch(self, start: int, stop: int) -> Batch:
        """Samples start..stop-1, int64 [stop - start, context + 1]; indices are unbounded."""
        assert 0 <= start <= stop, (start, stop)
        assert stop - start <= BATCH_SAMPLES_MAX, f"{stop - start} samples in a batch"
        if start == stop:
            return np.empty((0, self.context + 1), dtype=np.int64)
        return self._gather(np.concatenate(list(self._order(start, stop))), 0)

    def micro_batches(self, ranges: Iterable[Range], micro_batch: int) -> Iterator[Batch]:
        """The samples of all ranges, in order, `micro_batch` at a time (at last perhaps fewer), read as they are asked for.

        Not range by range: what a peer that left gives back is handed out in crumbs, and each would cost a forward pass.
        """
        assert micro_batch >= 1
        rest = [part for part in ranges if len(part)]
        while rest:
            parts, rest = split_samples(rest, micro_batch)
            began = time.monotonic()
            batch = np.concatenate([self.batch(part.start, part.stop) for part in parts])
            self.reading_seconds += time.monotonic() - began
            yield batch

    def away(self, ranges: Iterable[Range]) -> str:
        """Why these samples cannot be read on this machine now, in words; empty if they can."""
        return ""

    def validation(self, samples_max: int | None = None) -> Batch:
        """Held-out windows, spread evenly over the tail, int64 [n, context + 1]."""
        count = self.validation_windows if samples_max is None else min(samples_max, self.validation_windows)
        chosen = np.arange(count, dtype=np.int64) * self.validation_windows // max(1, count)
        return self._gather(chosen, self._split)

    def _order(self, start: int, stop: int) -> Iterator[npt.NDArray[np.int64]]:
        """The windows of samples start..stop-1, an array for each epoch that the range touches."""
        while start < stop:
            epoch, position = divmod(start, self.windows)
            count = min(stop - start, self.windows - position)
            yield permute(np.arange(position, position + count), self.windows, self._seed, epoch)
            start += count

    def _gather(self, windows: npt.NDArray[np.int64], offset: int) -> Batch:
        starts = offset + windows * self.context
        if isinstance(self._tokens, FileTokens):
            return self._tokens.windows(starts, self.context + 1).astype(np.int64)
        places = starts[:, None] + np.arange(self.context + 1)
        return np.asarray(self._tokens[places]).astype(np.int64)


BLOCKS_KEPT: Final = 64
SALT: Final = 0x6D6978
"""Of the order within blocks, so that it is not the order of a source."""

Places = npt.NDArray[np.int64]


class MixedSamples(Samples):
    """Windows over several sources: a function of the index, the weights and the seed (protos/assignment.py, ADR 47).

    Each source has an order of its own, as if it were alone, and goes through it once an epoch of its own. A change of weights
    skips at most a block of each source. Checks of other peers' votes read the same samples, because only the index counts.
    """

    def __init__(self, sources: Sequence[Samples], phases: Sequence[MixturePhase], seed: int) -> None:
        contexts = {source.context for source in sources}
        if len(contexts) != 1 or len(sources) != len(phases[0].quotas):
            raise DataError(f"data.mix: {len(sources)} sources with contexts {sorted(contexts)}, expected one context")
        self._sources, self._phases = tuple(sources), tuple(phases)
        self._seed, self.context = (seed << 33) ^ SALT, sources[0].context
        self.windows = sum(source.windows for source in sources)
        self.validation_windows = sum(source.validation_windows for source in sources)
        self.reading_seconds = 0.0
        self._block = lru_cache(BLOCKS_KEPT)(self._order_of_block)

    def batch(self, start: int, stop: int) -> Batch:
        """Samples start..stop-1, int64 [stop - start, context + 1]; indices are unbounded. DataError if a shard is not here."""
        assert 0 <= start <= stop, (start, stop)
        assert stop - start <= BATCH_SAMPLES_MAX, f"{stop - start} samples in a batch"
        found = np.empty((stop - start, self.context + 1), dtype=np.int64)
        for source, part, rows in self._parts(start, stop):
            found[rows - start] = self._sources[source].batch(part.start, part.stop)
        return found

    def validation(self, samples_max: int | None = None) -> Batch:
        """Held-out windows of the sources, as many of each as its last weight says, int64 [n, context + 1]."""
        count = self.validation_windows if samples_max is None else min(samples_max, self.validation_windows)
        last = self._phases[-1].quotas
        parts = [
            source.validation(max(-(-count * quota // BLOCK), 1))
            for source, quota in zip(self._sources, last, strict=True)
            if quota
        ]
        return np.concatenate(parts)

    def away(self, ranges: Iterable[Range]) -> str:
        wanted: dict[int, list[Range]] = {}
        for part in ranges:
            for source, own, _ in self._parts(part.start, part.stop):
                wanted.setdefault(source, []).append(own)
        told = [self._sources[source].away(own) for source, own in sorted(wanted.items())]
        return next(filter(None, told), "")

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, Range, Places]]:
        """(source, its own samples, their indices in the mixture), for each source and block that the range touches."""
        while start < stop:
            at = max(number for number, phase in enumerate(self._phases) if phase.first <= start)
            phase = self._phases[at]
            ends = self._phases[at + 1].first if at + 1 < len(self._phases) else stop
            block, inside = divmod(start - phase.first, BLOCK)
            count = min(stop, ends, phase.first + (block + 1) * BLOCK) - start
            order = self._block(at, block)
            chosen = order[inside : inside + count]
            for source in np.unique(chosen):
                rows = np.flatnonzero(chosen == source)
                first = phase.before[source] + block * phase.quotas[source] + int((order[:inside] == source).sum())
                yield int(source), Range(first, first + len(rows)), start + rows
            start += count

    def _order_of_block(self, phase: int, block: int) -> Places:
        """The source of each sample of a block, int64 [BLOCK]."""
        quotas = self._phases[phase].quotas
        sources = np.repeat(np.arange(len(quotas)), quotas)
        number = self._phases[phase].first // BLOCK + block
        return sources[permute(np.arange(BLOCK), BLOCK, self._seed + phase, number)]


SLOW: Final = "the data source is slow: this peer gets fewer samples than it could compute; a local disk is faster"
SLOW_PART: Final = 0.5
SLOW_STEPS: Final = 5
SLOW_SECONDS: Final = 1.0


class PacedSamples:
    """How long the data takes, beside the rest of a step: says once that a source holds a peer up. Measures nothing itself.

    One peer's source of samples. A source is slow if reading took more than SLOW_PART of the time of SLOW_STEPS gradients, and
    more than SLOW_SECONDS.
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._times: deque[tuple[float, float]] = deque(maxlen=SLOW_STEPS)
        self._told = False

    def noted(self, reading_seconds: float, all_seconds: float, step: int) -> None:
        """See `took`. Warns once if the source is slow."""
        percent = self.took(reading_seconds, all_seconds)
        if percent is not None:
            self._log.warning(SLOW, step=step, reading_percent=percent)

    def took(self, reading_seconds: float, all_seconds: float) -> int | None:
        """A gradient took so long, and reading its samples so much of it. The percentage, once, if the source is slow."""
        self._times.append((reading_seconds, all_seconds))
        if self._told or len(self._times) < SLOW_STEPS:
            return None
        read, whole = (math.fsum(times) for times in zip(*self._times, strict=True))
        if read <= max(SLOW_PART * whole, SLOW_SECONDS):
            return None
        self._told = True
        return round(100 * read / whole)
