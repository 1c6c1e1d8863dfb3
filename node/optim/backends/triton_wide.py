"""Triton's step for signs whose places follow from the step, and for group votes whose sums have a larger cap than 2.

The inverse is that of `Transform.inverse_exact`, at 12 bits without rounding: products of int8 digits, and sums of them in
int64. `Family` in torch moves parameters alike, bit for bit. It refuses values beside signs, and other transforms. ADR 33.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from node.optim.backends.triton import BallotRows, Division, Triton
from node.optim.backends.triton_kernels import (
    CHUNK_BITS,
    DIGIT,
    ELEMENTS,
    SIDE,
    group_sums,
    join,
    move,
    orthogonal,
    sign,
)
from node.optim.base import Base
from node.optim.exact.transforms import SHIFT, named
from node.optim.layout import CHUNK_ELEMENTS, Layout
from node.optim.step import Decay, decay_factor, decayed
from node.optim.votes import places
from node.optim.votes.payload import Format, Packed
from node.optim.votes.places import Draw

NOWHERE = CHUNK_ELEMENTS
"""The rank of a coefficient that has no vote."""


@triton.jit
def vote_drawn(
    addresses, rows, momentum, basis, order, moved, negative, silent, broken, beta, step, squares, corrections, apart,
    beta2, rest, epsilon, COUNT: tl.constexpr, PRECISION: tl.constexpr, DIVIDES: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """`join`, and whether the coefficients `order ^ moved[chunk]` are negative, and whether they are zero."""
    fresh = join(
        addresses, rows, momentum, basis, beta, step, squares, corrections, apart, beta2, rest, epsilon, PRECISION, DIVIDES,
        UNIT,
    )  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    nan = fresh != fresh  # noqa: PLR0124
    tl.store(broken + chunk, tl.max(tl.max(nan.to(tl.int32), axis=0), axis=0))
    vote = tl.arange(0, COUNT)
    value = tl.load(momentum + chunk * ELEMENTS + (tl.load(order + vote) ^ tl.load(moved + chunk))).to(tl.float32)
    tl.store(negative + chunk * COUNT + vote, (value < 0).to(tl.uint8))
    tl.store(silent + chunk * COUNT + vote, (value == 0).to(tl.uint8))


@triton.jit
def _spend_drawn(momentum, order, moved, COUNT: tl.constexpr):
    """Zero the coefficients `order ^ moved[chunk]` of one chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.load(order + tl.arange(0, COUNT)) ^ tl.load(moved + chunk)
    tl.store(momentum + chunk * ELEMENTS + place, place * 0.0)


@triton.jit
def _drawn_sums(near, far, signs, silents, ranks, moves, shifts, count):
    """The sums of all ballots' drawn votes for one chunk: int32 [64, 64]. A vote's number is its rank in the step's order."""
    chunk = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((SIDE, SIDE), dtype=tl.int32)
    for ballot in range(count):
        shift = tl.load(shifts + ballot)
        moved = tl.load(tl.load(moves + ballot).to(tl.pointer_type(tl.int32)) + chunk)
        rank = tl.load(tl.load(ranks + ballot).to(tl.pointer_type(tl.int32)) + ((near * SIDE + far) ^ moved))
        voted = rank < (ELEMENTS >> shift)
        bit = (chunk << (CHUNK_BITS - shift)) + rank
        said = tl.load(tl.load(signs + ballot).to(tl.pointer_type(tl.uint8)) + (bit >> 3), mask=voted, other=0)
        quiet = tl.load(silents + ballot)  # the address of rows of bits; 0 if no vote is silent
        row = quiet.to(tl.pointer_type(tl.uint8)) + chunk * (((ELEMENTS >> shift) + 7) >> 3)
        hushed = tl.load(row + (rank >> 3), mask=voted & (rank * 0 + quiet != 0), other=0)
        voted &= ((hushed.to(tl.int32) >> (rank & 7)) & 1) == 0
        sums += tl.where(voted, 1 - 2 * ((said.to(tl.int32) >> (bit & 7).to(tl.int32)) & 1), 0)
    return sums


