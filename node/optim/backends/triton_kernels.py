"""The kernels of Triton's step: transform, momentum and votes in one; votes, exact inverse and update in the other.

The replicated part is bit-identical to the portable path. The inverse runs in int8 products with int32 sums, so nothing can
round. Vote sums are within +-2, the basis within +-91, and middle values are split in two int8 digits. The update is two fp32
roundings, with fused multiply-adds switched off. The forward transform serves only the private momentum. ADR 7.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from node.optim.backends.triton_newton import ROUND, orthogonal
from node.optim.exact.smallest import SMALLEST
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE

SIDE = tl.constexpr(CHUNK_SIDE)
ELEMENTS = tl.constexpr(CHUNK_ELEMENTS)
CHUNK_BITS = tl.constexpr(CHUNK_ELEMENTS.bit_length() - 1)
"""Bits of a coefficient's number."""

DIGIT = tl.constexpr(128)
"""Middle values are `128 * high + low`: both digits fit in int8, because a middle value is within +-3707."""
SMALLEST_BITS = tl.constexpr(int(np.float32(SMALLEST).view(np.int32)))
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def join(
    addresses,
    rows,
    momentum,
    basis,
    beta,
    step,
    squares,
    corrections,
    apart,
    beta2,
    rest,
    epsilon,
    PRECISION: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """One chunk: `m = beta * m + step * T(g)`. Returns m as it was before it is rounded to what the momentum keeps.

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
    return fresh


@triton.jit
def vote(
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
    """`join`, the code of each group's first largest magnitude, and whether that is zero."""
    join(
        addresses, rows, momentum, basis, beta, step, squares, corrections, apart, beta2, rest, epsilon, PRECISION, DIVIDES
    )  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    own = momentum + chunk * ELEMENTS
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
def group_sums(near, far, ballots, silents, shifts, count):
    """The sums of all ballots' group votes for one chunk: int32 [64, 64]."""
    chunk = tl.program_id(0).to(tl.int64)
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
    return sums


@triton.jit
def move(addresses, rows, near, far, direction, factor, lr, DECAYS: tl.constexpr):
    """The update of one chunk's parameters."""
    chunk = tl.program_id(0).to(tl.int64)
    base, stride = tl.load(addresses + chunk), tl.load(rows + chunk)
    place = base.to(tl.pointer_type(tl.float32)) + near * stride + far
    parameter = tl.load(place)
    if DECAYS:
        parameter = parameter * factor
    moved = parameter - lr * direction
    small = (moved.to(tl.int32, bitcast=True) & MAGNITUDE_BITS) < SMALLEST_BITS
    tl.store(place, tl.where(small, moved * 0.0, moved))


@triton.jit
def sign(value):
    """-1, 0 or 1, fp32."""
    return (value > 0).to(tl.float32) - (value < 0).to(tl.float32)


@triton.jit
def apply(
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
    sums = tl.minimum(tl.maximum(group_sums(near, far, ballots, silents, shifts, count), -2), 2)
    matrix = tl.load(basis + near * SIDE + far)
    first = tl.dot(tl.trans(matrix), sums.to(tl.int8), out_dtype=tl.int32)
    middle = (((first.to(tl.float32) * 0.5) + ROUND) - ROUND).to(tl.int32)
    high = (middle + DIGIT // 2) >> 7
    low = middle - high * DIGIT
    result = tl.dot(high.to(tl.int8), matrix, out_dtype=tl.int32) * DIGIT
    result += tl.dot(low.to(tl.int8), matrix, out_dtype=tl.int32)
    direction = sign(result)
    if ITERATIONS and tl.load(maps + chunk) != 0:
        direction = orthogonal(result.to(tl.float32), near == far, ITERATIONS)
        if SIGNS:
            direction = sign(direction)
    move(addresses, rows, near, far, direction, factor, lr, DECAYS)
