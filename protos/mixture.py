"""How the samples of a mixture fall on its sources: whole numbers that every peer computes alike (ADR 47). Pure.

Samples are counted in blocks of BLOCK. A source has the same number of samples in each block of a phase, in proportion to its
weight. A phase begins with the first sample of a step, where a step counts as `batch_samples` samples. So the source of a
sample follows from its index alone, also for samples that a later step hands out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

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
