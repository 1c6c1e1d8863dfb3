"""The compiled step in plain loops, without LLVM instructions of our own: what ADR 7 compares the instructions with.

For one tensor with sides that 64 divides, and groups of 128. Arrays are flat, and indices cannot be negative: LLVM vectorizes
no loop whose index numba may have to wrap around. Generated lines stand where a loop over an array of sums would keep the
sums in memory. Parameters, and votes of one momentum, have the bits of `node/optim/backends/numba`; momentum is close to them.
"""

import math
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import numpy as np
from numba import njit

SIDE, CHUNK, GROUP, GROUPS = 64, 4096, 128, 32
ROWS_AT_ONCE, FREQUENCIES_AT_ONCE = 4, 4


def _generated(lines: list[str], **settings: Any) -> Any:
    """The function of these lines, compiled when called."""
    space: dict[str, Any] = {"f32": np.float32}
    exec("\n".join(lines), space)
    return njit(nogil=True, error_model="numpy", **settings)(space["made"])


def _lee(values: list[str], names: Iterator[str], lines: list[str]) -> list[str]:
    """As `forward._lee`, in lines of Python."""
    size = len(values)
    if size == 1:
        return values
    even, odd, summed = [], [], []
    for n in range(size // 2):
        factor = float(np.float32(0.5 / math.cos((2 * n + 1) * math.pi / (2 * size))))
        even.append(next(names))
        odd.append(next(names))
        lines.append(f"{even[-1]} = {values[n]} + {values[-1 - n]}")
        lines.append(f"{odd[-1]} = ({values[n]} - {values[-1 - n]}) * f32({factor!r})")
    even, odd = _lee(even, names, lines), _lee(odd, names, lines)
    for one, other in pairwise(odd):
        summed.append(next(names))
        lines.append(f"{summed[-1]} = {one} + {other}")
    return [value for pair in zip(even, [*summed, odd[-1]], strict=True) for value in pair]


def _columns() -> Any:
    """The DCT (times `sqrt(32)`) of the 64 columns of a chunk: one lane each."""
    lines = [f"x{n} = source[{n * SIDE} + lane]" for n in range(SIDE)]
    result = _lee([f"x{n}" for n in range(SIDE)], (f"v{n}" for n in count()), lines)
    lines.append(f"target[lane] = {result[0]} * f32({math.sqrt(0.5)!r})")
    lines += [f"target[{k * SIDE} + lane] = {value}" for k, value in enumerate(result) if k]
    head = ["def made(source, target):", "  for lane in range(64):"]
    return _generated([*head, *(f"    {line}" for line in lines)], fastmath={"contract"})


def _transpose(block: int) -> Any:
    lines = ["def made(source, target):"]
    lines += [f"  for i in range(0, 64, {block}):", f"    for j in range(0, 64, {block}):"]
    pairs = [(row, column) for row in range(block) for column in range(block)]
    lines += [f"      a{row}_{column} = source[(i + {row}) * 64 + j + {column}]" for row, column in pairs]
    lines += [f"      target[(j + {row}) * 64 + i + {column}] = a{column}_{row}" for row, column in pairs]
    return _generated(lines)


def _second_pass() -> Any:
    """The second pass of the exact inverse, in fp32: every partial sum is below 2^24, so no order rounds.

    `y` [64 frequencies, 64 rows], `total` [64 rows, 64]; the bases of odd frequencies, of twice an odd number, of the rest.
    """
    rows, at_once = range(ROWS_AT_ONCE), range(FREQUENCIES_AT_ONCE)
    lines = ["def made(y, odd, two, four, total, sums):", f"  for r in range(0, 64, {ROWS_AT_ONCE}):"]
    lines.append(f"    for k in range({ROWS_AT_ONCE * SIDE}): sums[k] = f32(0)")
    for basis, frequencies, first, apart, width, offset in (
        ("odd", 32, 1, 2, 32, 0), ("two", 16, 2, 4, 16, 32), ("four", 16, 0, 4, 16, 48)
    ):  # fmt: skip
        lines.append(f"    for n in range(0, {frequencies}, {FREQUENCIES_AT_ONCE}):")
        lines += [
            f"      y{i}_{u} = y[(n + {u}) * {apart * 64} + {first * 64} + r + {i}]" for i in rows for u in at_once
        ]
        lines.append(f"      for k in range({width}):")
        lines += [f"        b{u} = {basis}[(n + {u}) * {width} + k]" for u in at_once]
        for i in rows:
            products = " + ".join(f"y{i}_{u} * b{u}" for u in at_once)
            lines.append(f"        sums[{i * 64 + offset} + k] += {products}")
    lines += [
        f"    for q in range({ROWS_AT_ONCE}):",
        "      line, own = total[(r + q) * 64 : (r + q) * 64 + 64], sums[q * 64 : q * 64 + 64]",
        "      for k in range(16):",
        "        even, right = own[48 + k] + own[32 + k], own[48 + k] - own[32 + k]",
        "        line[k], line[63 - k] = even + own[k], even - own[k]",
        "        line[31 - k], line[32 + k] = right + own[31 - k], right - own[31 - k]",
    ]
    return _generated(lines, fastmath={"contract", "reassoc", "nsz"})


columns_dct, transpose, second_pass = _columns(), _transpose(8), _second_pass()


@njit(nogil=True, fastmath={"contract"})
def accumulate(source, own, beta, scale):
    for n in range(CHUNK):
        own[n] = beta * own[n] + scale * source[n]


@njit(nogil=True)
def largest(bits, doubled, magnitudes, positions):
    """As `forward.largest_128`: a row's groups are turned by its number, so each half is laid out twice and read from there."""
    for g in range(GROUPS):
        magnitudes[g] = -1
        positions[g] = 0
    for row in range(SIDE):
        for half in range(2):
            line = bits[row * SIDE + half * 32 : row * SIDE + half * 32 + 32]
            for c in range(32):
                value = line[c] & 0x7FFFFFFF
                doubled[c] = value
                doubled[32 + c] = value
            turned, place = doubled[32 - (row & 31) : 64 - (row & 31)], np.int32(2 * row + half)
            for g in range(GROUPS):
                value, best, at = turned[g], magnitudes[g], positions[g]
                magnitudes[g] = value if value > best else best
                positions[g] = place if value > best else at


@njit(nogil=True)
def vote(gradient, momentum, beta, step, coefficients, packed, taken):
    """As `kernels.vote`, of fp32 `gradient` [rows, columns]: a vote of 128 is a byte."""
    a, b = np.empty(CHUNK, dtype=np.float32), np.empty(CHUNK, dtype=np.float32)
    magnitudes, positions = np.empty(GROUPS, dtype=np.int32), np.empty(GROUPS, dtype=np.int32)
    doubled = np.empty(64, dtype=np.int32)
    across, scale = gradient.shape[1] // SIDE, np.float32(step * np.float32(2 / SIDE))
    for chunk in range(gradient.shape[0] // SIDE * across):
        top, left = chunk // across * SIDE, chunk % across * SIDE
        for row in range(SIDE):
            for column in range(SIDE):
                a[row * SIDE + column] = gradient[top + row, left + column]
        own = momentum[chunk * CHUNK : (chunk + 1) * CHUNK]
        columns_dct(a, b)
        transpose(b, a)
        columns_dct(a, b)
        transpose(b, a)
        accumulate(a, own, beta, scale)
        largest(own.view(np.int32), doubled, magnitudes, positions)
        for group in range(GROUPS):
            place = coefficients[positions[group] * GROUPS + group]
            packed[chunk * GROUPS + group] = positions[group] + GROUP * (own[place] < 0)
            taken[chunk * GROUPS + group] = own[place]
            own[place] = 0.0


@njit(nogil=True)
def find_votes(codes, places, signs):
    """As `inverse.find_votes`, of one peer's 32 votes."""
    for n in range(GROUPS):
        value = np.int32(codes[n])
        slot = (value & (GROUP - 1)) * GROUPS + n
        row, column = slot >> 6, slot & 63
        column = (column & ~31) | ((slot - row) & 31)
        places[n] = np.int16((column << 6) | ((row & 1) << 5) | (row >> 1))
        signs[n] = np.int16(-1 if value >= GROUP else 1)


@njit(nogil=True)
def first_pass(places, signs, sums, columns, basis):
    """As `kernels._add_votes`. int16 `columns` [64, 2 kinds, 32]; `basis` [64, 32], even frequencies first."""
    for n in range(CHUNK):
        columns[n] = 0
    for vote in range(len(places)):
        place, sign = np.int64(places[vote]), signs[vote]
        before = sums[place]
        sums[place] = before + sign
        if -2 <= before * sign < 2:
            target, source = (place >> 5) * 32, (place & 63) * 32
            for k in range(32):
                columns[target + k] += sign * basis[source + k]
    for vote in range(len(places)):
        sums[np.int64(places[vote])] = 0


@njit(nogil=True)
def halve(columns, y):
    """As `inverse.halve_and_pair`, to fp32 `y` [64 frequencies, 64 rows]."""
    for column in range(SIDE):
        for k in range(32):
            even, odd = np.int32(columns[column * SIDE + k]), np.int32(columns[column * SIDE + 32 + k])
            upper, lower = even + odd, even - odd
            y[column * SIDE + k] = np.float32((upper + ((upper >> 1) & 1)) >> 1)
            y[column * SIDE + 63 - k] = np.float32((lower + ((lower >> 1) & 1)) >> 1)


@njit(nogil=True)
def move(line, total, factor, lr):
    down = -lr
    for c in range(SIDE):
        line[c] = line[c] * factor + down * (np.float32(total[c] > 0) - np.float32(total[c] < 0))


@njit(nogil=True)
def apply(parameters, payloads, factor, lr, basis, odd, two, four):
    """As `kernels.apply`, of fp32 `parameters` [rows, columns] and uint8 `payloads` [peers, votes]."""
    peers, across = payloads.shape[0], parameters.shape[1] // SIDE
    places, signs = np.empty(peers * GROUPS, dtype=np.int16), np.empty(peers * GROUPS, dtype=np.int16)
    columns, sums = np.empty(CHUNK, dtype=np.int16), np.zeros(CHUNK, dtype=np.int16)
    y, total = np.empty(CHUNK, dtype=np.float32), np.empty(CHUNK, dtype=np.float32)
    room = np.empty(ROWS_AT_ONCE * SIDE, dtype=np.float32)
    for chunk in range(parameters.shape[0] // SIDE * across):
        top, left = chunk // across * SIDE, chunk % across * SIDE
        for peer in range(peers):
            codes = payloads[peer, chunk * GROUPS : (chunk + 1) * GROUPS]
            find_votes(codes, places[peer * GROUPS :], signs[peer * GROUPS :])
        first_pass(places, signs, sums, columns, basis)
        halve(columns, y)
        second_pass(y, odd, two, four, total, room)
        for row in range(SIDE):
            move(parameters[top + row, left : left + SIDE], total[row * SIDE : row * SIDE + SIDE], factor, lr)


def bases(integer: np.ndarray) -> tuple[np.ndarray, ...]:
    """What `apply` needs of the integer basis, int16 [64 frequencies, 64 places]."""
    left = np.concatenate([integer[::2, :32], integer[1::2, :32]]).reshape(-1)
    parts = (integer[1::2, :32], integer[2::4, :16], integer[0::4, :16])
    return left, *(np.ascontiguousarray(part, dtype=np.float32).reshape(-1) for part in parts)
