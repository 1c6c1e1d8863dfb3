"""Which tokens a sample index means: a pure function of the seed, the index and the number of windows.

The tokens are cut in windows of context + 1; neighbours share one token, so that every token but the first is
predicted once an epoch. Index i is position i mod windows of epoch i // windows; each epoch has an order of its own. A
tail of the tokens is held out and never met in training.

Refuses: a source that is too short; token ids outside of the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from node.data.permutation import permute
from node.data.token_file import FileTokens
from node.data.tokens import Tokens
from protos.assignment import Range, split_samples
from protos.errors import DataError

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
