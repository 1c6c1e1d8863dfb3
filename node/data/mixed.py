"""Samples of a mixture of sources: a pure function of the index, the weights and the seed (protos/mixture.py, ADR 47).

Each source has an order of its own, as if it were alone, and goes through it once an epoch of its own. A change of weights
skips at most a block of each source. Checks of other peers' votes read the same samples, because only the index counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from node.data.permutation import permute
from node.data.samples import BATCH_SAMPLES_MAX, Batch, Samples
from protos.assignment import Range
from protos.errors import DataError
from protos.mixture import BLOCK, MixturePhase

BLOCKS_KEPT: Final = 64
SALT: Final = 0x6D6978
"""Of the order within blocks, so that it is not the order of a source."""

Places = npt.NDArray[np.int64]


class MixedSamples(Samples):
    """Training and validation windows over several sources."""

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
        """See `Samples.away`."""
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
