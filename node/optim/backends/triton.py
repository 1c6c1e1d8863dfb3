"""The step on a GPU in two Triton kernels: transform, momentum and votes in one; votes, exact inverse and update in the other.

The replicated part is bit-identical to the portable path. The inverse runs in int8 products with int32 sums, so nothing can
round. Vote sums are within +-2, the basis within +-91, and middle values are split in two int8 digits. The update is two fp32
roundings, with fused multiply-adds switched off. The forward transform serves only the private momentum.

The backend is opt-in (`SWARMENTUM_OPTIM_BACKEND=triton`). The backend has run in Triton's interpreter, in which tests compare
it, and on no GPU yet. ADR 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from node.optim.backends.triton_newton import ROUND, orthogonal
from node.optim.base import Base
from node.optim.exact import dct
from node.optim.exact.smallest import SMALLEST
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout
from node.optim.second_moment import EPSILON, SecondMoment
from node.optim.step import Decay, as_tensor, decay_factor, decayed, spend, total_norm
from node.optim.votes import bits, silence
from node.optim.votes import groups as votes
from node.optim.votes.groups import NotANumber
from node.optim.votes.payload import PLAIN

SIDE = tl.constexpr(CHUNK_SIDE)
ELEMENTS = tl.constexpr(CHUNK_ELEMENTS)
CHUNK_BITS = tl.constexpr(CHUNK_ELEMENTS.bit_length() - 1)
"""Bits of a coefficient's number."""

DIGIT = tl.constexpr(128)
"""Middle values are `128 * high + low`: both digits fit in int8, because a middle value is within +-3707."""


