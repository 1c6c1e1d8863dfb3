"""Newton-Schulz iterations of one chunk, as LLVM instructions on whole numbers: `orthogonal_chunks` in the same bits.

Matrices of int16 lie as pairs of rows: int16 [32 pairs, 64 columns, 2]. So one instruction multiplies and adds pairs, and
`x^T x` needs no transposed copy. Symmetric products compute blocks on and above the diagonal; the results are mirrored when
they are stored. Replicated, so nothing here may be contracted. ADR 25.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from llvmlite import ir
from numba.core import cgutils, types

from node.optim.backends.numba.emit import (
    ADDRESS,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    LONG,
    ROW_BYTES,
    SHORT,
    CodeBuilder,
    Value,
    cut_off,
    instruction,
    pair_products,
    same,
    times,
)
from node.optim.exact.orthogonal import COEFFICIENTS, ENTRY_MAX, FACTOR_MAX, FACTOR_UNITS, SCALE
from node.optim.layout import CHUNK_SIDE

_CONSTANT = COEFFICIENTS[0]

ROWS_AT_ONCE = 4
"""Rows of a product that share each load of the right factor."""

_WIDE = 4 * LANES
"""Bytes of a vector."""

_PAIRS_AT_ONCE = 2
"""Pairs of rows that the inner loop of a product adds between two jumps."""

_SHORTS = ir.VectorType(SHORT, 2 * LANES)


@instruction(ADDRESS, result=types.float32)
def largest_of(code: CodeBuilder, source: Value) -> Value:
    """The largest magnitude of a chunk of fp32."""
    build = code.builder
    most = [cgutils.alloca_once_value(build, same(FLOAT, 0.0)) for _ in range(4)]
    with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE)) as loop:
        line = code.at(source, build.mul(loop.index, ir.Constant(LONG, ROW_BYTES)))
        for number, slot in enumerate(most):
            value, before = _magnitude(code, code.load(line, number * _WIDE)), build.load(slot, typ=FLOATS)
            build.store(_larger(code, value, before), slot)
    whole = [build.load(slot, typ=FLOATS) for slot in most]
    found = _larger(code, _larger(code, whole[0], whole[1]), _larger(code, whole[2], whole[3]))
    lanes = [build.extract_element(found, ir.Constant(INT, lane)) for lane in range(LANES)]
    while len(lanes) > 1:
        lanes = [_larger(code, one, other) for one, other in zip(lanes[::2], lanes[1::2], strict=True)]
    return lanes[0]


@instruction(ADDRESS, types.float32, ADDRESS, ADDRESS)
def to_whole(code: CodeBuilder, source: Value, scale: Value, rows: Value, pairs: Value) -> None:
    """A chunk of fp32 times `scale`, rounded: int16 by `rows` [64, 64], and as `pairs` of rows."""
    build, factor = code.builder, code.splat(scale)
    with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE // 2)) as loop:
        line = code.at(source, build.mul(loop.index, ir.Constant(LONG, 2 * ROW_BYTES)))
        plain, paired = (
            code.at(target, build.mul(loop.index, ir.Constant(LONG, ROW_BYTES))) for target in (rows, pairs)
        )
        found: list[list[Value]] = []
        for row in range(2):
            values = [code.load(line, row * ROW_BYTES + number * _WIDE) for number in range(4)]
            found.append([_rounded(code, build.fmul(value, factor)) for value in values])
            for half in range(2):
                code.store(
                    _joined(code, *found[row][2 * half : 2 * half + 2]), plain, 2 * CHUNK_SIDE * row + _WIDE * half
                )
        for number in range(4):
            code.store(_paired(code, found[0][number], found[1][number]), paired, number * _WIDE)


@instruction(ADDRESS, result=types.int64)
def largest_square(code: CodeBuilder, pairs: Value) -> Value:
    """The largest sum of the squares of a column, of a matrix of pairs."""
    return _of_columns(code, pairs, "llvm.vector.reduce.smax.v64i32")


@instruction(ADDRESS, result=types.int64)
def all_squares(code: CodeBuilder, pairs: Value) -> Value:
    """The sum of all squares of a matrix of pairs; those of a column are below 2^31."""
    return _of_columns(code, pairs, "llvm.vector.reduce.add.v64i64")


def _of_columns(code: CodeBuilder, pairs: Value, reduced: str) -> Value:
    build = code.builder
    sums = [cgutils.alloca_once_value(build, same(INT, 0)) for _ in range(4)]
    with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE // 2)) as loop:
        line = code.at(pairs, build.mul(loop.index, ir.Constant(LONG, ROW_BYTES)))
        for number, slot in enumerate(sums):
            value = code.load(line, number * _WIDE, _SHORTS)
            build.store(build.add(build.load(slot, typ=INTS), pair_products(code, value, value)), slot)
    whole = [build.load(slot, typ=INTS) for slot in sums]
    halves = [code.shuffle(whole[first], whole[first + 1], list(range(2 * LANES))) for first in (0, 2)]
    columns = code.shuffle(halves[0], halves[1], list(range(4 * LANES)))
    longs = ir.VectorType(LONG, 4 * LANES)
    wide = reduced.endswith("i64")
    columns = build.sext(columns, longs) if wide else columns
    kind = ir.FunctionType(LONG if wide else INT, [columns.type])
    found = build.call(cgutils.get_or_insert_function(build.module, kind, reduced), [columns])
    return found if wide else build.sext(found, LONG)


@instruction(ADDRESS, types.float32, ADDRESS, ADDRESS)
def gram_of(code: CodeBuilder, pairs: Value, less: Value, gram: Value, whole: Value) -> None:
    """`x^T x` of a matrix of pairs: fp32 `gram` on and above the diagonal, and all of it times `less`, rounded, as pairs."""
    build, factor = code.builder, code.splat(less)

    def end(line: Value, sums: list[Value], place: Value) -> list[Value]:
        rounded = []
        for row, total in enumerate(sums):
            value = build.sitofp(total, FLOATS)
            code.store(value, code.at(gram, place), row * ROW_BYTES)
            rounded.append(_rounded(code, build.fmul(value, factor)))
        return rounded

    _symmetric(code, pairs, whole, end)


@instruction(ADDRESS, ADDRESS, types.float32, types.float32, ADDRESS)
def factor_of(code: CodeBuilder, whole: Value, gram: Value, linear: Value, quadratic: Value, factor: Value) -> None:
    """`aI + linear * gram + quadratic * whole^2` in its units, rounded, as pairs; `whole` is symmetric, of pairs."""
    build, one, two = code.builder, code.splat(linear), code.splat(quadratic)
    most = same(FLOAT, float(FACTOR_MAX))

    def end(line: Value, sums: list[Value], place: Value) -> list[Value]:
        rounded = []
        for row, total in enumerate(sums):
            value = build.fmul(code.load(code.at(gram, place), row * ROW_BYTES), one)
            value = build.fadd(value, build.fmul(build.sitofp(total, FLOATS), two))
            added = build.fadd(value, same(FLOAT, _CONSTANT))
            value = build.select(_diagonal(code, line, row), added, value)
            value = _whole(code, build.fmul(value, same(FLOAT, FACTOR_UNITS)))
            value = _larger(code, _smaller(code, value, most), build.fneg(most))
            rounded.append(build.fptosi(value, INTS))
        return rounded

    _symmetric(code, whole, factor, end)


def _diagonal(code: CodeBuilder, line: Value, row: int) -> Value:
    """Which lanes of a row are on the diagonal; `line` is the first row's number less that of the first column."""
    here = code.splat(code.builder.trunc(code.builder.add(line, ir.Constant(LONG, row)), INT))
    return code.builder.icmp_signed("==", here, ir.Constant(INTS, list(range(LANES))))


