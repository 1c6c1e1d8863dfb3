"""The step in torch operations, for any device: `Portable` for the default method, and `Family` for every other one. ADR 11.

`Portable` works by tiles of chunks. Only the pool has a buffer of its own; cores are read and written in place.

`Family` takes any format of votes, transform and base optimizer. It is slower: it has whole-model buffers, and no kernels of
its own. Votes like the default's can still use kernels (`Mixed`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from node.optim import aggregate
from node.optim.base import Base
from node.optim.exact import transforms
from node.optim.exact.transforms import VOTE_SUM_MAX, Transform
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout, core_pairs
from node.optim.second_moment import SecondMoment
from node.optim.step import Decay, accumulate, apply_real, as_tensor, decayed, spend, spend_ballot, total_norm
from node.optim.votes import groups as votes
from node.optim.votes.payload import PLAIN, Choice, Format
from node.optim.votes.places import Draw

if TYPE_CHECKING:
    from node.optim.backends.numba.backend import Fused

_SCRATCH_PLANES = 3
"""Tiles of scratch that `votes.select` needs. The scratch is reused: fresh memory costs a page fault for every 4 KiB, which
took longer than the arithmetic."""


class Portable:
    """`choose.Backend` for group votes of signs after a DCT, with a chunkwise base. Scratch is four tiles, and the pool."""

    name = "torch"
    _form: Format = PLAIN

    def __init__(self, layout: Layout, device: torch.device, tile_chunks: int, base: Base) -> None:
        self._layout, self._base = layout, base
        self._device = device
        self._tile_chunks = tile_chunks
        largest = min(tile_chunks, layout.chunks) * CHUNK_ELEMENTS
        self._scratch = torch.empty(_SCRATCH_PLANES * largest, dtype=torch.float32, device=device)
        # The tile holds gradients on the way in, and directions on the way out.
        self._tile = torch.empty(largest, dtype=torch.float32, device=device).view(-1, CHUNK_SIDE, CHUNK_SIDE)
        self._pool = self._tile.new_empty(layout.chunks - layout.core_chunks, CHUNK_SIDE, CHUNK_SIDE)

    def norm(self, gradients: Sequence[Tensor | None]) -> float:
        return total_norm(gradients)

    def fold(
        self,
        gradients: Sequence[Tensor | None],
        pool: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        chunks: range,
    ) -> None:
        for tile, scratch in self._tiles(chunks):
            first = tile.start - self._layout.core_chunks
            gradient = self._room(tile)
            if first < 0:
                _fill(core_pairs(self._layout, gradients, tile, gradient))
            else:
                gradient.copy_(pool[first : first + len(gradient)])
            accumulate(momentum[tile], self._forward(gradient, scratch[0]), beta, step)

    def vote(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        if second is not None and gradients is not None:
            second.divide(gradients)
        if gradients is not None:
            self._pool.view(-1)[self._layout.pool_elements :].zero_()
            _fill(self._layout.pool_pairs(gradients, self._pool.view(-1)))
        chosen = []
        for tile, scratch in self._tiles(range(self._layout.chunks)):
            if gradients is None:
                own = momentum[tile].float()
            else:
                gradient = self._room(tile)
                _fill(core_pairs(self._layout, gradients, tile, gradient))
                own = accumulate(momentum[tile], self._forward(gradient, scratch[0]), beta, step)
            chosen.append(self._choose(own, size, scratch, tile.start))
        return as_tensor(self._form.encode(chosen, size), self._device)

    def _forward(self, gradient: Tensor, scratch: Tensor) -> Tensor:
        """The coefficients of a tile's gradient, in place."""
        return transforms.forward(gradient, out=gradient, scratch=scratch)

    def _choose(self, momentum: Tensor, size: int, scratch: Tensor, _first: int) -> Choice:
        """The votes of a tile of momentum, fp32; `_first`: its first chunk."""
        return self._form.choose(momentum, size, scratch)

    def spend(self, momentum: Tensor, packed: Tensor, group_size: int) -> None:
        spend(momentum, packed, group_size)

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        total = aggregate.VoteSum(self._layout.chunks, self._device)
        for group_size, payload in ballots:
            total.add(group_size, payload)
        weight_decay = decayed(parameters, lr, weight_decay)
        for tile, scratch in self._tiles(range(self._layout.chunks)):
            out = self._room(tile)
            sums = total.sums(tile.start, tile.stop, out=out.view(torch.int32))
            self._base.direct_chunks(aggregate.inverse(sums, out=out, scratch=scratch[:2]), tile.start)
            _update(core_pairs(self._layout, parameters, tile, out), lr, weight_decay)
        _update(self._layout.pool_pairs(parameters, self._pool.view(-1)), lr, weight_decay)

    def _room(self, tile: slice) -> Tensor:
        """A tile's gradients or directions: fp32 [count, 64, 64], of the pool its own."""
        first = tile.start - self._layout.core_chunks
        return self._tile[: tile.stop - tile.start] if first < 0 else self._pool[first : first + tile.stop - tile.start]

    def _tiles(self, chunks: range) -> Iterator[tuple[slice, Tensor]]:
        """The chunks in parts, of cores or of the pool, each with scratch of its size: fp32 [3, count, 64, 64]."""
        first, cores = chunks.start, self._layout.core_chunks
        while first < chunks.stop:
            last = min(first + self._tile_chunks, chunks.stop, cores if first < cores else chunks.stop)
            room = self._scratch[: _SCRATCH_PLANES * (last - first) * CHUNK_ELEMENTS]
            yield slice(first, last), room.view(_SCRATCH_PLANES, last - first, CHUNK_SIDE, CHUNK_SIDE)
            first = last


def _fill(pairs: Iterable[tuple[Tensor | None, Tensor]]) -> None:
    for part, chunk in pairs:
        if part is None:
            chunk.zero_()
        else:
            chunk.copy_(part)


def _update(pairs: Iterable[tuple[Tensor | None, Tensor]], lr: float, weight_decay: float) -> None:
    for part, direction in pairs:
        assert part is not None
        apply_real(part, direction, lr, weight_decay)


class Family(Portable):
    """`choose.Backend` for one method: `form` of the votes, `transform`, and `base`, whose state is replicated.

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
    """`choose.Taking` of two: kernels vote, and `Family` moves the parameters. For votes of signs, with any base."""

    def __init__(self, voting: Fused, moving: Family) -> None:
        self._parts = voting, moving
        self.name = voting.name
        self.norm, self.vote, self.spend = voting.norm, voting.vote, voting.spend
        self.fold, self.take, self.put_back = voting.fold, voting.take, voting.put_back
        self.apply = moving.apply

    def at(self, draw: Draw) -> Mixed:
        voting, moving = self._parts
        return Mixed(voting.at(draw), moving.at(draw))
