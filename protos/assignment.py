"""The samples of each peer, and their sources: pure functions that the coordinator and every peer compute alike.

A step has a pool of half-open sample ranges and a roster of (public key, samples). The pool is cut in roster order. No two
shares overlap, and samples that are left over stay in the pool.

Samples of a mixture are counted in blocks of BLOCK. A source has the same number of samples in each block of a phase, in
proportion to its weight. A phase begins with the first sample of a step, where a step counts as `batch_samples` samples. So the
source of a sample follows from its index alone, also for samples that a later step hands out again. ADR 47.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, order=True)
class Range:
    """Sample indices start <= i < stop."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, (self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SampleShare:
    """One roster member's place: `samples` of the pool."""

    public_key: bytes
    samples: int


def assign(pool: Sequence[Range], roster: Sequence[SampleShare]) -> dict[bytes, tuple[Range, ...]]:
    """Cut the pool in roster order. Every roster member is a key; its ranges hold at most its samples."""
    rest = [part for part in pool if len(part)]
    ranges: dict[bytes, tuple[Range, ...]] = {}
    for share in roster:
        ranges[share.public_key], rest = split_samples(rest, share.samples)
    return ranges


def split_samples(pool: list[Range], samples: int) -> tuple[tuple[Range, ...], list[Range]]:
    """The first `samples` samples of the pool (all of it, if it has fewer), and the rest."""
    taken: list[Range] = []
    for index, part in enumerate(pool):
        if samples == 0:
            return tuple(taken), pool[index:]
        cut = min(samples, len(part))
        taken.append(Range(part.start, part.start + cut))
        samples -= cut
        if cut < len(part):
            return tuple(taken), [Range(part.start + cut, part.stop), *pool[index + 1 :]]
    return tuple(taken), []


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same samples as few ranges, sorted. Adjacent ranges join; overlapping ones are our own mistake."""
    merged: list[Range] = []
    for part in sorted(part for part in ranges if len(part)):
        if merged and part.start <= merged[-1].stop:
            assert part.start == merged[-1].stop, f"samples handed out twice: {merged[-1]} and {part}"
            merged[-1] = Range(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return tuple(merged)


def shares(total: int, speeds: Sequence[tuple[bytes, float]]) -> tuple[SampleShare, ...]:
    """Split `total` samples in proportion to speed (samples a second), at least one each, exactly `total` together.

    Largest remainders; ties go to the smaller public key. Needs total >= peers; the result is sorted by public key.
    """
    ordered = sorted(speeds)
    assert len(ordered) <= total, f"{len(ordered)} peers for {total} samples"
    spare = total - len(ordered)
    speed_sum = sum(speed for _, speed in ordered)
    ideal = [spare * (speed / speed_sum if speed_sum > 0 else 1 / len(ordered)) for _, speed in ordered]
    counts = [int(value) for value in ideal]
    missing = spare - sum(counts)
    by_remainder = sorted(range(len(ordered)), key=lambda i: (counts[i] - ideal[i], ordered[i][0]))
    for index in by_remainder[:missing]:
        counts[index] += 1
    return tuple(SampleShare(key, count + 1) for (key, _), count in zip(ordered, counts, strict=True))


BLOCK = 1024
"""Samples of a block: weights count in parts of this."""


@dataclass(frozen=True)
class MixturePhase:
    """Samples from `first` on, until the next phase: `quotas[source]` of each BLOCK. `before[source]`: taken by then."""

    first: int
    quotas: tuple[int, ...]
    before: tuple[int, ...]


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in a block. ValueError if a weight above 0 gets none, or if all weights are 0.

    The largest remainders get what is left after rounding down; of equal ones the first source.
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    if not whole:
        raise ValueError("all weights are 0")
    shares = [BLOCK * weight / whole for weight in exact]
    found = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda source: (found[source] - shares[source], source))
    for source in order[: BLOCK - sum(found)]:
        found[source] += 1
    for source, weight in enumerate(exact):
        if weight and not found[source]:
            raise ValueError(f"weight {weights[source]:g} of {float(whole):g} is less than one of {BLOCK} samples")
    return tuple(found)


def phases(weights_from: Sequence[tuple[int, Sequence[float]]], batch_samples: int) -> tuple[MixturePhase, ...]:
    """Of (first step, weights of the sources from there on), in order, from step 1. ValueError as `quotas`, with the step."""
    made: list[MixturePhase] = []
    before = (0,) * len(weights_from[0][1])
    for step, weights in weights_from:
        first = (step - 1) * batch_samples
        try:
            now = quotas(weights)
        except ValueError as error:
            raise ValueError(f"from step {step} on: {error}") from error
        if made:
            last = made[-1]
            blocks = -(-(first - last.first) // BLOCK)
            before = tuple(had + blocks * quota for had, quota in zip(last.before, last.quotas, strict=True))
        made.append(MixturePhase(first, now, before))
    return tuple(made)
