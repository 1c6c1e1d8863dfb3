"""What a step's votes decide: one direction, the same on every device.

A `VoteSum` adds the votes of any number of peers in integers, so that their order does not matter, and caps each sum.
It refuses weights: every peer counts one. It keeps the packed bytes and adds up only the chunks asked for, so that a
step's sums stay in the processor's cache instead of taking four bytes for each parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from node.optim import dct, votes
from node.optim.dct import VOTE_SUM_MAX
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE


class VoteSum:
    """The votes of one step, of peers that may each have their own group size."""

    def __init__(self, chunks: int, device: torch.device) -> None:
        self.chunks = chunks
        self._device = device
        self._ballots: list[tuple[int, Tensor]] = []

    def add(self, group_size: int, payload: bytes) -> None:
        """Count one peer's votes for all chunks. Raises `VotesError` if they do not fit, and then counts nothing."""
        packed = votes.from_bytes(payload, group_size, self.chunks, self._device)
        self._ballots.append((group_size, packed.view(self.chunks, -1)))

    def sums(self, first: int, last: int, out: Tensor | None = None) -> Tensor:
        """The sums for chunks `first` to `last - 1`, capped to +-2: int32 [last - first, 64, 64] (`out` if given)."""
        if out is None:
            out = torch.empty(last - first, CHUNK_SIDE, CHUNK_SIDE, dtype=torch.int32, device=self._device)
        total = out.zero_().view(-1, CHUNK_ELEMENTS)
        for group_size, packed in self._ballots:
            where, values = votes.indices(packed[first:last].reshape(-1), group_size)
            # One peer never votes twice for a coefficient: read, add and write back needs no atomic addition.
            total.scatter_(1, where, total.gather(1, where).add_(values))
        return out.clamp_(-VOTE_SUM_MAX, VOTE_SUM_MAX)


def direction(sums: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The sign of the exact inverse DCT of capped sums (integers [count, 64, 64]): fp32 of -1, 0 and 1.

    `out` (fp32, the shape of `sums`) and `scratch` (fp32, two planes [2, count, 64, 64]) are made if not given; `sums`
    may be the memory of `out`. Adding zero turns -0 into 0: Metal's sign keeps the sign of a zero, which would reach a
    parameter that is -0.
    """
    if scratch is None:
        scratch = torch.empty(2, *sums.shape, dtype=torch.float32, device=sums.device)
    whole = scratch[0].copy_(sums)
    return dct.inverse_exact(whole, out, scratch[1]).sign_().add_(0.0)
