"""The kernels of Triton's step: transform, momentum and votes in one; votes, exact inverse and update in the other.

The replicated part is bit-identical to the portable path. The inverse runs in int8 products with int32 sums, so nothing can
round. Vote sums are within +-2, the basis within +-91, and middle values are split in two int8 digits. The update is two fp32
roundings, with fused multiply-adds switched off. The forward transform serves only the private momentum. ADR 7.

`orthogonal` iterates over one chunk, by int8 products, in the bits of `orthogonal_chunks`. ADR 25.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from node.optim.exact import orthogonal as whole_matrices
from node.optim.exact.orthogonal import SMALLEST
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: to add it and take it away again rounds fp32 below 2^22 half to even."""
_ROUND_BITS = tl.constexpr(int(np.float32(12582912.0).view(np.int32)))
_CONSTANT, _LINEAR, _QUADRATIC = map(tl.constexpr, whole_matrices.COEFFICIENTS)
_ENTRY_MAX = tl.constexpr(whole_matrices.ENTRY_MAX)
_FACTOR_MAX = tl.constexpr(float(whole_matrices.FACTOR_MAX))
_FACTOR_UNITS = tl.constexpr(whole_matrices.FACTOR_UNITS)
_GRAM_MIN = tl.constexpr(whole_matrices.GRAM_MIN)
_LARGEST_MIN = tl.constexpr(whole_matrices.LARGEST_MIN)
_SCALE = tl.constexpr(whole_matrices.SCALE)
_SMALLEST = tl.constexpr(SMALLEST)
_EXPONENT_BITS = tl.constexpr(0x7F800000)
_INVERSE_BITS = tl.constexpr(2 * 127 << 23)
_WHOLE = tl.constexpr(2.0**whole_matrices.WHOLE_EXPONENT)
_DIGIT = tl.constexpr(whole_matrices.DIGIT)


@triton.jit
def orthogonal(turned, diagonal, ITERATIONS: tl.constexpr):
    """`orthogonal_chunks` of one chunk, fp32 [64, 64], transposed on both sides. `diagonal` is true there.

    Tensor cores read int8 along the sum alone. Of `x^T x` both factors lie so in the transposed chunk, and what is symmetric
    lies so anyway.
    """
    turned = _iteration(turned, diagonal, True)
    for _ in range(ITERATIONS - 1):
        turned = _iteration(turned, diagonal, False)
    return turned * _SCALE


@triton.jit
def _iteration(turned, diagonal, FIRST: tl.constexpr):
    peak = tl.max(tl.max(tl.abs(turned), axis=1), axis=0)
    scale = (
        tl.where(peak < _SMALLEST, 0.0, _power(tl.maximum(peak, _SMALLEST)))
        if FIRST
        else _power(tl.maximum(peak, _LARGEST_MIN))
    )
    high, low = _digits(_rounded(turned * scale))
    gram = _product(high, low, tl.trans(high), tl.trans(low)).to(tl.float32)
    largest = tl.max(tl.max(tl.where(diagonal, gram, 0.0), axis=1), axis=0)
    less = _power(tl.maximum(largest, _GRAM_MIN))
    whole = _rounded(gram * less)
    wide = less.to(tl.float64)
    if FIRST:
        squares = tl.sum(tl.sum(whole * whole, axis=1).to(tl.int64), axis=0).to(tl.float64)
        unit = 1.0 / tl.sqrt(tl.maximum(squares, 1.0))
        root = tl.sqrt(unit * wide)
    else:
        root = 1.0 / scale.to(tl.float64)
        unit = root * root / wide
    linear, quadratic = (unit * wide * _LINEAR).to(tl.float32), (unit * unit * _QUADRATIC).to(tl.float32)
    large, small = _digits(whole)
    squared = _product(large, small, tl.trans(large), tl.trans(small)).to(tl.float32)
    factor = gram * linear + squared * quadratic
    factor = tl.where(diagonal, factor + _CONSTANT, factor) * _FACTOR_UNITS
    factor = tl.minimum(tl.maximum(_whole(factor), -_FACTOR_MAX), _FACTOR_MAX).to(tl.int32)
    large, small = _digits(factor)
    turned = _product(large, small, high, low).to(tl.float32) * (root / _FACTOR_UNITS).to(tl.float32)
    return tl.minimum(tl.maximum(turned, -_ENTRY_MAX), _ENTRY_MAX)


@triton.jit
def _power(peak):
    """The power of two that brings positive normal fp32 to between 2^11 and 2^12."""
    inverse = _INVERSE_BITS - (peak.to(tl.int32, bitcast=True) & _EXPONENT_BITS)
    return inverse.to(tl.float32, bitcast=True) * _WHOLE


@triton.jit
def _whole(value):
    return (value + ROUND) - ROUND


@triton.jit
def _rounded(value):
    """As int32: the lowest bits of the sum that rounds."""
    return (value + ROUND).to(tl.int32, bitcast=True) - _ROUND_BITS