@instruction(ADDRESS, ADDRESS, types.float32, ADDRESS)
def turn(code: CodeBuilder, rows: Value, factor: Value, root: Value, target: Value) -> None:
    """int16 `rows` [64, 64] times the pairs `factor`, times `root` and cut off at `ENTRY_MAX`: fp32 [64, 64]."""
    build, scale, most = code.builder, code.splat(root), same(FLOAT, ENTRY_MAX)
    with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE // ROWS_AT_ONCE)) as down:
        own = build.mul(down.index, ir.Constant(LONG, ROWS_AT_ONCE * 2 * CHUNK_SIDE))
        line = code.at(target, build.mul(down.index, ir.Constant(LONG, ROWS_AT_ONCE * ROW_BYTES)))
        with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE // LANES)) as across:
            column = build.mul(across.index, ir.Constant(LONG, _WIDE))
            sums = _tile(code, code.at(rows, own), 2 * CHUNK_SIDE, 4, code.at(factor, column))
            for row, total in enumerate(sums):
                value = build.fmul(build.sitofp(total, FLOATS), scale)
                value = _larger(code, _smaller(code, value, most), build.fneg(most))
                code.store(value, code.at(line, column), row * ROW_BYTES)


@instruction(ADDRESS, ADDRESS, types.int64, types.float32, types.float32, types.int64)
def move_rows(
    code: CodeBuilder, source: Value, target: Value, stride: Value, factor: Value, lr: Value, signs: Value
) -> None:
    """`p = p * factor - lr * u` for 64 rows of parameters, with `u` the chunk `source` at its scale, or (`signs`) its signs."""
    build, rate, factors = code.builder, code.splat(lr), code.splat(factor)
    signed = code.splat(build.icmp_signed("!=", signs, ir.Constant(LONG, 0)))
    with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE)) as loop:
        line = code.at(target, build.mul(loop.index, stride))
        own = code.at(source, build.mul(loop.index, ir.Constant(LONG, ROW_BYTES)))
        for number in range(4):
            value = code.load(own, number * _WIDE)
            real = build.fmul(value, same(FLOAT, SCALE))
            move = build.fmul(build.select(signed, _sign(code, value), real), rate)
            decayed = build.fmul(code.load(line, number * _WIDE), factors)
            code.store(cut_off(code, build.fsub(decayed, move)), line, number * _WIDE)


