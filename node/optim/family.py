"""Every method of the DeMo family but the default, in torch operations: any format of votes, transform and base optimizer.
Where votes are the default's, kernels take them.

The same calls as the default's backends, so that a step, a log entry and a test look alike whatever the method. Slower:
the default has kernels of its own (`fused`), these have whole-model buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from node.optim import aggregate, values
from node.optim.base import Base
from node.optim.demo import Portable, Taking, accumulate, decay_factor
from node.optim.layout import CHUNK_ELEMENTS, Layout
from node.optim.payload import Format
from node.optim.second_moment import SecondMoment
from node.optim.transforms import Transform


class Family(Portable):
    """`demo.Backend` for one method: `form` of the votes, `transform`, and `base`, whose state is replicated."""

    def __init__(
        self, layout: Layout, device: torch.device, tile_chunks: int, form: Format, transform: Transform, base: Base
    ) -> None:
        super().__init__(layout, device, tile_chunks)
        self._buffer = layout.empty(device)  # gradients on the way in, directions on the way out
        self._form, self._transform, self._base = form, transform, base

    def vote(
        self,
        gradients: Sequence[Tensor | None],
        momentum: Tensor,
        beta: float,
        step: float,
        size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        if second is not None:
            second.divide(gradients)
        chosen = []
        self._layout.gather(gradients, self._buffer)
        for tile, scratch in self._tiles():
            gradient = self._buffer[tile]
            coefficients = self._transform.forward(gradient, out=gradient, scratch=scratch[0])
            chosen.append(self._form.choose(accumulate(momentum[tile], coefficients, beta, step), size, scratch))
        return torch.frombuffer(bytearray(self._form.encode(chosen, size)), dtype=torch.uint8).to(self._device)

    def spend(self, momentum: Tensor, payload: Tensor, size: int) -> None:
        """Voted coefficients leave the momentum: whole, or, where votes have a size, as much as they said."""
        flat = momentum.view(-1, CHUNK_ELEMENTS)
        ballot = self._form.decode(payload.cpu().numpy().tobytes(), size, len(flat), self._device)
        if ballot.codes is None or self._form.grid is values.SIGN:
            flat.scatter_(1, ballot.where, 0.0)
        else:
            said = ballot.values * values.scales(ballot.codes)[:, None]
            flat.scatter_add_(1, ballot.where, -said)

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: float
    ) -> None:
        total = aggregate.VoteSum(self._layout.chunks, self._device, self._form)
        for size, payload in ballots:
            total.add(size, payload)
        squares = 0
        for tile, _ in self._tiles():
            squares += aggregate.update(total, tile.start, tile.stop, self._transform, self._buffer[tile])
        if self._form.scaled:
            self._buffer.mul_(aggregate.mean_factors(total, self._transform)[:, None, None])
        else:
            self._buffer.mul_(aggregate.unit_factor(total, self._transform, squares))
        self._base.direct(self._buffer)
        for part, direction in self._layout.pairs(parameters, self._buffer):
            assert part is not None
            apply_real(part, direction, lr, weight_decay)


class Mixed:
    """`demo.Taking` of two: one's kernels vote, the other moves the parameters. For group votes of signs, whatever the base."""

    def __init__(self, voting: Taking, moving: Family) -> None:
        self.name = voting.name
        self.norm, self.vote, self.spend = voting.norm, voting.vote, voting.spend
        self.take, self.put_back = voting.take, voting.put_back
        self.apply = moving.apply


def apply_real(parameter: Tensor, direction: Tensor, lr: float, weight_decay: float) -> Tensor:
    """As `apply_update` for a `direction` of any size, which becomes `lr * direction`: three roundings, never fused."""
    factor = decay_factor(lr, weight_decay)
    if factor != 1:
        parameter.mul_(factor)
    return parameter.sub_(direction.mul_(lr))