@triton.jit
def _digits(value):
    high = (value + _DIGIT // 2) >> 7
    return high.to(tl.int8), (value - high * _DIGIT).to(tl.int8)


@triton.jit
def _product(high, low, beside, below):
    """The product of int32 [64, 64] within +-8191, by digits of int8: exact."""
    across = tl.dot(low, beside, tl.dot(high, below, out_dtype=tl.int32), out_dtype=tl.int32)
    return (tl.dot(high, beside, out_dtype=tl.int32) * _DIGIT + across) * _DIGIT + tl.dot(
        low, below, out_dtype=tl.int32
    )


SIDE = tl.constexpr(CHUNK_SIDE)
ELEMENTS = tl.constexpr(CHUNK_ELEMENTS)
CHUNK_BITS = tl.constexpr(CHUNK_ELEMENTS.bit_length() - 1)
"""Bits of a coefficient's number."""
DIGIT = tl.constexpr(128)
"""Middle values are `128 * high + low`: both digits fit in int8, because a middle value is within +-3707."""
SMALLEST_BITS = tl.constexpr(int(np.float32(SMALLEST).view(np.int32)))
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
TF32_BITS = tl.constexpr(-1 << 13)
"""Sign, exponent and the 10 bits of a TF32 number."""


@triton.jit
def split(value):
    """fp32 as a TF32 number and the rest."""
    large = (value.to(tl.int32, bitcast=True) & TF32_BITS).to(tl.float32, bitcast=True)
    return large, value - large


@triton.jit
def forward(matrix, gradient, PRECISION: tl.constexpr):
    """`D G D^T`, fp32. Both products have a second operand that tensor cores read as it lies."""
    if PRECISION == "tf32x3":
        large, small = split(matrix)
        own, rest = split(gradient)
        own, rest = tl.trans(own), tl.trans(rest)
        half = tl.dot(small, own, input_precision="tf32")
        half = tl.dot(large, rest, half, input_precision="tf32")
        half = tl.dot(large, own, half, input_precision="tf32")
        large, small = tl.trans(large), tl.trans(small)
        own, rest = split(half)
        turned = tl.dot(rest, large, input_precision="tf32")
        turned = tl.dot(own, small, turned, input_precision="tf32")
        turned = tl.dot(own, large, turned, input_precision="tf32")
    else:
        half = tl.dot(matrix, tl.trans(gradient), input_precision=PRECISION)
        turned = tl.dot(half, tl.trans(matrix), input_precision=PRECISION)
    return tl.trans(turned)


@triton.jit
def pointers(addresses, rows, near, far, UNIT: tl.constexpr):
    """Of the elements of one chunk. Addresses and rows are multiples of `UNIT` elements, so that a thread reads as many."""
    chunk = tl.program_id(0).to(tl.int64)
    base, stride = tl.load(addresses + chunk), tl.load(rows + chunk)
    place = base.to(tl.pointer_type(tl.float32)) + (near * stride + far)
    if UNIT > 1:
        place = tl.multiple_of(place, (4, 4 * UNIT))
    return place, near * 0 + far * 0 + base != 0


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
    UNIT: tl.constexpr,
):
    """One chunk: `m = beta * m + step * T(g)`. Returns m as it was before it is rounded to what the momentum keeps.

    With `DIVIDES`, the kernel first divides the gradient by the root of its second moment at the addresses `squares`.
    """
    chunk = tl.program_id(0).to(tl.int64)
    near, far = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    place, there = pointers(addresses, rows, near, far, UNIT)
    gradient = tl.load(place, mask=there, other=0.0)
    if DIVIDES:
        beside, _ = pointers(squares, rows, near, far, UNIT)
        moment = beta2 * tl.load(beside, mask=there, other=0.0) + rest * gradient * gradient
        tl.store(beside, moment, mask=there)
        # Each tensor has its own correction: one for a chunk of a core, one for each element of the pool.
        own_corrections = tl.load(corrections + chunk).to(tl.pointer_type(tl.float32))
        spread = (near * tl.load(rows + chunk) + far) * tl.load(apart + chunk)
        gradient = gradient / tl.sqrt(moment * tl.load(own_corrections + spread) + epsilon)
    square = near * SIDE + far
    coefficients = forward(tl.load(basis + square), gradient, PRECISION)
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
    UNIT: tl.constexpr,
):
    """`join`, the code of each group's first largest magnitude, and whether that is zero."""
    join(
        addresses, rows, momentum, basis, beta, step, squares, corrections, apart, beta2, rest, epsilon, PRECISION, DIVIDES,
        UNIT,
    )  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    position = tl.arange(0, GROUP_SIZE)[None, :]
    # Groups are beside each other in a row, and one thread has all positions of a group that its warp sees.
    slot = position * GROUPS + group[:, None]
    row, column, wide = slot // SIDE, slot % SIDE, wide_of(GROUPS)
    place = row * SIDE + (column & -wide) + ((column - row) & (wide - 1))
    bits = tl.load(momentum + chunk * ELEMENTS + place).to(tl.float32).to(tl.int32, bitcast=True)
    magnitudes = bits & MAGNITUDE_BITS  # integers in the order of the numbers, and NaN above all
    largest = tl.max(magnitudes, axis=1)
    tl.store(broken + chunk, (tl.max(largest, axis=0) > INFINITY_BITS).to(tl.int32))
    tl.store(silent + chunk * GROUPS + group, (largest == 0).to(tl.uint8))
    said = tl.where(magnitudes == largest[:, None], 2 * position + (bits < 0).to(tl.int32), 2 * GROUP_SIZE)
    first = tl.min(said, axis=1)
    negative = tl.where(largest == 0, 0, first & 1)
    tl.store(codes + chunk * GROUPS + group, ((first >> 1) + GROUP_SIZE * negative).to(tl.uint8))


