"""The exact inverse and the update of the parameters, as LLVM instructions on whole numbers.

Replicated: the same bits as the portable path gives (`transforms.inverse_exact`), so nothing here may be contracted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from node.optim.backends.numba.emit import (
    ADDRESS,
    BYTE,
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
from node.optim.exact.transforms import VOTE_SUM_MAX
from node.optim.layout import CHUNK_SIDE

VOTES_AT_ONCE = 2 * LANES
"""Votes in a vector of int16, and a divisor of any peer's votes for a chunk."""

HALF_SIDE = CHUNK_SIDE // 2
HALF_ROW_BYTES = 2 * CHUNK_SIDE
"""A row of int16; or half a row of fp32, or 32 int16 of each of two kinds."""

_SHORTS = ir.VectorType(SHORT, VOTES_AT_ONCE)

FREQUENCIES = [*range(1, 64, 2), *range(2, 64, 4), *range(0, 64, 4)]
"""The order of the frequencies in the second pass: odd ones, twice an odd number, the rest."""


def _shorts(value: int) -> Value:
    return same(SHORT, value, VOTES_AT_ONCE)


@instruction(ADDRESS, types.int64, ADDRESS, types.int64)
def find_votes(code: CodeBuilder, codes: Value, group_size: Value, places: Value, apart: Value) -> None:
    """The places of one peer's votes for a chunk, int16 `places`, and their signs (1 and -1), `apart` bytes behind the places.

    `codes` holds a vote a byte. A place is `64 * column + 32 * (row % 2) + row // 2`.
    """
    build = code.builder
    groups = build.udiv(ir.Constant(LONG, CHUNK_SIDE * CHUNK_SIDE), group_size)
    below = code.splat(build.trunc(build.sub(group_size, ir.Constant(LONG, 1)), SHORT), VOTES_AT_ONCE)
    count = ir.Constant(_SHORTS, list(range(VOTES_AT_ONCE)))
    with cgutils.for_range(build, build.udiv(groups, ir.Constant(LONG, VOTES_AT_ONCE))) as loop:
        first = build.mul(loop.index, ir.Constant(LONG, VOTES_AT_ONCE))
        value = build.zext(code.load(codes, first, ir.VectorType(BYTE, VOTES_AT_ONCE)), _SHORTS)
        group = build.add(count, code.splat(build.trunc(first, SHORT), VOTES_AT_ONCE))
        position = build.mul(build.and_(value, below), code.splat(build.trunc(groups, SHORT), VOTES_AT_ONCE))
        sign = build.select(build.icmp_unsigned(">", value, below), _shorts(-1), _shorts(1))
        line = code.at(places, build.mul(first, ir.Constant(LONG, 2)))
        code.store(_place(code, build.add(position, group), groups), line, 0)
        code.store(sign, line, apart)


def _place(code: CodeBuilder, slot: Value, groups: Value) -> Value:
    """The place of `votes.coefficients[slot]`: in its row, a slot's column is turned within `wide` columns."""
    build, side = code.builder, ir.Constant(LONG, CHUNK_SIDE)
    wide = build.select(build.icmp_signed("<", groups, side), groups, side)
    within = code.splat(build.trunc(build.sub(wide, ir.Constant(LONG, 1)), SHORT), VOTES_AT_ONCE)
    row, column = build.lshr(slot, _shorts(6)), build.and_(slot, _shorts(CHUNK_SIDE - 1))
    column = build.or_(build.and_(column, build.not_(within)), build.and_(build.sub(slot, row), within))
    of_kind = build.or_(build.shl(build.and_(row, _shorts(1)), _shorts(5)), build.lshr(row, _shorts(1)))
    return build.or_(build.shl(column, _shorts(6)), of_kind)


