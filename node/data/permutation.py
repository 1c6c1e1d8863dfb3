"""A pseudo-random order of n things in O(1) memory: a Feistel network with cycle walking.

A Feistel network over 2*h bits is a bijection with every round function. The numbers 0..n-1 lie in the smallest such domain. A
result outside of 0..n-1 is encrypted again until it lies inside. This cycle walking keeps it a bijection on 0..n-1. It needs at
most 4 passes on average, because the domain is at most 4 n. Six rounds with a strong mixer give a fair shuffle, not secrecy.

Refuses to be a cipher.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

ROUNDS: Final = 6
ITEMS_MAX: Final = 1 << 62  # so that the domain of at most 2^62 fits 64 bits

Index = npt.NDArray[np.uint64]


def permute(positions: npt.ArrayLike, n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The place of each position (0..n-1) in the order of this seed and epoch; int64, the shape of `positions`."""
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
