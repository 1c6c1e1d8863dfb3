"""The fused step over a range of chunks. Each kernel leaves the interpreter's lock alone, so that threads share a step.

Importing this compiles nothing. A kernel is compiled when first called and kept beside this file, or in the user's cache
folder where this one cannot be written. `scratch` is memory for one thread; `tensors` are addresses of fp32 tensors, 0 for
one that counts as zeros.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
from numba import njit

from node.optim.backends.numba import emit, forward, inverse, newton
from node.optim.exact import orthogonal
from node.optim.exact.orthogonal import COEFFICIENTS, FACTOR_UNITS, GRAM_MIN, LARGEST_MIN, SMALLEST, WHOLE_EXPONENT

_CHUNK, _SIDE = 4096, 64
_ROW, _HALF_ROW = 256, 128
"""Bytes in a row of 64 fp32, and of 64 int16."""
_, _LINEAR, _QUADRATIC = COEFFICIENTS


@njit(nogil=True)
def _power(value):
    """The power of two that brings a positive number to between 2^11 and 2^12."""
    _, exponent = math.frexp(value)
    return math.ldexp(1.0, WHOLE_EXPONENT + 1 - exponent)


@njit(nogil=True)
def orthogonalise(x, gram, rows, pairs, whole, factor, iterations):
    """`orthogonal.orthogonal_chunks` without its scale, of the fp32 chunk at the address `x`, in place.

    The other addresses are room for fp32 `gram` and `rows`, `pairs`, `whole` and `factor` of int16, all of them 64 by 64.
    """
    peak = np.float64(newton.largest_of(x))
    if peak < SMALLEST:
        emit.clear(x, 4 * _CHUNK)
        return
    for number in range(iterations):
        if number:
            peak = max(np.float64(newton.largest_of(x)), LARGEST_MIN)
        scale = _power(peak)
        newton.to_whole(x, np.float32(scale), rows, pairs)
        less = _power(max(np.float64(np.float32(newton.largest_square(pairs))), GRAM_MIN))
        newton.gram_of(pairs, np.float32(less), gram, whole)
        if number:
            root = 1.0 / scale
            unit = root * root / less
        else:
            unit = 1.0 / math.sqrt(max(np.float64(newton.all_squares(whole)), 1.0))
            root = math.sqrt(unit * less)
        newton.factor_of(whole, gram, np.float32(unit * less * _LINEAR), np.float32(unit * unit * _QUADRATIC), factor)
        newton.turn(rows, factor, np.float32(root / FACTOR_UNITS), x)


@njit(nogil=True)
def move_map(buffer, halved, basis, target, stride, factor, lr, iterations, signs):
    """The second pass of a chunk that is made orthogonal, and its update. `halved` is what `halve_and_pair` has written."""
    newton.prefetch_rows(target, stride)
    rows, x, whole = buffer + 4 * _CHUNK, buffer + 8 * _CHUNK, buffer + 12 * _CHUNK
    for row in range(0, _SIDE, inverse.ROWS_AT_ONCE):
        inverse.write_rows(halved + 4 * row, basis, x + row * _ROW)
    orthogonalise(x, buffer, rows, rows + 2 * _CHUNK, whole, whole + 2 * _CHUNK, iterations)
    newton.move_rows(x, target, stride, factor, lr, signs)


_COLUMNS = 64
"""Bytes in 16 columns."""

_ROWS_AHEAD = 16
"""How far ahead rows of parameters are asked for."""

SCRATCH_BYTES = 16 * _CHUNK
"""Bytes of memory that a kernel needs for itself, from a multiple of 64 bytes on."""

_GROUPS_MAX = 512
"""Votes that a peer has for a chunk at the smallest group size."""

_PARTS = (emit, forward, inverse, newton, orthogonal)
_FILES = [*(str(part.__file__) for part in _PARTS), __file__, str(Path(__file__).with_name("momentum_kernels.py"))]
_EMITTED = hashlib.sha256(b"".join(Path(name).read_bytes() for name in _FILES)).hexdigest()[:16]
"""Numba's cache looks at a function's file and name; so the name says what else is compiled in."""


def kernel(function):
    """Compile when called, and keep it where numba finds a folder that can be written; else compile in each process."""
    function.__qualname__ += f"_{_EMITTED}"
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


@njit(nogil=True)
def _visit_pool(plan, tensors, chunk, buffer, write):
    """Copy a chunk of the pool between the tensors and `buffer` (an address), padding it with zeros; to no address nothing."""
    core, strips, first_strips = plan
    number = chunk - core.shape[0]
    begin = number * _CHUNK
    place, end = begin, min(begin + _CHUNK, strips[-1, 5])
    strip = first_strips[number]
    while place < end:
        if place == strips[strip, 5]:
            strip += 1
        row, column = divmod(place - strips[strip, 4], strips[strip, 3])
        count = min(strips[strip, 3] - column, end - place)
        own = buffer + 4 * (place - begin)
        base = tensors[strips[strip, 0]]
        outer = base + strips[strip, 1] + row * strips[strip, 2] + 4 * column
        if base == 0:
            if not write:
                emit.clear(own, 4 * count)
        elif write:
            emit.copy(outer, own, 4 * count)
        else:
            emit.copy(own, outer, 4 * count)
        place += count
    if not write:
        emit.clear(buffer + 4 * (end - begin), 4 * (begin + _CHUNK - end))


@njit(nogil=True)
def _find(plan, tensors, chunk, buffer):
    """The address of a chunk's rows and their distance in bytes: in the chunk's tensor, or gathered in `buffer`."""
    core = plan[0]
    if chunk >= core.shape[0]:
        _visit_pool(plan, tensors, chunk, buffer, False)
        return buffer, _ROW
    base = tensors[core[chunk, 0]]
    if base == 0:
        emit.clear(buffer, 4 * _CHUNK)
        return buffer, _ROW
    return base + core[chunk, 1], core[chunk, 2]


@kernel
def square_sums(first, last, scratch, blocks, tensors, out):
    """The sum of squares of each block of the gradients (int64 [n, 3]: tensor, offset, elements), into fp64 `out` [n]."""
    buffer, size = scratch.ctypes.data, 4 * emit.SQUARES_AT_ONCE
    for block in range(first, last):
        base = tensors[blocks[block, 0]]
        out[block] = 0.0
        if base:
            rounds, rest = divmod(4 * blocks[block, 2], size)
            source = base + blocks[block, 1]
            emit.clear(buffer, size)
            emit.copy(buffer, source + rounds * size, rest)
            out[block] = emit.sum_of_squares(source, rounds) + emit.sum_of_squares(buffer, 1)


@njit(nogil=True)
def _next(plan, tensors, chunk, last, fallback):
    """The address of the next chunk's rows, if the chunk lies in a core; else `fallback`, which is in the cache already."""
    core = plan[0]
    if chunk + 1 < min(last, core.shape[0]):
        base = tensors[core[chunk + 1, 0]]
        if base:
            return base + core[chunk + 1, 1], core[chunk + 1, 2]
    return fallback, _ROW


