"""The order of the documents in token shards: each is drawn at random from those that wait. Seed and lengths decide."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Final, Generic, TypeVar

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
