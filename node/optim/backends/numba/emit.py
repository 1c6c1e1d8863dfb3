"""The LLVM instructions of the fused step's inner loops, on vectors of 16 lanes, and the small inner loops themselves.

Each `instruction` here, in `forward` and in `inverse` is one to numba. numba compiles it into the kernels for the present
processor. A vector of 16 is one register with AVX-512, two with AVX2, four with NEON. Addresses are integers, without a check.
Only `forward` and `sum_of_squares` may contract a product and a sum, because they serve private numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from node.optim.exact.orthogonal import SMALLEST
from node.optim.layout import CHUNK_SIDE

LANES = 16
"""Lanes of a vector: one AVX-512 register of fp32, and a divisor of every row."""

ROW_BYTES = 4 * CHUNK_SIDE
"""One row of a chunk of fp32 in our own memory."""

Value: TypeAlias = Any
"""An LLVM value while code is emitted; llvmlite has no types."""

FLOAT, INT, SHORT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
BYTE, _POINTER = ir.IntType(8), ir.PointerType()
CONTRACT = ("contract",)


class CodeBuilder:
    """A builder with the few words that the loops below are written in."""

    def __init__(self, builder: Value, features: str) -> None:
        self.builder = builder
        self.features = features

    def at(self, address: Value, offset: Value) -> Value:
        """The pointer `offset` bytes (a number or a value) behind an integer address or a pointer."""
        if address.type == LONG:
            address = self.builder.inttoptr(address, _POINTER)
        if isinstance(offset, int):
            offset = ir.Constant(LONG, offset)
        return self.builder.gep(address, [offset], source_etype=BYTE)

    def load(self, address: Value, offset: Value, kind: Value = FLOATS) -> Value:
        return self.builder.load(self.at(address, offset), typ=kind, align=_alignment(kind))

    def store(self, value: Value, address: Value, offset: Value) -> None:
        self.builder.store(value, self.at(address, offset), align=_alignment(value.type))

    def prefetch(self, address: Value, offset: Value, near: int = 3) -> None:
        """Ask for the cache line at an address, which need not exist: into the first cache level, or (2) the second."""
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, INT, INT, INT])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [self.at(address, offset), *(ir.Constant(INT, hint) for hint in (0, near, 1))])

    def shuffle(self, one: Value, other: Value, lanes: list[int]) -> Value:
        mask = ir.Constant(ir.VectorType(INT, len(lanes)), [ir.Constant(INT, lane) for lane in lanes])
        return self.builder.shuffle_vector(one, other, mask)

    def splat(self, value: Value, lanes: int = LANES) -> Value:
        kind = ir.VectorType(value.type, lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0))
        return self.shuffle(first, first, [0] * lanes)


def _alignment(kind: Value) -> int:
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 4 if element == FLOAT else element.width // 8


def same(kind: Value, value: float, lanes: int = LANES) -> Value:
    return ir.Constant(ir.VectorType(kind, lanes), [ir.Constant(kind, value)] * lanes)


def times(code: CodeBuilder, stride: Value, count: int) -> Value:
    return code.builder.mul(stride, ir.Constant(LONG, count))


def instruction(*kinds: Value, result: Value = types.void) -> Callable[[Callable[..., Value]], Value]:
    """Turn `emit(code, *values)` into a function that kernels call with arguments of these types."""

    def wrap(emit: Callable[..., Value]) -> Value:
        def codegen(context: Value, builder: Value, _signature: Value, args: Value) -> Value:
            value = emit(CodeBuilder(builder, context.codegen().magic_tuple()[2]), *args)
            return context.get_dummy_value() if value is None else value

        def typed(_typing: Value, *_arguments: Value) -> Value:
            return result(*kinds), codegen

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # numba asks it for the arguments
        return intrinsic(typed)

    return wrap


ADDRESS = types.int64


def pair_products(code: CodeBuilder, pairs: Value, other: Value) -> Value:
    """`a[2n] * b[2n] + a[2n + 1] * b[2n + 1]` of 32 int16 each: 16 int32. One or two instructions where there are such."""
    build = code.builder
    if "+avx512bw" in code.features:
        kind = ir.FunctionType(INTS, [pairs.type, pairs.type])
        function = cgutils.get_or_insert_function(build.module, kind, "llvm.x86.avx512.pmaddw.d.512")
        return build.call(function, [pairs, other])
    if "+avx2" in code.features:
        short, whole = ir.VectorType(SHORT, LANES), ir.VectorType(INT, LANES // 2)
        function = cgutils.get_or_insert_function(
            build.module, ir.FunctionType(whole, [short, short]), "llvm.x86.avx2.pmadd.wd"
        )
        halves = [
            build.call(function, [code.shuffle(side, side, lanes) for side in (pairs, other)])
            for lanes in (list(range(LANES)), list(range(LANES, 2 * LANES)))
        ]
        return code.shuffle(halves[0], halves[1], list(range(LANES)))
    products = []
    for start in (0, 1):
        lanes = list(range(start, 2 * LANES, 2))
        sides = [build.sext(code.shuffle(side, side, lanes), INTS) for side in (pairs, other)]
        products.append(build.mul(*sides))
    return build.add(*products)


_SMALLEST_BITS = int(np.float32(SMALLEST).view(np.int32))


def cut_off(code: CodeBuilder, value: Value) -> Value:
    """Parameters (fp32) below `SMALLEST` become zeros of the same sign: as `orthogonal.cut_off`."""
    build, bits = code.builder, code.builder.bitcast(value, INTS)
    small = build.icmp_signed("<", build.and_(bits, same(INT, 0x7FFFFFFF)), same(INT, _SMALLEST_BITS))
    return build.bitcast(build.select(small, build.and_(bits, same(INT, -(1 << 31))), bits), FLOATS)


def inverse_root(code: CodeBuilder, value: Value) -> Value:
    """1 / sqrt(value) of 16 positive normal fp32: to 14 bits where there is an instruction for it, else in full."""
    build, mask = code.builder, ir.IntType(16)
    if "+avx512f" in code.features:
        kind = ir.FunctionType(FLOATS, [FLOATS, FLOATS, mask])
        function = cgutils.get_or_insert_function(build.module, kind, "llvm.x86.avx512.rsqrt14.ps.512")
        return build.call(function, [value, same(FLOAT, 0.0), ir.Constant(mask, -1)])
    function = cgutils.get_or_insert_function(build.module, ir.FunctionType(FLOATS, [FLOATS]), "llvm.sqrt.v16f32")
    return build.fdiv(same(FLOAT, 1.0), build.call(function, [value]))


@instruction(ADDRESS, ADDRESS, types.int64)
def copy(code: CodeBuilder, target: Value, source: Value, size: Value) -> None:
    """Copy `size` bytes."""
    cgutils.raw_memcpy(code.builder, code.at(target, 0), code.at(source, 0), size, 1)


@instruction(ADDRESS, types.int64)
def clear(code: CodeBuilder, target: Value, size: Value) -> None:
    """Zero `size` bytes."""
    cgutils.memset(code.builder, code.at(target, 0), size, 0)


@instruction(ADDRESS, result=types.uint8)
def byte_at(code: CodeBuilder, address: Value) -> Value:
    """One byte of memory."""
    return code.load(address, 0, BYTE)


@instruction(ADDRESS, types.uint8)
def put_byte(code: CodeBuilder, address: Value, value: Value) -> None:
    """Write one byte of memory."""
    code.store(value, address, 0)


@instruction(ADDRESS, result=types.int64)
def word_at(code: CodeBuilder, address: Value) -> Value:
    """Eight bytes of memory from any address on, the first lowest."""
    return code.builder.load(code.at(address, 0), typ=LONG, align=1)


@instruction(ADDRESS, types.int64)
def put_word(code: CodeBuilder, address: Value, value: Value) -> None:
    """The inverse of `word_at`."""
    code.builder.store(value, code.at(address, 0), align=1)


@instruction(ADDRESS, types.int64, types.int64, ADDRESS, ADDRESS)
def split_words(code: CodeBuilder, words: Value, count: Value, width: Value, low: Value, top: Value) -> None:
    """Spread `count` words (a multiple of 16) of eight codes of `width` bits; the codes' top bits go to `top`."""
    build, longs = code.builder, ir.VectorType(LONG, LANES)
    steps = []
    for apart in (32, 16, 8):
        size = build.mul(width, ir.Constant(LONG, apart // 8))
        field = build.sub(build.shl(ir.Constant(LONG, 1), size), ir.Constant(LONG, 1))
        mask = build.mul(field, ir.Constant(LONG, sum(1 << start for start in range(0, 64, 2 * apart))))
        shift = build.sub(ir.Constant(LONG, apart), size)
        high = build.shl(mask, ir.Constant(LONG, apart))
        steps.append([code.splat(value) for value in (mask, shift, high)])
    place = build.sub(width, ir.Constant(LONG, 1))
    ones = same(LONG, 0x0101010101010101)
    below = build.sub(build.shl(ones, code.splat(place)), ones)
    with cgutils.for_range(build, build.udiv(count, ir.Constant(LONG, LANES))) as loop:
        line = build.mul(loop.index, ir.Constant(LONG, 8 * LANES))
        word = build.load(code.at(words, line), typ=longs, align=8)
        for mask, shift, high in steps:
            word = build.or_(build.and_(word, mask), build.and_(build.shl(word, shift), high))
        signs = build.and_(build.lshr(word, code.splat(place)), ones)
        build.store(build.and_(word, below), code.at(low, line), align=1)
        build.store(signs, code.at(top, line), align=1)


@instruction(ADDRESS, types.int64, result=types.int16)
def not_numbers(code: CodeBuilder, source: Value, count: Value) -> Value:
    """The lanes (bits) in which one of `count` fp32 (a multiple of 16) is NaN."""
    build, lanes = code.builder, ir.VectorType(ir.IntType(1), LANES)
    found = cgutils.alloca_once_value(build, ir.Constant(lanes, [0] * LANES))
    with cgutils.for_range(build, build.udiv(count, ir.Constant(LONG, LANES))) as loop:
        values = code.load(source, build.mul(loop.index, ir.Constant(LONG, 4 * LANES)))
        build.store(build.or_(build.load(found, typ=lanes), build.fcmp_unordered("uno", values, values)), found)
    return build.bitcast(build.load(found, typ=lanes), SHORT)


@instruction(types.int64, result=types.int64)
def trailing_zeros(code: CodeBuilder, value: Value) -> Value:
    """Zero bits below the lowest one of a value that has one."""
    return code.builder.cttz(value, ir.Constant(ir.IntType(1), 1))


SQUARES_AT_ONCE = 8 * LANES
"""Enough sums beside each other to keep a core from waiting for one."""

SQUARES_AHEAD = 1024
"""How many bytes ahead they are asked for: one core reads 24 GB/s so, 12 without (512 to 8192 were alike)."""


@instruction(ADDRESS, types.int64, result=types.float64)
def sum_of_squares(code: CodeBuilder, source: Value, rounds: Value) -> Value:
    """Of `rounds` times 128 fp32: each lane of 8 vectors adds its squares in fp32, the lanes are added in fp64."""
    build, zero = code.builder, same(FLOAT, 0.0)
    sums = [cgutils.alloca_once_value(build, zero) for _ in range(8)]
    for total in sums:
        build.store(zero, total)
    with cgutils.for_range(build, rounds) as loop:
        line = code.at(source, build.mul(loop.index, ir.Constant(LONG, 4 * SQUARES_AT_ONCE)))
        for number, total in enumerate(sums):
            code.prefetch(line, SQUARES_AHEAD + number * 4 * LANES)
            value = code.load(line, number * 4 * LANES)
            square = build.fmul(value, value, flags=CONTRACT)
            build.store(build.fadd(build.load(total, typ=FLOATS), square, flags=CONTRACT), total)
    doubles = ir.VectorType(ir.DoubleType(), LANES)
    parts = [build.fpext(build.load(total, typ=FLOATS), doubles) for total in sums]
    while len(parts) > 1:
        parts = [build.fadd(one, other) for one, other in zip(parts[::2], parts[1::2], strict=True)]
    lanes = [build.extract_element(parts[0], ir.Constant(INT, lane)) for lane in range(LANES)]
    while len(lanes) > 1:
        lanes = [build.fadd(one, other) for one, other in zip(lanes[::2], lanes[1::2], strict=True)]
    return lanes[0]
