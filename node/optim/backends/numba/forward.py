"""The forward transform, the momentum's sum and the largest of each group, as LLVM instructions.

Serves the private momentum only: products and sums may be contracted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from node.optim.backends.numba.emit import (
    ADDRESS,
    CONTRACT,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    LONG,
    ROW_BYTES,
    CodeBuilder,
    Value,
    instruction,
    inverse_root,
    same,
    times,
)
from node.optim.layout import CHUNK_SIDE


def _lee(code: CodeBuilder, values: list[Value]) -> list[Value]:
    """The DCT-II without its scale, `sum_n x[n] cos((2n + 1) k pi / 2N)`: 192 products, 513 sums at 64 points.

    B. G. Lee, "A new algorithm to compute the discrete cosine transform", IEEE ASSP 32(6), 1984.
    """
    size = len(values)
    if size == 1:
        return values
    half = size // 2
    even = [code.builder.fadd(values[n], values[-1 - n], flags=CONTRACT) for n in range(half)]
    odd = [_odd(code, values[n], values[-1 - n], n, size) for n in range(half)]
    return _merged(code, _lee(code, even), _lee(code, odd))


def _lee_in_memory(code: CodeBuilder, source: Callable[[int], Value], room: Callable[[int], Value]) -> list[Value]:
    """`_lee` of 64 values at `source(0)` to `source(63)`; puts what is for the odd half aside at `room(0)` to `room(31)`.

    64 values and their sums are more than there are registers. Each value is read once. Columns that lie a power of two apart
    share few places of the first cache level, so a second read would have to go to the next level.
    """
    build, half, size = code.builder, CHUNK_SIDE // 2, CHUNK_SIDE
    even = []
    for n in range(half):
        one, other = code.load(source(n), 0), code.load(source(size - 1 - n), 0)
        even.append(build.fadd(one, other, flags=CONTRACT))
        code.store(_odd(code, one, other, n, size), room(n), 0)
    even = _lee(code, even)
    build.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)  # so that LLVM keeps no odd half till here
    return _merged(code, even, _lee(code, [code.load(room(n), 0) for n in range(half)]))


def _odd(code: CodeBuilder, one: Value, other: Value, n: int, size: int) -> Value:
    """Element n of the odd half of `_lee`, from elements n and size - 1 - n."""
    factor = same(FLOAT, _fp32(0.5 / math.cos((2 * n + 1) * math.pi / (2 * size))))
    return code.builder.fmul(code.builder.fsub(one, other, flags=CONTRACT), factor, flags=CONTRACT)


def _merged(code: CodeBuilder, even: list[Value], odd: list[Value]) -> list[Value]:
    summed = [code.builder.fadd(one, other, flags=CONTRACT) for one, other in pairwise(odd)]
    return [value for pair in zip(even, [*summed, odd[-1]], strict=True) for value in pair]


def _fp32(value: float) -> float:
    return float(np.float32(value))


def _transposed(code: CodeBuilder, rows: list[Value]) -> list[Value]:
    """16 vectors of 16 lanes, turned about the diagonal: four rounds of exchanges, between rows 1, 2, 4 and 8 apart."""
    for span in (1, 2, 4, 8):
        low = [lane if not lane & span else LANES + lane - span for lane in range(LANES)]
        high = [lane + span if not lane & span else LANES + lane for lane in range(LANES)]
        turned = list(rows)
        for row in range(LANES):
            if not row & span:
                turned[row] = code.shuffle(rows[row], rows[row + span], low)
                turned[row + span] = code.shuffle(rows[row], rows[row + span], high)
        rows = turned
    return rows


@instruction(ADDRESS, types.int64, ADDRESS, ADDRESS, types.int64)
def forward_columns(
    code: CodeBuilder, source: Value, stride: Value, target: Value, coming: Value, coming_stride: Value
) -> None:
    """The DCT (times `sqrt(32)`) of 16 columns of 64 rows `stride` bytes apart, into 16 rows of a chunk.

    The code prefetches 64 lines from `coming` on, `coming_stride` bytes apart, one at each store. A core cannot wait for all
    of them at once.
    """
    rows = [code.at(source, times(code, stride, row)) for row in range(CHUNK_SIDE)]
    result = _lee_in_memory(code, rows.__getitem__, lambda n: code.at(target, n * 4 * LANES))
    result[0] = code.builder.fmul(result[0], same(FLOAT, _fp32(math.sqrt(0.5))))
    for block in range(0, CHUNK_SIDE, LANES):
        for column, values in enumerate(_transposed(code, result[block : block + LANES])):
            code.prefetch(coming, times(code, coming_stride, block + column), near=2)
            code.store(values, target, column * ROW_BYTES + 4 * block)


@instruction(ADDRESS, ADDRESS, types.float32, types.float32, ADDRESS, types.int64)
def forward_rows(
    code: CodeBuilder, source: Value, momentum: Value, beta: Value, step: Value, coming: Value, coming_stride: Value
) -> None:
    """`m = beta * m + step * DCT` for 16 rows of a chunk of momentum; `source` is a block of `forward_columns`'.

    The kernel writes over the block. The 16 rows at `coming` are asked for.
    """
    build = code.builder
    rows = [code.at(source, row * ROW_BYTES) for row in range(CHUNK_SIDE)]
    result = _lee_in_memory(code, rows.__getitem__, rows[::-1].__getitem__)
    decay = code.splat(beta)
    scale = code.splat(build.fmul(step, ir.Constant(FLOAT, 2 / CHUNK_SIDE)))
    first = [ir.Constant(FLOAT, _fp32(math.sqrt(0.5)) if lane == 0 else 1.0) for lane in range(LANES)]
    for block in range(0, CHUNK_SIDE, LANES):
        scales = build.fmul(scale, ir.Constant(FLOATS, first)) if block == 0 else scale
        for row, values in enumerate(_transposed(code, result[block : block + LANES])):
            place = row * ROW_BYTES + 4 * block
            kept = build.fmul(decay, code.load(momentum, place), flags=CONTRACT)
            added = build.fmul(scales, values, flags=CONTRACT)
            number = block + row
            line = code.at(coming, times(code, coming_stride, number // 4))
            code.prefetch(line, 4 * LANES * (number % 4), near=2)
            code.store(build.fadd(kept, added, flags=CONTRACT), momentum, place)


@instruction(ADDRESS, ADDRESS, types.int64, *(types.float32,) * 4, ADDRESS, ADDRESS, types.int64)
def divide_rows(
    code: CodeBuilder,
    source: Value,
    squares: Value,
    stride: Value,
    beta2: Value,
    rest: Value,
    correction: Value,
    epsilon: Value,
    target: Value,
    coming: Value,
    coming_stride: Value,
) -> None:
    """`v = beta2 * v + rest * g^2` in place and `g / sqrt(v * correction + epsilon)` to a chunk of our own memory.

    `source` and `squares` have 64 rows `stride` bytes apart; those at `coming` are asked for. By rows: what is written
    should still be in the first cache level when the store is carried out, and columns share few places there.
    """
    build = code.builder
    kept, new, corrected, least = (code.splat(number) for number in (beta2, rest, correction, epsilon))
    with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE)) as loop:
        place = build.mul(loop.index, stride)
        own, moments = code.at(source, place), code.at(squares, place)
        out = code.at(target, build.mul(loop.index, ir.Constant(LONG, ROW_BYTES)))
        ahead = code.at(coming, build.mul(loop.index, coming_stride))
        for column in range(0, ROW_BYTES, 4 * LANES):
            code.prefetch(ahead, column, near=2)
            gradient = code.load(own, column)
            added = build.fmul(build.fmul(gradient, new), gradient, flags=CONTRACT)
            moment = build.fadd(build.fmul(kept, code.load(moments, column), flags=CONTRACT), added, flags=CONTRACT)
            code.store(moment, moments, column)
            square = build.fadd(build.fmul(moment, corrected, flags=CONTRACT), least, flags=CONTRACT)
            code.store(build.fmul(gradient, inverse_root(code, square)), out, column)


Best: TypeAlias = list[tuple[Value, Value]]
"""The bits of the largest magnitudes so far and their positions, two vectors of int32 for every 16 lanes."""


def _better(code: CodeBuilder, one: Best, other: Best) -> Best:
    """The larger of each lane. If both are equal, it is `one`, whose positions are lower."""
    build, result = code.builder, []
    for mine, theirs in zip(one, other, strict=True):
        larger = build.icmp_signed(">", theirs[0], mine[0])
        result.append((build.select(larger, theirs[0], mine[0]), build.select(larger, theirs[1], mine[1])))
    return result


def _rotated(code: CodeBuilder, best: Best, by: int) -> Best:
    """Lane j takes the place of lane j + by."""
    result = []
    for first in range(0, len(best) * LANES, LANES):
        lanes = [(first + lane + by) % (len(best) * LANES) for lane in range(LANES)]
        one, other = best[lanes[0] // LANES], best[lanes[-1] // LANES]
        picked = [lane % LANES + (0 if lane // LANES == lanes[0] // LANES else LANES) for lane in lanes]
        result.append((code.shuffle(one[0], other[0], picked), code.shuffle(one[1], other[1], picked)))
    return result


def _row_best(code: CodeBuilder, line: Value, number: Value, group_size: int) -> Best:
    """One row's magnitudes, the `number`th that was looked at; where groups have two of them, the larger."""
    build, halves = code.builder, max(1, group_size // CHUNK_SIDE)
    found = []
    for half in range(halves):
        position = build.add(build.mul(number, ir.Constant(LONG, halves)), ir.Constant(LONG, half))
        position = code.splat(build.trunc(position, INT))
        wide = ROW_BYTES // halves
        values = [code.load(line, half * wide + first, INTS) for first in range(0, wide, 4 * LANES)]
        found.append([(build.and_(value, same(INT, 0x7FFFFFFF)), position) for value in values])
    return found[0] if halves == 1 else _better(code, *found)


def _keep(code: CodeBuilder, slots: list[list[Value]], best: Best) -> None:
    for pair, values in zip(slots, best, strict=True):
        for slot, value in zip(pair, values, strict=True):
            code.builder.store(value, slot)


def _kept(code: CodeBuilder, slots: list[list[Value]]) -> Best:
    return [(code.builder.load(one, typ=INTS), code.builder.load(other, typ=INTS)) for one, other in slots]


def _largest(group_size: int) -> Value:
    vectors = min(CHUNK_SIDE, CHUNK_SIDE * CHUNK_SIDE // group_size) // LANES
    apart = max(1, CHUNK_SIDE // group_size)
    rows = CHUNK_SIDE // apart

    def emit(code: CodeBuilder, momentum: Value, row: Value, magnitudes: Value, positions: Value) -> None:
        """The largest magnitude of each group (as its bits) and its first position, of rows `row`, `row + apart` ...

        One row on, the same groups lie `apart` columns to the left. The upper and the lower half of the chunk are looked
        at side by side, since each step waits for the one before.
        """
        build, below = code.builder, same(INT, -1)
        slots = [[[cgutils.alloca_once(build, INTS) for _ in range(2)] for _ in range(vectors)] for _ in range(2)]
        for half in range(2):
            _keep(code, slots[half], [(below, below)] * vectors)
        start = build.add(momentum, build.mul(row, ir.Constant(LONG, ROW_BYTES)))

        with cgutils.for_range(build, ir.Constant(LONG, rows // 2)) as loop:
            for half in range(2):
                number = build.add(loop.index, ir.Constant(LONG, half * rows // 2))
                line = build.add(start, build.mul(number, ir.Constant(LONG, apart * ROW_BYTES)))
                best = _better(code, _kept(code, slots[half]), _row_best(code, line, number, group_size))
                _keep(code, slots[half], _rotated(code, best, apart))
        upper, lower = (_kept(code, half) for half in slots)
        best = _better(code, _rotated(code, upper, CHUNK_SIDE // 2), lower)
        for vector, values in enumerate(best):
            code.store(values[0], magnitudes, 4 * LANES * vector)
            code.store(values[1], positions, 4 * LANES * vector)

    return instruction(ADDRESS, types.int64, ADDRESS, ADDRESS)(emit)


largest_8, largest_16, largest_32, largest_64, largest_128 = (_largest(size) for size in (8, 16, 32, 64, 128))
