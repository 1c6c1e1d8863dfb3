"""What a step's votes decide: one direction, the same on every device.

A `VoteSum` adds the votes of any number of peers in whole numbers, so that their order does not matter, and caps each sum.
It refuses weights: every peer counts one. Plain votes stay packed and only the chunks asked for are added up, so that a
step's sums stay in the processor's cache instead of taking four bytes for each parameter.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from node.optim import dct, values, votes
from node.optim.dct import VOTE_SUM_MAX
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE
from node.optim.payload import PLAIN, Ballot, Format
from node.optim.transforms import SUM_MAX, Transform


class VoteSum:
    """The votes of one step, of peers that may each have their own size (group size or k)."""

    def __init__(self, chunks: int, device: torch.device, form: Format = PLAIN) -> None:
        self.chunks = chunks
        self.form = form
        self._device = device
        self._packed: list[tuple[int, Tensor]] = []
        self._ballots: list[Ballot] = []

    def __len__(self) -> int:
        return len(self._packed) + len(self._ballots)

    @property
    def cap(self) -> int:
        """What sums are capped to: twice a typical vote; where sizes count, nothing below what n peers can say."""
        if self.form.scaled:
            return min(len(self) * self.form.grid.peak, SUM_MAX)
        return int(VOTE_SUM_MAX * self.form.grid.unit)

    def add(self, size: int, payload: bytes) -> None:
        """Count one peer's votes for all chunks. Raises `VotesError` if they do not fit, and then counts nothing."""
        if self.form.plain:
            packed = votes.from_bytes(payload, size, self.chunks, self._device)
            self._packed.append((size, packed.view(self.chunks, -1)))
        else:
            self._ballots.append(self.form.decode(payload, size, self.chunks, self._device))

    def sums(self, first: int, last: int, out: Tensor | None = None) -> Tensor:
        """The capped sums for chunks `first` to `last - 1`: int32 [last - first, 64, 64] (`out` if given)."""
        if out is None:
            out = torch.empty(last - first, CHUNK_SIDE, CHUNK_SIDE, dtype=torch.int32, device=self._device)
        total = out.zero_().view(-1, CHUNK_ELEMENTS)
        found = [votes.indices(packed[first:last].reshape(-1), size) for size, packed in self._packed]
        found += [(ballot.where[first:last], ballot.values[first:last]) for ballot in self._ballots]
        for where, signed in found:
            # One peer never votes twice for a coefficient: read, add and write back needs no atomic addition.
            total.scatter_(1, where, total.gather(1, where).add_(signed))
        return out.clamp_(-self.cap, self.cap)

    def scales(self) -> Tensor:
        """The size of each chunk's votes, if they have one: fp32 [chunks], the lower median of the peers'; without any, 0."""
        if not self._ballots:
            return torch.zeros(self.chunks, dtype=torch.float32, device=self._device)
        codes = [ballot.codes for ballot in self._ballots if ballot.codes is not None]
        return values.scales(values.agreed(torch.stack(codes)))


def direction(sums: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The sign of the exact inverse DCT of sums within +-2 (integers [count, 64, 64]): fp32 of -1, 0 and 1.

    `out` (fp32, the shape of `sums`) and `scratch` (fp32, two planes [2, count, 64, 64]) are made if not given; `sums`
    may be the memory of `out`. Adding zero turns -0 into 0: Metal's sign keeps the sign of a zero, which would reach a
    parameter that is -0.
    """
    if scratch is None:
        scratch = torch.empty(2, *sums.shape, dtype=torch.float32, device=sums.device)
    whole = scratch[0].copy_(sums)
    return dct.inverse_exact(whole, out, scratch[1]).sign_().add_(0.0)


def update(total: VoteSum, first: int, last: int, transform: Transform, out: Tensor) -> int:
    """The inverse transform of the sums of chunks `first` to `last - 1`, unscaled: fp32 into `out` [last - first, 64, 64].

    Whole numbers rounded once to fp32, the same on every device. Returns the sum of the squares of the sums, which
    `unit_factor` makes a scale of.
    """
    sums = total.sums(first, last)
    out.copy_(transform.inverse_exact(sums))
    return int(sums.to(torch.int64).square_().sum())


def unit_factor(total: VoteSum, transform: Transform, squares: int) -> float:
    """What gives `update` a root mean square of 1 over the model: exact in fp32, from whole numbers alone.

    The transform is orthonormal, so the squares of the sums add up to those of the inverse. 0 if nobody voted.
    """
    if not squares:
        return 0.0
    mean = math.sqrt(squares / (total.chunks * CHUNK_ELEMENTS))
    return float(np.float32(1 / (transform.scale * mean)))


def mean_factors(total: VoteSum, transform: Transform) -> Tensor:
    """What makes `update` the mean of the peers' votes at their agreed sizes: fp32 [chunks]."""
    return total.scales() * float(np.float32(1 / (transform.scale * max(len(total), 1))))
