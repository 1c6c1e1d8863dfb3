"""Every method of the DeMo family but the default, in torch operations: any format of votes, transform and base optimizer.

The calls are those of the default's backends, so that a step, a log entry and a test look alike whatever the method. The step
is slower: it has whole-model buffers, and no kernels of its own. Votes like the default's can still use kernels (`Mixed`).
ADR 11.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from node.optim import aggregate
from node.optim.backends.portable import Portable
from node.optim.base import Base
from node.optim.exact.dct import VOTE_SUM_MAX
from node.optim.exact.transforms import Transform
from node.optim.layout import CHUNK_ELEMENTS, Layout
from node.optim.step import Decay, apply_real, decayed, spend_ballot
from node.optim.votes import groups as votes
from node.optim.votes.payload import Choice, Format
from node.optim.votes.places import Draw

if TYPE_CHECKING:
    from node.optim.backends.numba.backend import Fused


class Family(Portable):
    """`interface.Backend` for one method: `form` of the votes, `transform`, and `base`, whose state is replicated.

    Votes whose places follow from the step need `at` before each call.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        tile_chunks: int,
        form: Format,
        transform: Transform,
        base: Base,
        cap: int = VOTE_SUM_MAX,
    ) -> None:
        super().__init__(layout, device, tile_chunks, base)
        self._buffer = layout.empty(device)  # of directions
        self._form, self._transform = form, transform
        self._grows, self._cap = aggregate.grows(form, base.config), cap
        self._draw: Draw | None = None

    def at(self, draw: Draw) -> Family:
        """The same backend, with the same buffers, for the votes of one step."""
        found = copy.copy(self)
        found._draw = draw
        return found

    def _forward(self, gradient: Tensor, scratch: Tensor) -> Tensor:
        return self._transform.forward(gradient, out=gradient, scratch=scratch)

    def _choose(self, momentum: Tensor, size: int, scratch: Tensor, first: int) -> Choice:
        return self._form.choose(momentum, size, scratch, self._draw, first)

    def spend(self, momentum: Tensor, payload: Tensor, size: int) -> None:
        packed = self._form.read(votes.to_bytes(payload), size, len(momentum), self._draw).to(self._device)
        for tile, _ in self._tiles(range(self._layout.chunks)):
            ballot = packed.ballot(tile.start, tile.stop)
            spend_ballot(momentum[tile].view(-1, CHUNK_ELEMENTS), ballot, self._form)

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        total = aggregate.VoteSum(
            self._layout.chunks, self._device, self._form, grows=self._grows, draw=self._draw, cap=self._cap
        )
        for size, payload in ballots:
            total.add(size, payload)
        weight_decay = decayed(parameters, lr, weight_decay)
        squares = 0
        for tile, _ in self._tiles(range(self._layout.chunks)):
            squares += aggregate.update(total, tile.start, tile.stop, self._transform, self._buffer[tile])
        if self._form.scaled:
            self._buffer.mul_(aggregate.mean_factors(total, self._transform)[:, None, None])
        elif not self._base.config.chunkwise:  # with a base that is, no direction depends on a scale
            self._buffer.mul_(aggregate.unit_factor(total, self._transform, squares))
        self._base.direct(self._buffer)
        for part, direction in self._layout.pairs(parameters, self._buffer):
            assert part is not None
            apply_real(part, direction, lr, weight_decay)


class Mixed:
    """`interface.Taking` of two: kernels vote, and `Family` moves the parameters. For votes of signs, with any base."""

    def __init__(self, voting: Fused, moving: Family) -> None:
        self._parts = voting, moving
        self.name = voting.name
        self.norm, self.vote, self.spend = voting.norm, voting.vote, voting.spend
        self.fold, self.take, self.put_back = voting.fold, voting.take, voting.put_back
        self.apply = moving.apply

    def at(self, draw: Draw) -> Mixed:
        """See `Stepping.at`."""
        voting, moving = self._parts
        return Mixed(voting.at(draw), moving.at(draw))