@triton.jit
def wide_of(GROUPS: tl.constexpr):
    """Columns that a row rotates among (`votes.groups`)."""
    return GROUPS if GROUPS < SIDE else SIDE


@triton.jit
def slot_sums(ballots, silents, first, last, SIZE: tl.constexpr, sums):
    """`sums` and ballots of one size: element `[i, x]` is slot `64 * i + x`."""
    chunk = tl.program_id(0).to(tl.int64)
    near, far = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    groups: tl.constexpr = ELEMENTS // SIZE
    if groups <= SIDE:
        group = far % groups
        position = (SIDE // groups) * near + far // groups
    else:
        group = (near % (groups // SIDE)) * SIDE + far
        position = near // (groups // SIDE)
    for ballot in range(first, last):
        start = tl.load(ballots + ballot).to(tl.pointer_type(tl.uint8)) + chunk * groups
        code = tl.load(start + group).to(tl.int32)
        said = tl.where(code >= SIZE, -1, 1)
        quiet = tl.load(silents + ballot)  # the address of a byte for each vote; 0 if no vote is silent
        if quiet != 0:
            hushed = tl.load(quiet.to(tl.pointer_type(tl.uint8)) + chunk * groups + group)
            said = tl.where(hushed != 0, 0, said)
        sums += tl.where((code & (SIZE - 1)) == position, said, 0)
    return sums


@triton.jit
def group_sums(near, far, ballots, silents, starts, cap):
    """The sums of all ballots' group votes for one chunk, within +-`cap`: int8 [64, 64].

    Ballots are in the order of their sizes; those of size `8 << n` are numbers `starts[n]` to `starts[n + 1] - 1`.
    """
    nothing = tl.zeros((SIDE, SIDE), dtype=tl.int32)
    first, last = tl.load(starts + 4), tl.load(starts + 5)
    sums = slot_sums(ballots, silents, first, last, 128, nothing)
    sums = rotated(sums, near, far, 32)
    if first > 0:
        others = slot_sums(ballots, silents, 0, tl.load(starts + 1), 8, nothing)
        others = slot_sums(ballots, silents, tl.load(starts + 1), tl.load(starts + 2), 16, others)
        others = slot_sums(ballots, silents, tl.load(starts + 2), tl.load(starts + 3), 32, others)
        others = slot_sums(ballots, silents, tl.load(starts + 3), first, 64, others)
        sums += rotated(others, near, far, 64)
    return tl.minimum(tl.maximum(sums, -cap), cap).to(tl.int8)


@triton.jit
def rotated(slots, near, far, WIDE: tl.constexpr):
    """From slots to coefficients: row i is rotated by i among `WIDE` columns."""
    return tl.gather(slots, (far & -WIDE) + ((near + far) & (WIDE - 1)), axis=1)


@triton.jit
def move(addresses, rows, near, far, direction, factor, lr, DECAYS: tl.constexpr, UNIT: tl.constexpr):
    """The update of one chunk's parameters."""
    place, _ = pointers(addresses, rows, near, far, UNIT)
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
    starts,
    turned,
    factor,
    lr,
    maps,
    DECAYS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SIGNS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One chunk: the capped sums of all ballots, the sign of their exact inverse, the update.

    `turned` is the basis with rows and columns exchanged, int32: so a thread reads as many bytes of it as of the parameters.
    With `ITERATIONS`, the inverse of a chunk that is marked in `maps` becomes orthogonal, and with `SIGNS` its signs.
    """
    chunk = tl.program_id(0).to(tl.int64)
    near, far = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    sums = group_sums(near, far, ballots, silents, starts, 2)
    matrix = tl.load(turned + near * SIDE + far).to(tl.int8)
    first = tl.dot(matrix, sums, out_dtype=tl.int32)
    middle = (first + ((first >> 1) & 1)) >> 1  # half to even
    high = (middle + DIGIT // 2) >> 7
    low = middle - high * DIGIT
    result = tl.dot(matrix, tl.trans(high.to(tl.int8)), out_dtype=tl.int32) * DIGIT
    result += tl.dot(matrix, tl.trans(low.to(tl.int8)), out_dtype=tl.int32)
    direction = sign(result)  # of the transposed chunk
    if ITERATIONS and tl.load(maps + chunk) != 0:
        direction = orthogonal(result.to(tl.float32), near == far, ITERATIONS)
        if SIGNS:
            direction = sign(direction)
    move(addresses, rows, near, far, tl.trans(direction), factor, lr, DECAYS, UNIT)