@triton.jit
def _vote(
    addresses,
    rows,
    momentum,
    basis,
    table,
    codes,
    silent,
    broken,
    beta,
    step,
    squares,
    corrections,
    apart,
    beta2,
    rest,
    epsilon,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """One chunk: `m = beta * m + step * T(g)`, the code of each group's first largest magnitude, and whether that is zero.

    With `DIVIDES`, the kernel first divides the gradient by the root of its second moment at the addresses `squares`.
    """
    chunk = tl.program_id(0).to(tl.int64)
    near, far = tl.arange(0, SIDE), tl.arange(0, SIDE)
    base, stride = tl.load(addresses + chunk), tl.load(rows + chunk)
    place = near[:, None] * stride + far[None, :]
    there = place * 0 + base != 0
    gradient = tl.load(base.to(tl.pointer_type(tl.float32)) + place, mask=there, other=0.0)
    if DIVIDES:
        beside = tl.load(squares + chunk).to(tl.pointer_type(tl.float32)) + place
        moment = beta2 * tl.load(beside, mask=there, other=0.0) + rest * gradient * gradient
        tl.store(beside, moment, mask=there)
        # Each tensor has its own correction: one for a chunk of a core, one for each element of the pool.
        own_corrections = tl.load(corrections + chunk).to(tl.pointer_type(tl.float32))
        correction = tl.load(own_corrections + place * tl.load(apart + chunk))
        gradient = gradient / tl.sqrt(moment * correction + epsilon)
    square = near[:, None] * SIDE + far[None, :]
    matrix = tl.load(basis + square)
    half = tl.dot(matrix, gradient, input_precision=PRECISION)
    coefficients = tl.dot(half, tl.trans(matrix), input_precision=PRECISION)
    own = momentum + chunk * ELEMENTS
    fresh = beta * tl.load(own + square).to(tl.float32) + step * coefficients  # bf16 becomes fp32, and is rounded once
    tl.store(own + square, fresh)
    tl.debug_barrier()  # the votes read values that other threads have written
    group = tl.arange(0, GROUPS)
    slots = tl.arange(0, GROUP_SIZE)[:, None] * GROUPS + group[None, :]
    magnitudes = tl.abs(tl.load(own + tl.load(table + slots)).to(tl.float32))
    nan = magnitudes != magnitudes  # noqa: PLR0124
    tl.store(broken + chunk, tl.max(tl.max(nan.to(tl.int32), axis=0), axis=0))
    tl.store(silent + chunk * GROUPS + group, (tl.max(magnitudes, axis=0) == 0).to(tl.uint8))
    best = tl.argmax(magnitudes, axis=0, tie_break_left=True)
    negative = tl.load(own + tl.load(table + best * GROUPS + group)).to(tl.float32) < 0
    tl.store(codes + chunk * GROUPS + group, (best + GROUP_SIZE * negative.to(tl.int32)).to(tl.uint8))


@triton.jit
def _apply(
    addresses,
    rows,
    ballots,
    silents,
    shifts,
    basis,
    count,
    factor,
    lr,
    maps,
    DECAYS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SIGNS: tl.constexpr,
):
    """One chunk: the capped sums of all ballots, the sign of their exact inverse, the update.

    With `ITERATIONS`, the inverse of a chunk that is marked in `maps` becomes orthogonal, and with `SIGNS` its signs.
    """
    chunk = tl.program_id(0).to(tl.int64)
    near, far = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    sums = tl.zeros((SIDE, SIDE), dtype=tl.int32)
    for ballot in range(count):
        # All sizes are powers of two: a division here costs more than the rest of the loop.
        shift = tl.load(shifts + ballot)
        size, groups = 1 << shift, ELEMENTS >> shift
        wide = tl.minimum(groups, SIDE)
        slot = SIDE * near + (far & -wide) + ((near + far) & (wide - 1))
        start = tl.load(ballots + ballot).to(tl.pointer_type(tl.uint8)) + chunk * groups
        code = tl.load(start + (slot & (groups - 1))).to(tl.int32)
        voted = (code & (size - 1)) == slot >> (CHUNK_BITS - shift)
        quiet = tl.load(silents + ballot)  # the address of a byte for each vote; 0 if no vote is silent
        bytes_of = quiet.to(tl.pointer_type(tl.uint8)) + chunk * groups
        voted &= tl.load(bytes_of + (slot & (groups - 1)), mask=slot * 0 + quiet != 0, other=0) == 0
        sums += tl.where(voted, tl.where(code >= size, -1, 1), 0)
    sums = tl.minimum(tl.maximum(sums, -2), 2)
    matrix = tl.load(basis + near * SIDE + far)
    first = tl.dot(tl.trans(matrix), sums.to(tl.int8), out_dtype=tl.int32)
    middle = (((first.to(tl.float32) * 0.5) + ROUND) - ROUND).to(tl.int32)
    high = (middle + DIGIT // 2) >> 7
    low = middle - high * DIGIT
    result = tl.dot(high.to(tl.int8), matrix, out_dtype=tl.int32) * DIGIT
    result += tl.dot(low.to(tl.int8), matrix, out_dtype=tl.int32)
    direction = (result > 0).to(tl.float32) - (result < 0).to(tl.float32)
    if ITERATIONS and tl.load(maps + chunk) != 0:
        direction = orthogonal(result.to(tl.float32), near == far, ITERATIONS)
        if SIGNS:
            direction = (direction > 0).to(tl.float32) - (direction < 0).to(tl.float32)
    base, stride = tl.load(addresses + chunk), tl.load(rows + chunk)
    place = base.to(tl.pointer_type(tl.float32)) + near * stride + far
    parameter = tl.load(place)
    if DECAYS:
        parameter = parameter * factor
    moved = parameter - lr * direction
    small = (moved.to(tl.int32, bitcast=True) & MAGNITUDE_BITS) < SMALLEST_BITS
    tl.store(place, tl.where(small, moved * 0.0, moved))


SMALLEST_BITS = tl.constexpr(int(np.float32(SMALLEST).view(np.int32)))
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)

CAPABILITY_MIN = (8, 0)
"""The first GPUs (Ampere) that have int8 products in the shape that Triton makes."""


INVERSE_WARPS = 8
"""Warps of a chunk's inverse: a processor of a GPU works on two chunks, and spills no register."""


def forward_options(capability: tuple[int, int]) -> tuple[str, int]:
    """The forward transform's products, and its warps: as compiled for each GPU, they keep all numbers in registers.

    Hopper and Blackwell's B200 have tensor cores wide enough for three TF32 products in place of one of fp32. On other GPUs
    this would spill registers, and so would fewer warps.
    """
    return ("tf32x3", 4) if capability[0] in {9, 10} else ("ieee", 16)


class Triton:
    """`backends.base.Backend` on a GPU. The backend reads and writes cores in place, and strips and vectors through one
    pool."""

    name = "triton"

    def __init__(self, layout: Layout, device: torch.device, base: Base) -> None:
        """`base` is chunkwise."""
        self._layout, self._device = layout, device
        self._maps = base.maps.to(device, torch.uint8)
        self._orthogonal = (base.config.iterations if base.config.block else 0, base.config.output == "sign")
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else CAPABILITY_MIN
        if capability < CAPABILITY_MIN:
            has, needs = (".".join(map(str, pair)) for pair in (capability, CAPABILITY_MIN))
            raise ValueError(
                f"the Triton kernels need a GPU of compute capability {needs}, and this GPU has {has}: choose torch"
            )
        self._precision, self._warps = forward_options(capability)
        core = [
            (number, row * CHUNK_SIDE * place.width + column * CHUNK_SIDE, place.width)
            for number, place in enumerate(layout.places)
            for row in range(place.core_height // CHUNK_SIDE)
            for column in range(place.core_width // CHUNK_SIDE)
        ]
        table = np.array(core, dtype=np.int64).reshape(-1, 3)
        pool = layout.chunks - layout.core_chunks
        self._owner, self._offset = table[:, 0], 4 * table[:, 1]
        rows = np.concatenate((table[:, 2], np.full(pool, CHUNK_SIDE, dtype=np.int64)))
        self._rows = torch.from_numpy(rows).to(device)
        planes = torch.zeros(3, pool, CHUNK_SIDE, CHUNK_SIDE, dtype=torch.float32, device=device)
        self._pool, self._beside, self._corrections = planes.unbind()
        apart = np.repeat(np.array([0, 1], dtype=np.int64), (len(table), pool))
        self._apart = torch.from_numpy(apart).to(device)
        self._pool_offset = 4 * CHUNK_ELEMENTS * np.arange(pool, dtype=np.int64)
        self._basis = dct.basis(device).contiguous()
        self._integers = dct.integer_basis(device).to(torch.int8).contiguous()
        self._tables = {size: votes.coefficients(size, device).to(torch.int32) for size in votes.GROUP_SIZES}

    def norm(self, gradients: Sequence[Tensor | None]) -> float:
        """See `Backend.norm`."""
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
        """See `Backend.fold`. Its votes count for nothing."""
        own = slice(chunks.start, chunks.stop)
        where = self._addresses(gradients, pool)
        self._run(where[own], self._rows[own], momentum[own], beta, step, votes.GROUP_SIZES[-1])

    def vote(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        """See `Backend.vote`. Gradients stay as they are."""
        if gradients is None:  # nothing joins, and nothing changes: m = 1 * m + 0
            nothing = torch.zeros(self._layout.chunks, dtype=torch.int64, device=self._device)
            return self._packed(*self._run(nothing, self._rows, momentum, 1.0, 0.0, group_size), group_size)
        self._fill(self._pool, gradients)
        where = self._addresses(gradients, self._pool)
        if second is None:
            return self._packed(*self._run(where, self._rows, momentum, beta, step, group_size), group_size)
        pairs = zip(second.squares, gradients, strict=True)
        squares = [None if gradient is None else square for square, gradient in pairs]
        self._fill(self._beside, squares)
        found = torch.tensor(
            [1 / value for value in second.advance(gradients)], dtype=torch.float32, device=self._device
        )
        beside = self._addresses(squares, self._beside), self._corrected(found), self._apart
        division = *beside, second.beta2, 1 - second.beta2, EPSILON
        made = self._run(where, self._rows, momentum, beta, step, group_size, division)
        for part, strip in self._strips(squares, self._beside):
            if part is not None:
                part.copy_(strip)
        return self._packed(*made, group_size)

    def _run(
        self,
        where: Tensor,
        rows: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        division: tuple[Tensor, Tensor, Tensor, float, float, float] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel over some chunks: codes, silent votes, and which chunks hold NaN. Without `division`, nothing divides."""
        groups, chunks = votes.groups(group_size), len(where)
        codes, silent = torch.empty(2, chunks, groups, dtype=torch.uint8, device=self._device).unbind()
        broken = torch.empty(chunks, dtype=torch.int32, device=self._device)
        beside, corrections, apart, *numbers = division or (where, where, where, 0.0, 0.0, 0.0)
        _vote[(chunks,)](
            where, rows, momentum, self._basis, self._tables[group_size], codes, silent, broken, beta, step, beside,
            corrections, apart, *numbers,
            groups, group_size, self._precision, division is not None, num_warps=self._warps, enable_fp_fusion=True,
        )  # fmt: skip
        return codes, silent, broken

    def _packed(self, codes: Tensor, silent: Tensor, broken: Tensor, group_size: int) -> Tensor:
        """The payload."""
        if bool(broken.any()):
            raise NotANumber("the momentum holds NaN")
        packed = bits.pack(codes, votes.bits(group_size))
        tail = silence.encode(silence.pack(silent.to(torch.bool))) if bool(silent.any()) else b""
        return torch.cat([packed, as_tensor(tail, self._device)]) if tail else packed

    def spend(self, momentum: Tensor, packed: Tensor, group_size: int) -> None:
        """See `Backend.spend`."""
        spend(momentum, packed, group_size)

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        """See `Backend.apply`."""
        chunks = self._layout.chunks
        codes, silents = [], []
        for size, payload in ballots:
            read = PLAIN.read(payload, size, chunks).to(self._device)
            codes.append(
                bits.unpack(read.grouped.reshape(-1), votes.bits(size), chunks * votes.groups(size)).contiguous()
            )
            silents.append(
                None if read.silent is None else silence.unpack(read.silent, votes.groups(size)).to(torch.uint8)
            )
        listed = torch.tensor([code.data_ptr() for code in codes] or [0], dtype=torch.int64, device=self._device)
        quiet = [0 if silent is None else silent.data_ptr() for silent in silents] or [0]
        beside = torch.tensor(quiet, dtype=torch.int64, device=self._device)
        logarithms = [size.bit_length() - 1 for size, _ in ballots]
        shifts = torch.tensor(logarithms or [0], dtype=torch.int32, device=self._device)
        weight_decay = decayed(parameters, lr, weight_decay)
        self._fill(self._pool, parameters)
        factor = decay_factor(lr, weight_decay)
        _apply[(chunks,)](
            self._addresses(parameters, self._pool), self._rows, listed, beside, shifts, self._integers, len(codes), factor, lr,
            self._maps, factor != 1, *self._orthogonal, num_warps=INVERSE_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        for part, strip in self._strips(parameters, self._pool):
            assert part is not None
            part.copy_(strip)

    def _addresses(self, tensors: Sequence[Tensor | None], pool: Tensor) -> Tensor:
        """The address of each chunk's first element; 0 for a chunk that counts as zeros."""
        base = np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], dtype=np.int64)[self._owner]
        core = np.where(base == 0, 0, base + self._offset)
        whole = np.concatenate((core, pool.data_ptr() + self._pool_offset))
        return torch.from_numpy(whole).to(self._device)

    def _corrected(self, corrections: Tensor) -> Tensor:
        """The address of each chunk's first correction in fp32 [tensors]: its tensor's, or that of the pool's first element."""
        flat = self._corrections.view(-1)
        for number, place in enumerate(self._layout.places):
            flat[place.pool_offset : place.pool_offset + place.pool_elements] = corrections[number]
        core = corrections.data_ptr() + 4 * self._owner
        return torch.from_numpy(np.concatenate((core, self._corrections.data_ptr() + self._pool_offset))).to(
            self._device
        )

    def _fill(self, pool: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Copy strips and vectors in, with zeros behind them, because the last update has written there, too."""
        pool.view(-1)[self._layout.pool_elements :].zero_()
        for part, strip in self._strips(tensors, pool):
            if part is None:
                strip.zero_()
            else:
                strip.copy_(part)

    def _strips(self, tensors: Sequence[Tensor | None], pool: Tensor) -> list[tuple[Tensor | None, Tensor]]:
        """The tensors' parts in the pool, each beside its place there; empty without tensors."""
        return list(self._layout.pool_pairs(tensors, pool.view(-1))) if tensors else []