@instruction(ADDRESS, types.int64)
def prefetch_rows(code: CodeBuilder, target: Value, stride: Value) -> None:
    """Ask for a chunk of parameters, into the second cache level."""
    for row, part in product(range(CHUNK_SIDE), range(4)):
        code.prefetch(code.at(target, times(code, stride, row)), part * _WIDE, 2)


def _symmetric(
    code: CodeBuilder, pairs: Value, target: Value, end: Callable[[Value, list[Value], Value], list[Value]]
) -> None:
    """`x^T x` of pairs, in tiles of 4 rows and 16 columns on and above the diagonal; `end` makes whole numbers of the sums.

    `end(line, sums, place)`: the tile's first row less its first column, and the place of the tile in a chunk of fp32.
    The whole numbers go into `target`, as pairs, and mirrored.
    """
    build = code.builder
    high = CHUNK_SIDE // ROWS_AT_ONCE
    with cgutils.for_range(build, ir.Constant(LONG, high)) as down:
        own = build.mul(down.index, ir.Constant(LONG, 4 * ROWS_AT_ONCE))
        block = build.udiv(down.index, ir.Constant(LONG, LANES // ROWS_AT_ONCE))
        with cgutils.for_range(build, build.sub(ir.Constant(LONG, CHUNK_SIDE // LANES), block)) as across:
            number = build.add(block, across.index)
            column = build.mul(number, ir.Constant(LONG, _WIDE))
            sums = _tile(code, code.at(pairs, own), 4, ROW_BYTES, code.at(pairs, column))
            line = build.sub(
                build.mul(down.index, ir.Constant(LONG, ROWS_AT_ONCE)), build.mul(number, ir.Constant(LONG, LANES))
            )
            place = build.add(build.mul(down.index, ir.Constant(LONG, ROWS_AT_ONCE * ROW_BYTES)), column)
            whole = end(line, sums, place)
            upper = code.at(target, build.add(build.mul(down.index, ir.Constant(LONG, 2 * ROW_BYTES)), column))
            for pair in range(ROWS_AT_ONCE // 2):
                code.store(_paired(code, *whole[2 * pair : 2 * pair + 2]), upper, pair * ROW_BYTES)
            with build.if_then(build.icmp_unsigned("!=", across.index, ir.Constant(LONG, 0))):
                lower = build.mul(number, ir.Constant(LONG, LANES // 2 * ROW_BYTES))
                _mirror(code, whole, code.at(target, build.add(lower, own)))


def _mirror(code: CodeBuilder, whole: list[Value], target: Value) -> None:
    """Store the transposed tile as pairs of rows: 8 times 4 columns."""
    build = code.builder
    short = [build.bitcast(build.trunc(row, ir.VectorType(SHORT, LANES)), ir.VectorType(INT, 8)) for row in whole]
    halves = [code.shuffle(short[first], short[first + 1], list(range(16))) for first in (0, 2)]
    for pair in range(LANES // 2):
        lanes = [pair, 8 + pair, 16 + pair, 24 + pair]
        code.store(code.shuffle(halves[0], halves[1], lanes), target, pair * ROW_BYTES)


def _tile(code: CodeBuilder, left: Value, row_bytes: int, pair_bytes: int, right: Value) -> list[Value]:
    """Sums of 4 rows and 16 columns over the 32 pairs. The left factor's pairs stand `row_bytes` and `pair_bytes` apart."""
    build = code.builder
    sums = [cgutils.alloca_once_value(build, same(INT, 0)) for _ in range(ROWS_AT_ONCE)]
    for slot in sums:
        build.store(same(INT, 0), slot)
    with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE // 2 // _PAIRS_AT_ONCE)) as loop:
        ours = code.at(left, build.mul(loop.index, ir.Constant(LONG, _PAIRS_AT_ONCE * pair_bytes)))
        theirs = code.at(right, build.mul(loop.index, ir.Constant(LONG, _PAIRS_AT_ONCE * ROW_BYTES)))
        found = [build.load(slot, typ=INTS) for slot in sums]
        for pair in range(_PAIRS_AT_ONCE):
            other = code.load(theirs, pair * ROW_BYTES, _SHORTS)
            for row in range(ROWS_AT_ONCE):
                one = code.splat(code.load(ours, row * row_bytes + pair * pair_bytes, INT))
                found[row] = build.add(found[row], pair_products(code, other, build.bitcast(one, _SHORTS)))
        for slot, total in zip(sums, found, strict=True):
            build.store(total, slot)
    return [build.load(slot, typ=INTS) for slot in sums]


def _magnitude(code: CodeBuilder, value: Value) -> Value:
    whole = code.builder.bitcast(value, INTS)
    return code.builder.bitcast(code.builder.and_(whole, same(INT, 0x7FFFFFFF)), FLOATS)


def _larger(code: CodeBuilder, one: Value, other: Value) -> Value:
    return code.builder.select(code.builder.fcmp_ordered(">", one, other), one, other)


def _smaller(code: CodeBuilder, one: Value, other: Value) -> Value:
    return code.builder.select(code.builder.fcmp_ordered("<", one, other), one, other)


def _sign(code: CodeBuilder, value: Value) -> Value:
    """-1, 0 or 1."""
    build, zero = code.builder, same(FLOAT, 0.0)
    below = build.select(build.fcmp_ordered("<", value, zero), same(FLOAT, -1.0), zero)
    return build.select(build.fcmp_ordered(">", value, zero), same(FLOAT, 1.0), below)


def _whole(code: CodeBuilder, value: Value) -> Value:
    """fp32 rounded to whole numbers, half to even."""
    kind = ir.FunctionType(FLOATS, [FLOATS])
    function = cgutils.get_or_insert_function(code.builder.module, kind, "llvm.roundeven.v16f32")
    return code.builder.call(function, [value])


def _rounded(code: CodeBuilder, value: Value) -> Value:
    return code.builder.fptosi(_whole(code, value), INTS)


def _joined(code: CodeBuilder, one: Value, other: Value) -> Value:
    """Two vectors of small int32 one after the other, as int16."""
    whole = code.shuffle(one, other, list(range(2 * LANES)))
    return code.builder.trunc(whole, _SHORTS)


def _paired(code: CodeBuilder, one: Value, other: Value) -> Value:
    """Small int32 of two rows as pairs of int16."""
    build = code.builder
    return build.or_(build.and_(one, same(INT, 0xFFFF)), build.shl(other, same(INT, 16)))