@instruction(ADDRESS, types.int64)
def find_moves(code: CodeBuilder, ballots: Value, count: Value) -> None:
    """The change that each of `count` votes makes in the first pass, and its place: offsets in bytes.

    `ballots` int16 [4, count] holds places, signs, and the sums before each vote. The offsets in `multiples` (see
    `kernels.apply`) replace these sums. The last row gets the offsets in the columns. A vote beyond the cap changes nothing.
    """
    build = code.builder
    size = build.mul(count, ir.Constant(LONG, 2))
    places, signs, sources, targets = (code.at(ballots, build.mul(size, ir.Constant(LONG, row))) for row in range(4))
    with cgutils.for_range(build, build.udiv(count, ir.Constant(LONG, VOTES_AT_ONCE))) as loop:
        line = build.mul(loop.index, ir.Constant(LONG, 2 * VOTES_AT_ONCE))
        place, sign, before = (code.load(address, line, _SHORTS) for address in (places, signs, sources))
        along = build.mul(before, sign)
        within = build.and_(
            build.icmp_signed("<", along, _shorts(VOTE_SUM_MAX)), build.icmp_signed(">=", along, _shorts(-VOTE_SUM_MAX))
        )
        table = build.shl(build.select(within, sign, _shorts(0)), _shorts(12))
        row = build.shl(build.and_(place, _shorts(CHUNK_SIDE - 1)), _shorts(6))
        code.store(build.add(table, row), sources, line)
        code.store(build.shl(build.lshr(place, _shorts(5)), _shorts(6)), targets, line)


@instruction(ADDRESS, ADDRESS, types.int64)
def add_row_times(code: CodeBuilder, target: Value, source: Value, factor: Value) -> None:
    """`target += factor * source` for 32 int16; `factor` fits in one, too."""
    many = code.splat(code.builder.trunc(factor, SHORT), VOTES_AT_ONCE)
    product = code.builder.mul(many, code.load(source, 0, _SHORTS))
    code.store(code.builder.add(code.load(target, 0, _SHORTS), product), target, 0)