@triton.jit
def _digit(value):
    """The lowest signed digit, int8, and the rest."""
    rest = (value + DIGIT // 2) >> 7
    return (value - rest * DIGIT).to(tl.int8), rest


@triton.jit
def _part(high, low, digit):
    return tl.dot(high, digit, out_dtype=tl.int32) * DIGIT + tl.dot(low, digit, out_dtype=tl.int32)


@triton.jit
def apply_wide(
    addresses, rows, signs, silents, ranks, moves, shifts, high, low, count, cap, factor, lr, maps,
    DRAWN: tl.constexpr, DECAYS: tl.constexpr, ITERATIONS: tl.constexpr, SIGNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """As `triton_kernels.apply`, with sums within +-`cap`, which is at most 127. The transposed basis is `128 * high
    + low`, int32."""
    chunk = tl.program_id(0).to(tl.int64)
    near, far = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    if DRAWN:
        sums = _drawn_sums(near, far, signs, silents, ranks, moves, shifts, count)
        sums = tl.minimum(tl.maximum(sums, -cap), cap).to(tl.int8)
    else:
        sums = group_sums(near, far, signs, silents, shifts, cap)
    large, small = tl.load(high + near * SIDE + far).to(tl.int8), tl.load(low + near * SIDE + far).to(tl.int8)
    # within 64 * 724 * 127 < 2^23: four digits
    one, rest = _digit(_part(large, small, sums))
    result = _part(large, small, tl.trans(one)).to(tl.int64)  # of the transposed chunk
    two, rest = _digit(rest)
    result += _part(large, small, tl.trans(two)).to(tl.int64) * DIGIT
    three, rest = _digit(rest)
    result += _part(large, small, tl.trans(three)).to(tl.int64) * (DIGIT * DIGIT)
    result += _part(large, small, tl.trans(rest.to(tl.int8))).to(tl.int64) * (DIGIT * DIGIT * DIGIT)
    direction = sign(result)
    if ITERATIONS and tl.load(maps + chunk) != 0:
        direction = orthogonal(result.to(tl.float32), near == far, ITERATIONS)
        if SIGNS:
            direction = sign(direction)
    move(addresses, rows, near, far, tl.trans(direction), factor, lr, DECAYS, UNIT)


class TritonWide(Triton):
    """`backends.base.Backend` on a GPU, for signs in any selection but top-k, after a DCT. Votes whose places follow from the
    step need `at` before each call."""

    def __init__(self, layout: Layout, device: torch.device, base: Base, form: Format, cap: int) -> None:
        """`base` is chunkwise."""
        super().__init__(layout, device, base)
        self._form, self._cap = form, cap
        self._draw: Draw | None = None
        basis = torch.from_numpy(np.rint(2.0**SHIFT * named("dct").matrix).astype(np.int32))
        high = (basis + 64) >> 7
        self._digits = high.T.contiguous().to(device), (basis - 128 * high).T.contiguous().to(device)

    def at(self, draw: Draw) -> TritonWide:
        found = copy.copy(self)
        found._draw = draw
        return found

    def _pattern(self, size: int, number: int = 0) -> tuple[Tensor, Tensor]:
        """Of payload `number`: the step's order and what moves a chunk, int32 (`places.pattern`)."""
        assert self._draw is not None, (
            f"selection {self._form.selection}: places follow from the step, and no step is given"
        )
        draw, chunks = self._draw.of(number), self._layout.chunks
        order, moved = places.pattern(self._form.selection, draw, size, 0, chunks, self._device)
        return order.to(torch.int32), moved.to(torch.int32)

    def _find(
        self,
        where: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        size: int,
        unit: int,
        division: Division | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._form.drawn:
            return super()._find(where, momentum, beta, step, size, unit, division)
        count, chunks = self._form.votes_a_chunk(size), len(where)
        negative, silent = torch.empty(2, chunks, count, dtype=torch.uint8, device=self._device).unbind()
        broken = torch.empty(chunks, dtype=torch.int32, device=self._device)
        beside, corrections, apart, *numbers = division or (where, where, where, 0.0, 0.0, 0.0)
        vote_drawn[(chunks,)](
            where, self._rows, momentum, self._basis, *self._pattern(size), negative, silent, broken, beta, step, beside,
            corrections, apart, *numbers,
            count, self._precision, division is not None, unit, num_warps=self._warps, enable_fp_fusion=True,
        )  # fmt: skip
        return negative, silent, broken

    def _bits(self, size: int) -> int:
        return 1 if self._form.drawn else super()._bits(size)

    def spend(self, momentum: Tensor, packed: Tensor, group_size: int) -> None:
        if not self._form.drawn:
            super().spend(momentum, packed, group_size)
            return
        _spend_drawn[(self._layout.chunks,)](
            momentum, *self._pattern(group_size), self._form.votes_a_chunk(group_size), num_warps=4
        )

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        drawn = self._form.drawn
        found = self._drawn_rows(ballots) if drawn else self._group_rows(ballots)
        signs, silents, *places_of, shifts = found.tensors
        ranks, moves = places_of if drawn else (shifts, shifts)
        weight_decay = decayed(parameters, lr, weight_decay)
        self._fill(self._pool, parameters)
        factor = decay_factor(lr, weight_decay)
        apply_wide[(self._layout.chunks,)](
            self._addresses(parameters, self._pool), self._rows, signs, silents, ranks, moves, shifts, *self._digits,
            len(ballots), self._cap, factor, lr, self._maps, drawn, factor != 1, *self._orthogonal, self._unit(parameters),
            num_warps=self._inverse_warps, enable_fp_fusion=False,
        )  # fmt: skip
        self._take_strips(parameters)

    def _drawn_rows(self, ballots: Sequence[tuple[int, bytes]]) -> BallotRows:
        """Ballots as `_drawn_sums` takes them; those of one size share their places, unless each author has its own."""
        read = [self._form.read(payload, size, self._layout.chunks).to(self._device) for size, payload in ballots]
        keys = [(packed.size, number if self._form.independent else 0) for number, packed in enumerate(read)]
        patterns = {key: self._ranked(*key) for key in {*keys}}
        ranks, moves = ([patterns[key][part] for key in keys] for part in range(2))
        signs, silents = [packed.negative for packed in read], [_silent(packed) for packed in read]
        logarithms = [packed.size.bit_length() - 1 for packed in read]
        shifts = torch.tensor(logarithms or [0], dtype=torch.int32, device=self._device)
        tensors = *(self.listed(part) for part in (signs, silents, ranks, moves)), shifts
        return BallotRows(tensors, (read, silents, patterns))

    def _ranked(self, size: int, number: int) -> tuple[Tensor, Tensor]:
        """For each coefficient the number of its vote, int32 [4096], and what moves a chunk."""
        order, moved = self._pattern(size, number)
        rank = torch.full((CHUNK_ELEMENTS,), NOWHERE, dtype=torch.int32, device=self._device)
        rank[order.to(torch.int64)] = torch.arange(len(order), dtype=torch.int32, device=self._device)
        return rank, moved


def _silent(packed: Packed) -> Tensor | None:
    return None if packed.silent is None else packed.silent.contiguous()
