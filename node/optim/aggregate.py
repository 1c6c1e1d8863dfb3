"""The direction that a step's votes decide, the same on every device.

A `VoteSum` adds the votes of any number of peers in whole numbers, so their order does not matter, and caps each sum. It
refuses weights: every peer counts one. Votes stay packed, and a `VoteSum` decodes and adds only the requested chunks. A step's
sums therefore stay in the processor's cache. All at once, they take four bytes for each parameter and nine for each vote.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from node.optim.base import BaseConfig
from node.optim.exact import transforms
from node.optim.exact.transforms import SUM_MAX, VOTE_SUM_MAX, Transform
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE
from node.optim.votes import values
from node.optim.votes.payload import PLAIN, Format, Packed
from node.optim.votes.places import Draw


class VoteSum:
    """The votes of one step, of peers that may each have their own size (group size, k or n)."""

    def __init__(
        self,
        chunks: int,
        device: torch.device,
        form: Format = PLAIN,
        *,
        grows: bool = False,
        draw: Draw | None = None,
        cap: int = VOTE_SUM_MAX,
    ) -> None:
        """`grows`: sums may grow with the number of peers (`cap`), as for all methods but signs with a base that is chunkwise.

        `draw` is the step's, for votes whose places follow from it; its authors are in the order of `add`.
        `cap` is the run's, for signs whose sums do not grow.
        """
        self.chunks = chunks
        self._draw = draw
        self.form = form
        self._grows, self._cap = grows, cap
        self._device = device
        self._payloads: list[Packed] = []

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def peer_max(self) -> int:
        """The most that one peer's vote counts: twice a typical vote or, if sizes travel, the largest size of the grid.

        With 8 bits that is four times a typical vote.
        """
        return self.form.grid.peak if self.form.scaled else int(VOTE_SUM_MAX * self.form.grid.unit)

    @property
    def cap(self) -> int:
        """The run's cap for a sum of signs. If sums grow or sizes travel, it is `peer_max` times the peers (ADRs 11 and 33)."""
        if self._grows or self.form.scaled:
            return min(max(len(self), 1) * self.peer_max, SUM_MAX)
        return self._cap if self.form.grid is values.SIGN else self.peer_max

    def add(self, size: int, payload: bytes) -> None:
        """Count one peer's votes for all chunks. Raises `VotesError` if they do not fit, and then counts nothing."""
        draw = None if self._draw is None else self._draw.of(len(self))
        self._payloads.append(self.form.read(payload, size, self.chunks, draw).to(self._device))

    def sums(self, first: int, last: int, out: Tensor | None = None) -> Tensor:
        """The capped sums for chunks `first` to `last - 1`: int32 [last - first, 64, 64] (`out` if given)."""
        if out is None:
            out = torch.empty(last - first, CHUNK_SIDE, CHUNK_SIDE, dtype=torch.int32, device=self._device)
        total = out.zero_().view(-1, CHUNK_ELEMENTS)
        for payload in self._payloads:
            ballot = payload.ballot(first, last)
            # One peer never votes twice for a coefficient: read, add and write back needs no atomic addition.
            said = ballot.values.clamp(-self.peer_max, self.peer_max)
            total.scatter_(1, ballot.where, total.gather(1, ballot.where).add_(said))
        return out.clamp_(-self.cap, self.cap)

    def scales(self) -> Tensor:
        """The size of each chunk's votes, if they have one: fp32 [chunks], as the peers agree on it; without any, 0."""
        codes = [payload.codes for payload in self._payloads if payload.codes is not None]
        if not codes:
            return torch.zeros(self.chunks, dtype=torch.float32, device=self._device)
        return values.scales(values.agreed(torch.stack(codes)))


def grows(form: Format, base: BaseConfig) -> bool:
    """Whether sums of votes grow with the peers: not where signs alone decide, the most robust aggregate (docs/security.md)."""
    return form.grid is not values.SIGN or not base.chunkwise


def check_cap(cap: int, form: Format, base: BaseConfig) -> None:
    """Raises `ValueError` for a cap that has no effect on such votes."""
    if cap != VOTE_SUM_MAX and (grows(form, base) or form.scaled):
        raise ValueError(
            f"cap {cap} has no effect with values {form.grid.name} and base {base.name!r}: only sums of signs are "
            "capped, with base sign or with muon by chunks; all others grow with the peers; remove it"
        )


def is_narrow(form: Format, transform: Transform, cap: int) -> bool:
    """Whether `inverse`, the default's narrow one, serves signs with a chunkwise base; else `update` does."""
    return form.plain and transform.name == "dct" and cap == VOTE_SUM_MAX


def inverse(sums: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The exact inverse DCT of sums within +-2 (integers [count, 64, 64]), `transforms.inverse_exact`: whole numbers in fp32.

    `out` is fp32 in the shape of `sums`, and may be the memory of `sums`. `scratch` is fp32, two planes [2, count, 64, 64].
    Both are made if not given.
    """
    if scratch is None:
        scratch = torch.empty(2, *sums.shape, dtype=torch.float32, device=sums.device)
    whole = scratch[0].copy_(sums)
    return transforms.inverse_exact(whole, out, scratch[1])


def update(total: VoteSum, first: int, last: int, transform: Transform, out: Tensor) -> int:
    """The inverse transform of the sums of chunks `first` to `last - 1`, unscaled: fp32 into `out` [last - first, 64, 64].

    Whole numbers rounded once to fp32, the same on every device. Returns the sum of the squares of the sums, which
    `unit_factor` makes a scale of.
    """
    sums = total.sums(first, last)
    out.copy_(transform.inverse_exact(sums))
    return int(sums.to(torch.int64).square_().sum())


def unit_factor(total: VoteSum, transform: Transform, squares: int) -> float:
    """The factor that gives `update` a root mean square of 1 over the model: exact in fp32, from whole numbers alone.

    The transform is orthonormal, so the squares of the sums add up to those of the inverse. 0 without a vote.
    """
    if not squares:
        return 0.0
    mean = math.sqrt(squares / (total.chunks * CHUNK_ELEMENTS))
    return float(np.float32(1 / (transform.scale * mean)))


def mean_factors(total: VoteSum, transform: Transform) -> Tensor:
    """The factors that make `update` the mean of the peers' votes at their agreed sizes: fp32 [chunks]."""
    return total.scales() * float(np.float32(1 / (transform.scale * max(len(total), 1))))