@instruction(ADDRESS, types.int64, ADDRESS, ADDRESS, ADDRESS)
def turn_all(code: CodeBuilder, sums: Value, cap: Value, basis: Value, columns: Value, beyond: Value) -> None:
    """The first pass of a chunk with votes nearly everywhere: int16 `sums` [4096] by place, capped in place, to `columns`.

    `basis` int16 [2 kinds, 16 pairs, 32, 2]: `all_basis`. `columns` as `pair` reads them, int16. Numbers of int32 [16] `beyond`
    become others than zero if a sum or a difference that `pair` makes is beyond int16: `columns` then has no meaning.
    """
    build, half = code.builder, 2 * LANES
    most = code.splat(build.trunc(cap, SHORT), VOTES_AT_ONCE)
    code.store(same(INT, 0), beyond, 0)
    with cgutils.for_range(build, ir.Constant(LONG, CHUNK_SIDE)) as loop:
        begin = build.mul(loop.index, ir.Constant(LONG, HALF_ROW_BYTES))
        source, target = code.at(sums, begin), code.at(columns, begin)
        kinds: list[list[Value]] = []
        for kind in range(2):
            line = code.at(source, kind * CHUNK_SIDE)
            given = code.load(line, 0, _SHORTS)
            low = build.select(build.icmp_signed(">", given, most), most, given)
            least = build.sub(_shorts(0), most)
            code.store(build.select(build.icmp_signed("<", low, least), least, low), line, 0)
            found = [same(INT, 0), same(INT, 0)]
            for number in range(HALF_SIDE // 2):
                value = build.bitcast(code.splat(code.load(line, 4 * number, INT)), _SHORTS)
                for part in range(2):
                    place = ((kind * HALF_SIDE // 2 + number) * 2 + part) * 4 * LANES
                    product = pair_products(code, code.load(basis, place, _SHORTS), value)
                    found[part] = build.add(found[part], product)
            kinds.append(found)
            for part in range(2):
                short = build.trunc(found[part], ir.VectorType(SHORT, LANES))
                code.store(short, target, kind * CHUNK_SIDE + part * half)
        high = code.load(beyond, 0, INTS)
        for even, odd in zip(*kinds, strict=True):
            for whole in (build.add(even, odd), build.sub(even, odd)):
                high = build.or_(high, build.and_(build.add(whole, same(INT, 1 << 15)), same(INT, -(1 << 16))))
        code.store(high, beyond, 0)


def all_basis(rows: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """The halved basis, int16 [64 = 2 kinds of 32 rows, 32], as `turn_all` reads it."""
    pairs = rows.reshape(2, HALF_SIDE // 2, 2, HALF_SIDE)
    return np.ascontiguousarray(pairs.transpose(0, 1, 3, 2))


@instruction(ADDRESS, ADDRESS, types.int64)
def add_signs(code: CodeBuilder, totals: Value, signs: Value, count: Value) -> None:
    """Add `count` votes (a multiple of 32), one bit each from the address `signs` on, to int16 `totals`: 1 is negative."""
    build, bits = code.builder, ir.VectorType(ir.IntType(1), VOTES_AT_ONCE)
    with cgutils.for_range(build, build.udiv(count, ir.Constant(LONG, VOTES_AT_ONCE))) as loop:
        word = build.load(code.at(signs, build.mul(loop.index, ir.Constant(LONG, 4))), typ=INT, align=1)
        negative = build.sext(build.bitcast(word, bits), _SHORTS)
        line = code.at(totals, build.mul(loop.index, ir.Constant(LONG, 2 * VOTES_AT_ONCE)))
        said = build.or_(build.shl(negative, _shorts(1)), _shorts(1))
        code.store(build.add(code.load(line, 0, _SHORTS), said), line, 0)


@instruction(ADDRESS, ADDRESS, types.float32, types.float32)
def move_row(code: CodeBuilder, totals: Value, target: Value, factor: Value, lr: Value) -> None:
    """The update of a row of 64 parameters by the signs of int32 `totals` [64], with the bits of `turn_rows`."""
    build, down, factors = code.builder, code.splat(code.builder.fneg(lr)), code.splat(factor)
    for place in range(0, ROW_BYTES, 4 * LANES):
        decayed = build.fmul(code.load(target, place), factors)
        moved = build.fadd(decayed, _move(code, code.load(totals, place, INTS), down))
        code.store(cut_off(code, moved), target, place)


@instruction(ADDRESS, ADDRESS)
def add_row(code: CodeBuilder, target: Value, source: Value) -> None:
    """`target += source` for 32 int16."""
    total = code.builder.add(code.load(target, 0, _SHORTS), code.load(source, 0, _SHORTS))
    code.store(total, target, 0)


@instruction(ADDRESS, ADDRESS)
def pair(code: CodeBuilder, columns: Value, target: Value) -> None:
    """As `halve_and_pair`, not halved: for a basis whose first pass is not rounded."""
    _paired(code, columns, target, lambda value: value)


@instruction(ADDRESS, ADDRESS)
def halve_and_pair(code: CodeBuilder, columns: Value, target: Value) -> None:
    """The end of the first pass: int16 [64 columns, 2 kinds, 32 places] to [32 pairs, 64 places, 2], halved half to even.

    The kinds are the parts of even and of odd frequencies. The sum of the two kinds is a column's upper half. The difference
    is the lower half, last place first. Pairs are of columns in the order of `FREQUENCIES`.
    """
    _paired(code, columns, target, lambda value: _halved(code, value))


def _paired(code: CodeBuilder, columns: Value, target: Value, finished: Callable[[Value], Value]) -> None:
    build, half = code.builder, 2 * VOTES_AT_ONCE
    for pair in range(HALF_SIDE):
        upper, lower = [], []
        for column in FREQUENCIES[2 * pair : 2 * pair + 2]:
            even, odd = (code.load(columns, column * HALF_ROW_BYTES + kind * half, _SHORTS) for kind in (0, 1))
            upper.append(finished(build.add(even, odd)))
            lower.append(finished(build.sub(even, odd)))
        places = [*range(HALF_SIDE), *range(HALF_SIDE)[::-1]]
        for first in range(0, CHUNK_SIDE, LANES):
            lanes = [lane for place in places[first : first + LANES] for lane in (place, VOTES_AT_ONCE + place)]
            one, other = upper if first < HALF_SIDE else lower
            code.store(code.shuffle(one, other, lanes), target, pair * ROW_BYTES + 4 * first)


def _halved(code: CodeBuilder, value: Value) -> Value:
    """32 int16 divided by two, half to even."""
    build = code.builder
    odd = build.and_(build.ashr(value, _shorts(1)), _shorts(1))
    return build.ashr(build.add(value, odd), _shorts(1))


ROWS_AT_ONCE = 4
"""Rows of the second pass that share each load of the basis: 4 times 4 sums stay in registers."""


@instruction(ADDRESS, ADDRESS, ADDRESS, types.int64, types.float32, types.float32, ADDRESS, types.int64)
def turn_rows(
    code: CodeBuilder,
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

    `pairs` holds int16 [32 pairs, 64 rows, 2] of the first pass, its frequencies in the order of `FREQUENCIES`. `basis` is
    int16 [48 vectors, 16 places, 2]. A frequency's parity makes the two halves of a row equal or opposite; so
    with those of the even ones. This leaves 32 sums for the odd frequencies, 16 and 16 for the two kinds of even ones.
    """
    build = code.builder
    sums = _row_sums(code, pairs, basis)
    down, factors = code.splat(build.fneg(lr)), code.splat(factor)
    for row in range(ROWS_AT_ONCE):
        line, ahead = code.at(target, times(code, stride, row)), code.at(coming, times(code, coming_stride, row))
        for number, quarter in enumerate(_quarters(code, *sums[row])):
            place = 4 * LANES * number
            code.prefetch(ahead, place)
            decayed = build.fmul(code.load(line, place), factors)  # rounds; and the sum rounds again
            code.store(cut_off(code, build.fadd(decayed, _move(code, quarter, down))), line, place)


@instruction(ADDRESS, ADDRESS, ADDRESS)
def write_rows(code: CodeBuilder, pairs: Value, basis: Value, target: Value) -> None:
    """As `turn_rows`, without the update: 4 rows of the inverse as fp32, exact."""
    for row, sums in enumerate(_row_sums(code, pairs, basis)):
        for number, quarter in enumerate(_quarters(code, *sums)):
            code.store(code.builder.sitofp(quarter, FLOATS), target, row * ROW_BYTES + 4 * LANES * number)


def _row_sums(code: CodeBuilder, pairs: Value, basis: Value) -> list[list[Value]]:
    """The sums of 4 rows by kinds of frequencies, see `turn_rows`."""
    build = code.builder
    sums = [[same(INT, 0)] * 4 for _ in range(ROWS_AT_ONCE)]
    for pair in range(CHUNK_SIDE // 2):
        # which of a row's four sums (odd, first and second 16 places; 2 mod 4; 0 mod 4), and where the basis lies
        parts = {0: 2 * pair, 1: 2 * pair + 1} if pair < 16 else {2 + (pair - 16) // 8: 16 + pair}
        for part, vector in parts.items():
            weights = code.load(basis, vector * 4 * LANES, _SHORTS)
            for row in range(ROWS_AT_ONCE):
                value = code.splat(code.load(pairs, 4 * (pair * CHUNK_SIDE + row), INT))
                product = pair_products(code, weights, build.bitcast(value, _SHORTS))
                sums[row][part] = build.add(sums[row][part], product)
    return sums


def _quarters(code: CodeBuilder, odd: Value, odd_right: Value, two: Value, four: Value) -> list[Value]:
    """A row's 64 sums in order, from those of each kind of frequencies."""
    build, mirror = code.builder, list(range(LANES))[::-1]
    even, even_right = build.add(four, two), build.sub(four, two)
    even_right = code.shuffle(even_right, even_right, mirror)
    right, far = build.sub(even_right, odd_right), build.sub(even, odd)
    left = [build.add(even, odd), build.add(even_right, odd_right)]
    return [*left, code.shuffle(right, right, mirror), code.shuffle(far, far, mirror)]


def _move(code: CodeBuilder, total: Value, down: Value) -> Value:
    """`-lr * sign(total)`, from `down`, which is -lr: with the sign of the total turned, and its own zero for zero."""
    build = code.builder
    sign = build.and_(total, same(INT, -(1 << 31)))
    moved = build.bitcast(build.xor(build.bitcast(down, INTS), sign), FLOATS)
    still = build.fmul(down, same(FLOAT, 0.0))
    return build.select(build.icmp_signed("==", total, same(INT, 0)), still, moved)
