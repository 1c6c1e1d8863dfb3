"""The inner loops of the fused step, as LLVM instructions on vectors of 16 lanes.

Each function below is one instruction to numba, which compiles it into the kernels for the processor at hand (a vector
of 16 is one register with AVX-512, two with AVX2, four with NEON). Addresses are integers; nothing is checked. Only
`forward_columns` and `forward_rows` may contract a product and a sum, since only they serve the private momentum.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from node.optim.layout import CHUNK_SIDE

LANES = 16
"""Lanes of a vector: one AVX-512 register of fp32, and a divisor of every row."""

ROW_BYTES = 4 * CHUNK_SIDE
"""One row of a chunk of fp32 in our own memory."""

Value: TypeAlias = Any
"""An LLVM value while code is emitted; llvmlite has no types."""

_FLOAT, _INT, _SHORT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_BYTE, _POINTER = ir.IntType(8), ir.PointerType()
_CONTRACT = ("contract",)


class _Code:
    """A builder with the few words that the loops below are written in."""

    def __init__(self, builder: Value, features: str) -> None:
        self.builder = builder
        self.features = features

    def at(self, address: Value, offset: Value) -> Value:
        """The pointer `offset` bytes (a number or a value) behind an integer address or a pointer."""
        if address.type == _LONG:
            address = self.builder.inttoptr(address, _POINTER)
        if isinstance(offset, int):
            offset = ir.Constant(_LONG, offset)
        return self.builder.gep(address, [offset], source_etype=_BYTE)

    def load(self, address: Value, offset: Value, kind: Value = _FLOATS) -> Value:
        return self.builder.load(self.at(address, offset), typ=kind, align=_alignment(kind))

    def store(self, value: Value, address: Value, offset: Value) -> None:
        self.builder.store(value, self.at(address, offset), align=_alignment(value.type))

    def prefetch(self, address: Value, offset: Value, near: int = 3) -> None:
        """Ask for the cache line at an address, which need not exist: into the first cache level, or (2) the second."""
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [self.at(address, offset), *(ir.Constant(_INT, hint) for hint in (0, near, 1))])

    def shuffle(self, one: Value, other: Value, lanes: list[int]) -> Value:
        mask = ir.Constant(ir.VectorType(_INT, len(lanes)), [ir.Constant(_INT, lane) for lane in lanes])
        return self.builder.shuffle_vector(one, other, mask)

    def splat(self, value: Value, lanes: int = LANES) -> Value:
        kind = ir.VectorType(value.type, lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INT, 0))
        return self.shuffle(first, first, [0] * lanes)


def _alignment(kind: Value) -> int:
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 4 if element == _FLOAT else element.width // 8


def _same(kind: Value, value: float, lanes: int = LANES) -> Value:
    return ir.Constant(ir.VectorType(kind, lanes), [ir.Constant(kind, value)] * lanes)


def _lee(code: _Code, values: list[Value]) -> list[Value]:
    """The DCT-II without its scale, `sum_n x[n] cos((2n + 1) k pi / 2N)`: 192 products, 513 sums at 64 points.

    B. G. Lee, "A new algorithm to compute the discrete cosine transform", IEEE ASSP 32(6), 1984.
    """
    size = len(values)
    if size == 1:
        return values
    build, half = code.builder, size // 2
    even = [build.fadd(values[n], values[-1 - n], flags=_CONTRACT) for n in range(half)]
    odd = []
    for n in range(half):
        factor = _same(_FLOAT, _fp32(0.5 / math.cos((2 * n + 1) * math.pi / (2 * size))))
        odd.append(build.fmul(build.fsub(values[n], values[-1 - n], flags=_CONTRACT), factor, flags=_CONTRACT))
    even, odd = _lee(code, even), _lee(code, odd)
    summed = [build.fadd(odd[k], odd[k + 1], flags=_CONTRACT) for k in range(half - 1)]
    return [value for pair in zip(even, [*summed, odd[-1]], strict=True) for value in pair]


def _lee_loaded(code: _Code, load: Callable[[int], Value]) -> list[Value]:
    """`_lee` of 64 values in memory, read once for the even half and again for the odd one.

    64 values and their sums are more than there are registers: what is only read needs no place to be put aside.
    """
    build, half, size = code.builder, CHUNK_SIDE // 2, CHUNK_SIDE
    even = _lee(code, [build.fadd(load(n), load(size - 1 - n), flags=_CONTRACT) for n in range(half)])
    build.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)  # so that LLVM does read again
    odd = []
    for n in range(half):
        factor = _same(_FLOAT, _fp32(0.5 / math.cos((2 * n + 1) * math.pi / (2 * size))))
        odd.append(build.fmul(build.fsub(load(n), load(size - 1 - n), flags=_CONTRACT), factor, flags=_CONTRACT))
    odd = _lee(code, odd)
    summed = [build.fadd(odd[k], odd[k + 1], flags=_CONTRACT) for k in range(half - 1)]
    return [value for pair in zip(even, [*summed, odd[-1]], strict=True) for value in pair]


def _fp32(value: float) -> float:
    return float(np.float32(value))


def _transposed(code: _Code, rows: list[Value]) -> list[Value]:
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


def _instruction(*kinds: Value, result: Value = types.void) -> Callable[[Callable[..., Value]], Value]:
    """Turn `emit(code, *values)` into a function that kernels call with arguments of these types."""

    def wrap(emit: Callable[..., Value]) -> Value:
        def codegen(context: Value, builder: Value, _signature: Value, args: Value) -> Value:
            value = emit(_Code(builder, context.codegen().magic_tuple()[2]), *args)
            return context.get_dummy_value() if value is None else value

        def typed(_typing: Value, *_arguments: Value) -> Value:
            return result(*kinds), codegen

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # numba asks it for the arguments
        return intrinsic(typed)

    return wrap


_ADDRESS = types.int64


@_instruction(_ADDRESS, _ADDRESS, types.int64)
def copy(code: _Code, target: Value, source: Value, size: Value) -> None:
    """Copy `size` bytes."""
    cgutils.raw_memcpy(code.builder, code.at(target, 0), code.at(source, 0), size, 1)


@_instruction(_ADDRESS, types.int64)
def clear(code: _Code, target: Value, size: Value) -> None:
    """Zero `size` bytes."""
    cgutils.memset(code.builder, code.at(target, 0), size, 0)


@_instruction(_ADDRESS, result=types.uint8)
def byte_at(code: _Code, address: Value) -> Value:
    """One byte of memory."""
    return code.load(address, 0, _BYTE)


@_instruction(_ADDRESS, types.uint8)
def put_byte(code: _Code, address: Value, value: Value) -> None:
    """Write one byte of memory."""
    code.store(value, address, 0)


@_instruction(_ADDRESS, result=types.int64)
def word_at(code: _Code, address: Value) -> Value:
    """Eight bytes of memory from any address on, the first lowest."""
    return code.builder.load(code.at(address, 0), typ=_LONG, align=1)


@_instruction(_ADDRESS, types.int64)
def put_word(code: _Code, address: Value, value: Value) -> None:
    """The inverse of `word_at`."""
    code.builder.store(value, code.at(address, 0), align=1)


@_instruction(_ADDRESS, types.int64, types.int64, _ADDRESS, _ADDRESS)
def split_words(code: _Code, words: Value, count: Value, width: Value, low: Value, top: Value) -> None:
    """Spread `count` words (a multiple of 16) of eight codes of `width` bits; the codes' top bits go to `top`."""
    build, longs = code.builder, ir.VectorType(_LONG, LANES)
    steps = []
    for apart in (32, 16, 8):
        size = build.mul(width, ir.Constant(_LONG, apart // 8))
        field = build.sub(build.shl(ir.Constant(_LONG, 1), size), ir.Constant(_LONG, 1))
        mask = build.mul(field, ir.Constant(_LONG, sum(1 << start for start in range(0, 64, 2 * apart))))
        shift = build.sub(ir.Constant(_LONG, apart), size)
        high = build.shl(mask, ir.Constant(_LONG, apart))
        steps.append([code.splat(value) for value in (mask, shift, high)])
    place = build.sub(width, ir.Constant(_LONG, 1))
    ones = _same(_LONG, 0x0101010101010101)
    below = build.sub(build.shl(ones, code.splat(place)), ones)
    with cgutils.for_range(build, build.udiv(count, ir.Constant(_LONG, LANES))) as loop:
        line = build.mul(loop.index, ir.Constant(_LONG, 8 * LANES))
        word = build.load(code.at(words, line), typ=longs, align=8)
        for mask, shift, high in steps:
            word = build.or_(build.and_(word, mask), build.and_(build.shl(word, shift), high))
        signs = build.and_(build.lshr(word, code.splat(place)), ones)
        build.store(build.and_(word, below), code.at(low, line), align=1)
        build.store(signs, code.at(top, line), align=1)


@_instruction(types.int64, result=types.int64)
def trailing_zeros(code: _Code, value: Value) -> Value:
    """Zero bits below the lowest one of a value that has one."""
    return code.builder.cttz(value, ir.Constant(ir.IntType(1), 1))


SQUARES_AT_ONCE = 8 * LANES
"""Enough sums beside each other to keep a core from waiting for one."""

SQUARES_AHEAD = 1024
"""How many bytes ahead they are asked for: one core reads 24 GB/s so, 12 without (512 to 8192 were alike)."""


@_instruction(_ADDRESS, types.int64, result=types.float64)
def sum_of_squares(code: _Code, source: Value, rounds: Value) -> Value:
    """Of `rounds` times 128 fp32: each lane of 8 vectors adds its squares in fp32, the lanes are added in fp64."""
    build, zero = code.builder, _same(_FLOAT, 0.0)
    sums = [cgutils.alloca_once_value(build, zero) for _ in range(8)]
    for total in sums:
        build.store(zero, total)
    with cgutils.for_range(build, rounds) as loop:
        line = code.at(source, build.mul(loop.index, ir.Constant(_LONG, 4 * SQUARES_AT_ONCE)))
        for number, total in enumerate(sums):
            code.prefetch(line, SQUARES_AHEAD + number * 4 * LANES)
            value = code.load(line, number * 4 * LANES)
            square = build.fmul(value, value, flags=_CONTRACT)
            build.store(build.fadd(build.load(total, typ=_FLOATS), square, flags=_CONTRACT), total)
    doubles = ir.VectorType(ir.DoubleType(), LANES)
    parts = [build.fpext(build.load(total, typ=_FLOATS), doubles) for total in sums]
    while len(parts) > 1:
        parts = [build.fadd(one, other) for one, other in zip(parts[::2], parts[1::2], strict=True)]
    lanes = [build.extract_element(parts[0], ir.Constant(_INT, lane)) for lane in range(LANES)]
    while len(lanes) > 1:
        lanes = [build.fadd(one, other) for one, other in zip(lanes[::2], lanes[1::2], strict=True)]
    return lanes[0]


@_instruction(_ADDRESS, types.int64, _ADDRESS, _ADDRESS, types.int64)
def forward_columns(
    code: _Code, source: Value, stride: Value, target: Value, coming: Value, coming_stride: Value
) -> None:
    """The DCT (times `sqrt(32)`) of 16 columns of 64 rows `stride` bytes apart, into 16 rows of a chunk.

    64 lines `coming_stride` bytes apart from `coming` on are asked for, one at each store: at once they are more than a
    core can wait for.
    """
    result = _lee_loaded(code, lambda row: code.load(code.at(source, _times(code, stride, row)), 0))
    result[0] = code.builder.fmul(result[0], _same(_FLOAT, _fp32(math.sqrt(0.5))))
    for block in range(0, CHUNK_SIDE, LANES):
        for column, values in enumerate(_transposed(code, result[block : block + LANES])):
            code.prefetch(coming, _times(code, coming_stride, block + column), near=2)
            code.store(values, target, column * ROW_BYTES + 4 * block)


@_instruction(_ADDRESS, _ADDRESS, types.float32, types.float32, _ADDRESS, types.int64)
def forward_rows(
    code: _Code, source: Value, momentum: Value, beta: Value, step: Value, coming: Value, coming_stride: Value
) -> None:
    """`m = beta * m + step * DCT` for 16 rows of a chunk of momentum; `source` is a block of `forward_columns`'.

    The 16 rows at `coming` are asked for.
    """
    build = code.builder
    result = _lee_loaded(code, lambda row: code.load(source, row * ROW_BYTES))
    decay = code.splat(beta)
    scale = code.splat(build.fmul(step, ir.Constant(_FLOAT, 2 / CHUNK_SIDE)))
    first = [ir.Constant(_FLOAT, _fp32(math.sqrt(0.5)) if lane == 0 else 1.0) for lane in range(LANES)]
    for block in range(0, CHUNK_SIDE, LANES):
        scales = build.fmul(scale, ir.Constant(_FLOATS, first)) if block == 0 else scale
        for row, values in enumerate(_transposed(code, result[block : block + LANES])):
            place = row * ROW_BYTES + 4 * block
            kept = build.fmul(decay, code.load(momentum, place), flags=_CONTRACT)
            added = build.fmul(scales, values, flags=_CONTRACT)
            number = block + row
            line = code.at(coming, _times(code, coming_stride, number // 4))
            code.prefetch(line, 4 * LANES * (number % 4), near=2)
            code.store(build.fadd(kept, added, flags=_CONTRACT), momentum, place)


def _times(code: _Code, stride: Value, count: int) -> Value:
    return code.builder.mul(stride, ir.Constant(_LONG, count))


def _largest(group_size: int) -> Value:
    wide = min(CHUNK_SIDE, CHUNK_SIDE * CHUNK_SIDE // group_size)
    halves = CHUNK_SIDE // wide
    apart = max(1, CHUNK_SIDE // group_size)
    vectors = wide // LANES

    def rotated(code: _Code, state: list[Value]) -> list[Value]:
        """Lane j takes the place of lane j + apart: one row on, the same groups lie so many columns to the left."""
        lanes = [(lane + apart) % wide for lane in range(wide)]
        result = []
        for first in range(0, wide, LANES):
            own = lanes[first : first + LANES]
            one, other = own[0] // LANES, own[-1] // LANES
            picked = [lane % LANES + (0 if lane // LANES == one else LANES) for lane in own]
            result.append(code.shuffle(state[one], state[other], picked))
        return result

    def emit(code: _Code, momentum: Value, row: Value, magnitudes: Value, positions: Value) -> None:
        """The largest magnitude of each group (as its bits) and its first position, of rows `row`, `row + apart` ..."""
        build = code.builder
        below = _same(_INT, -1)
        state = [cgutils.alloca_once_value(build, below) for _ in range(2 * vectors)]
        for slot in state:
            build.store(below, slot)
        start = build.add(momentum, build.mul(row, ir.Constant(_LONG, ROW_BYTES)))
        with cgutils.for_range(build, ir.Constant(_LONG, CHUNK_SIDE // apart)) as loop:
            line = build.add(start, build.mul(loop.index, ir.Constant(_LONG, apart * ROW_BYTES)))
            values = [build.load(slot, typ=_INTS) for slot in state]
            for half in range(halves):
                number = build.add(build.mul(loop.index, ir.Constant(_LONG, halves)), ir.Constant(_LONG, half))
                position = code.splat(build.trunc(number, _INT))
                for vector in range(vectors):
                    found = code.load(line, 4 * (half * wide + vector * LANES), _INTS)
                    found = build.and_(found, _same(_INT, 0x7FFFFFFF))
                    larger = build.icmp_signed(">", found, values[vector])
                    values[vector] = build.select(larger, found, values[vector])
                    values[vectors + vector] = build.select(larger, position, values[vectors + vector])
            for slot, value in zip(
                state, rotated(code, values[:vectors]) + rotated(code, values[vectors:]), strict=True
            ):
                build.store(value, slot)
        for vector in range(vectors):
            code.store(build.load(state[vector], typ=_INTS), magnitudes, 4 * LANES * vector)
            code.store(build.load(state[vectors + vector], typ=_INTS), positions, 4 * LANES * vector)

    return _instruction(_ADDRESS, types.int64, _ADDRESS, _ADDRESS)(emit)


largest_8, largest_16, largest_32, largest_64, largest_128 = (_largest(size) for size in (8, 16, 32, 64, 128))


@_instruction(_ADDRESS, _ADDRESS, types.int16)
def add_scaled(code: _Code, target: Value, source: Value, factor: Value) -> None:
    """`target += factor * source` for 64 int16."""
    build = code.builder
    factors = code.splat(factor, 2 * LANES)
    for offset in (0, 4 * LANES):
        product = build.mul(factors, code.load(source, offset, factors.type))
        code.store(build.add(code.load(target, offset, factors.type), product), target, offset)


@_instruction(_ADDRESS, _ADDRESS, _ADDRESS)
def halve_and_pair(code: _Code, one: Value, other: Value, target: Value) -> None:
    """64 int16 of each, halved and rounded half to even, as 64 pairs."""
    build = code.builder
    shorts = ir.VectorType(_SHORT, 2 * LANES)
    bit = _same(_SHORT, 1, 2 * LANES)
    for half in range(2):
        halved = []
        for source in (one, other):
            value = code.load(source, half * 4 * LANES, shorts)
            odd = build.and_(build.ashr(value, bit), bit)
            halved.append(build.ashr(build.add(value, odd), bit))
        lanes = [lane // 2 + lane % 2 * 2 * LANES for lane in range(4 * LANES)]
        code.store(code.shuffle(halved[0], halved[1], lanes[: 2 * LANES]), target, half * 8 * LANES)
        code.store(code.shuffle(halved[0], halved[1], lanes[2 * LANES :]), target, half * 8 * LANES + 4 * LANES)


def _pair_products(code: _Code, pairs: Value, other: Value) -> Value:
    """`a[2n] * b[2n] + a[2n + 1] * b[2n + 1]` of 32 int16 each: 16 int32. One instruction where there is one."""
    build = code.builder
    if "+avx512bw" in code.features:
        kind = ir.FunctionType(_INTS, [pairs.type, pairs.type])
        function = cgutils.get_or_insert_function(build.module, kind, "llvm.x86.avx512.pmaddw.d.512")
        return build.call(function, [pairs, other])
    products = []
    for start in (0, 1):
        lanes = list(range(start, 2 * LANES, 2))
        sides = [build.sext(code.shuffle(side, side, lanes), _INTS) for side in (pairs, other)]
        products.append(build.mul(*sides))
    return build.add(*products)


ROWS_AT_ONCE = 4
"""Rows of the second pass that share each load of the basis: 4 times 4 sums stay in registers."""


@_instruction(_ADDRESS, _ADDRESS, _ADDRESS, types.int64, types.float32, types.float32, _ADDRESS, types.int64)
def turn_rows(
    code: _Code,
    pairs: Value,
    basis: Value,
    target: Value,
    stride: Value,
    factor: Value,
    lr: Value,
    coming: Value,
    coming_stride: Value,
) -> None:
    """The second pass of the exact inverse for 4 rows, and the update of 4 rows of parameters by its signs.

    `pairs` holds int16 [32 pairs, 64 rows, 2] of the first pass, its frequencies in the order of `FREQUENCIES`;
    `basis` int16 [48 vectors, 16 places, 2]. A frequency's parity makes the two halves of a row equal or opposite; so
    with those of the even ones. That leaves 32 sums for the odd frequencies, 16 and 16 for the two kinds of even ones.
    """
    build = code.builder
    zero = _same(_INT, 0)
    sums = [[zero] * 4 for _ in range(ROWS_AT_ONCE)]
    shorts = ir.VectorType(_SHORT, 2 * LANES)
    for pair in range(CHUNK_SIDE // 2):
        # which of a row's four sums (odd, first and second 16 places; 2 mod 4; 0 mod 4), and where the basis lies
        parts = {0: 2 * pair, 1: 2 * pair + 1} if pair < 16 else {2 + (pair - 16) // 8: 16 + pair}
        for part, vector in parts.items():
            weights = code.load(basis, vector * 4 * LANES, shorts)
            for row in range(ROWS_AT_ONCE):
                value = code.splat(code.load(pairs, 4 * (pair * CHUNK_SIDE + row), _INT))
                product = _pair_products(code, weights, build.bitcast(value, shorts))
                sums[row][part] = build.add(sums[row][part], product)
    factors = code.splat(factor)
    down, up = code.splat(build.fneg(lr)), code.splat(lr)
    still = build.fmul(down, _same(_FLOAT, 0.0))
    mirror = list(range(LANES))[::-1]
    for row in range(ROWS_AT_ONCE):
        odd, odd_right, two, four = sums[row]
        even = build.add(four, two)
        even_right = build.sub(four, two)
        even_right = code.shuffle(even_right, even_right, mirror)
        right, far = build.sub(even_right, odd_right), build.sub(even, odd)
        quarters = [build.add(even, odd), build.add(even_right, odd_right)]
        quarters += [code.shuffle(right, right, mirror), code.shuffle(far, far, mirror)]
        line = code.at(target, _times(code, stride, row))
        for number, quarter in enumerate(quarters):
            code.prefetch(code.at(coming, _times(code, coming_stride, row)), 4 * LANES * number)
            place = 4 * LANES * number
            move = build.select(build.icmp_signed(">", quarter, zero), down, still)
            move = build.select(build.icmp_signed("<", quarter, zero), up, move)
            decayed = build.fmul(code.load(line, place), factors)  # rounds; and the sum rounds again
            code.store(build.fadd(decayed, move), line, place)


FREQUENCIES = [*range(1, 64, 2), *range(2, 64, 4), *range(0, 64, 4)]
"""The order of the frequencies in the second pass: odd ones, twice an odd number, the rest."""