@njit(nogil=True)
def _read(payload, group_size, codes):
    """The address of one chunk's votes, a byte each: where they are if they lie so, else uint8 `codes`."""
    if group_size == 128:
        return payload
    width = 1
    while 1 << width <= group_size:
        width += 1
    word, filled = 0, 0
    for group in range(_CHUNK // group_size):
        if filled < width:
            word |= np.int64(emit.byte_at(payload)) << filled
            payload += 1
            filled += 8
        codes[group] = word & ((1 << width) - 1)
        word >>= width
        filled -= width
    return codes.ctypes.data


@njit(nogil=True)
def _hush(silent, signs):
    """Zero the int16 `signs` [groups] of silent votes, whose bits are at the address `silent`."""
    for byte in range(len(signs) // 8):
        bits = np.int64(emit.byte_at(silent + byte))
        while bits:
            signs[8 * byte + emit.trailing_zeros(bits)] = 0
            bits &= bits - 1


@njit(nogil=True)
def _find_votes(chunk, ballots, codes, votes):
    """Places and signs of all ballots' votes for `chunk` into int16 `votes` [4, count], see `inverse.find_moves`.

    The sign of a silent vote is 0: it changes no sum, and adds a row of zeros.
    """
    begin, first = votes.ctypes.data, 0
    for ballot in range(ballots.shape[0]):
        size = ballots[ballot, 0]
        payload = ballots[ballot, 1] + chunk * ballots[ballot, 2]
        inverse.find_votes(_read(payload, size, codes), size, begin, 2 * votes.shape[1])
        if ballots[ballot, 3]:
            _hush(ballots[ballot, 3] + chunk * (_CHUNK // size // 8), votes[1, first : first + _CHUNK // size])
        begin += 2 * (_CHUNK // size)
        first += _CHUNK // size


@njit(nogil=True)
def _add_votes(votes, sums, columns, multiples):
    """The first pass: votes are added one by one to the transform of the columns, as `inverse.halve_and_pair` wants it.

    A vote changes a capped sum by -1, 0 or 1: so many times a row of the basis is added. No branch depends on a vote:
    processors guess those wrong. int16 `sums` [4096] are zeros before and after.
    """
    for vote in range(votes.shape[1]):
        place = np.uint64(votes[0, vote])
        votes[2, vote] = sums[place]
        sums[place] += votes[1, vote]
    inverse.find_moves(votes.ctypes.data, votes.shape[1])
    emit.clear(columns, 2 * _CHUNK)
    for vote in range(votes.shape[1]):
        inverse.add_row(columns + np.int64(votes[3, vote]), multiples + np.int64(votes[2, vote]))
        sums[np.uint64(votes[0, vote])] = 0


@kernel
def apply(first, last, scratch, plan, tensors, ballots, factor, lr, multiples, second, maps, iterations, signs):
    """`p = p * factor - lr * direction` for the parameters.

    Chunks that are marked in uint8 `maps` are made orthogonal, in so many `iterations`; only their signs count with `signs`.

    `ballots` int64 [n, 4]: group size, address, bytes a chunk, and the address of the bits of silent votes or 0. `multiples`
    int16 [3, 64, 32]: -1, 0 and 1 times the left half of the integer basis, even frequencies first. `second`: the basis as
    `inverse.turn_rows` takes it.
    """
    buffer = scratch.ctypes.data
    columns = buffer + 4 * _CHUNK
    pairs = columns + 2 * _CHUNK
    once, e2 = multiples.ctypes.data + _SIDE * _COLUMNS, second.ctypes.data
    count = 0
    for ballot in range(ballots.shape[0]):
        count += _CHUNK // ballots[ballot, 0]
    votes, codes = np.empty((4, count), dtype=np.int16), np.empty(_GROUPS_MAX, dtype=np.uint8)
    sums = np.zeros(_CHUNK, dtype=np.int16)
    for chunk in range(first, last):
        _find_votes(chunk, ballots, codes, votes)
        _add_votes(votes, sums, columns, once)
        inverse.halve_and_pair(columns, pairs)
        target, stride = _find(plan, tensors, chunk, buffer)
        if maps[chunk]:
            move_map(buffer, pairs, e2, target, stride, factor, lr, iterations, signs)
            continue
        coming, coming_stride = _next(plan, tensors, chunk, last, buffer)
        for row in range(0, _SIDE, inverse.ROWS_AT_ONCE):
            ahead, ahead_stride = target + (row + _ROWS_AHEAD) * stride, stride
            if row + _ROWS_AHEAD >= _SIDE:
                ahead, ahead_stride = coming + (row + _ROWS_AHEAD - _SIDE) * coming_stride, coming_stride
            inverse.turn_rows(pairs + 4 * row, e2, target + row * stride, stride, factor, lr, ahead, ahead_stride)
        if chunk >= plan[0].shape[0]:
            _visit_pool(plan, tensors, chunk, buffer, True)
