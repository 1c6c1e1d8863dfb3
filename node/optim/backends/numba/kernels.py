"""The fused step over a range of chunks. Each kernel leaves the interpreter's lock alone, so that threads share a step.

Importing this compiles nothing. A kernel is compiled when first called and kept beside this file, or in the user's
cache folder where this one cannot be written. `scratch` is memory for one thread; `tensors` are addresses of fp32
tensors, 0 for one that counts as zeros.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numba import njit

from node.optim.backends.numba import emit, forward, inverse, iteration, newton
from node.optim.exact import chunkwise, orthogonal, smallest

_CHUNK, _SIDE = 4096, 64
_ROW, _HALF_ROW = 256, 128
"""Bytes in a row of 64 fp32, and of 64 int16."""
_COLUMNS = 64
"""Bytes in 16 columns."""

_ROWS_AHEAD = 16
"""How far ahead rows of parameters are asked for."""

SCRATCH_BYTES = 16 * _CHUNK
"""Bytes of memory that a kernel needs for itself, from a multiple of 64 bytes on."""

_GROUPS_MAX = 512
"""Votes that a peer has for a chunk at the smallest group size."""

_INFINITY_BITS = 0x7F800000

_PARTS = (emit, forward, inverse, iteration, newton, chunkwise, orthogonal, smallest)
_EMITTED = hashlib.sha256(b"".join(Path(str(part.__file__)).read_bytes() for part in _PARTS)).hexdigest()[:16]
"""Numba's cache looks at this file and at a function's name; so the name says which instructions are compiled in."""


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
def _largest(momentum, group_size, found, magnitudes, positions):
    """The bits of each group's largest magnitude and its position, both int32 [groups], in the order of the groups.

    `found` is scratch, int32 [2, 64].
    """
    wide = min(_SIDE, _CHUNK // group_size)
    apart = max(1, _SIDE // group_size)
    one, other = found.ctypes.data, found.ctypes.data + _ROW
    for row in range(apart):
        if group_size == 128:
            forward.largest_128(momentum, row, one, other)
        elif group_size == 64:
            forward.largest_64(momentum, row, one, other)
        elif group_size == 32:
            forward.largest_32(momentum, row, one, other)
        elif group_size == 16:
            forward.largest_16(momentum, row, one, other)
        else:
            forward.largest_8(momentum, row, one, other)
        for lane in range(wide):
            group = row * _SIDE + ((row + lane) & (wide - 1))
            magnitudes[group] = found[0, lane]
            positions[group] = found[1, lane]


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
def _divide_pool(plan, chunk, planes, second, corrections):
    """As `forward.divide_rows`, of a chunk of the pool: gradients in the first of the fp32 `planes`, moments in the third.

    A strip has its own tensor's correction. Places without an element of the pool stay zero.
    """
    strips, begin = plan[1], (chunk - plan[0].shape[0]) * _CHUNK
    end = min(begin + _CHUNK, strips[-1, 5])
    strip = plan[2][chunk - plan[0].shape[0]]
    place = begin
    while place < end:
        if place == strips[strip, 5]:
            strip += 1
        stop, correction = min(strips[strip, 5], end), corrections[strips[strip, 0]]
        for own in range(place - begin, stop - begin):
            gradient = planes[own]
            moment = second[0] * planes[2 * _CHUNK + own] + second[1] * gradient * gradient
            planes[2 * _CHUNK + own] = moment
            planes[own] = gradient / np.sqrt(moment * correction + second[2])
        place = stop


@njit(nogil=True)
def _divide(plan, chunk, last, scratch, source, stride, squares, second, corrections):
    """The gradient of a chunk, divided by its second moment, into the first plane of `scratch`; see `vote`."""
    buffer, moments = scratch.ctypes.data, scratch.ctypes.data + 8 * _CHUNK
    divisor, _ = _find(plan, squares, chunk, moments)
    if chunk < plan[0].shape[0]:
        ahead, ahead_stride = _next(plan, squares, chunk, last, moments)
        correction = corrections[plan[0][chunk, 0]]
        forward.divide_rows(
            source, divisor, stride, second[0], second[1], correction, second[2], buffer, ahead, ahead_stride
        )
    else:
        _divide_pool(plan, chunk, scratch.view(np.float32), second, corrections)
        _visit_pool(plan, squares, chunk, moments, True)


@njit(nogil=True)
def _write(own, magnitudes, positions, group_size, coefficients, packed, silent, taken):
    """The votes of one chunk into uint8 `packed`, and the marks of its groups of zeros into uint8 `silent`; see `vote`."""
    groups, width = _CHUNK // group_size, 1
    while 1 << width <= group_size:
        width += 1
    word, filled, quiet, byte, broken = 0, 0, 0, 0, False
    for group in range(groups):
        position = positions[group]
        quiet |= (magnitudes[group] == 0) << (group & 7)
        if group & 7 == 7:
            silent[group >> 3] = quiet
            quiet = 0
        broken |= magnitudes[group] > _INFINITY_BITS
        place = coefficients[position * groups + group]
        negative = own[place] < 0
        if len(taken):
            taken[group] = own[place]
            own[place] = 0.0
        word |= (position + group_size * negative) << filled
        filled += width
        while filled >= 8:
            packed[byte] = word & 0xFF
            byte += 1
            word >>= 8
            filled -= 8
    return broken


@njit(nogil=True)
def accumulate(plan, tensors, chunk, last, scratch, division, own, rates):
    """`own = beta * own + step * DCT(gradient)` for a chunk of momentum; `division` and `rates` as `vote` has them."""
    buffer = scratch.ctypes.data
    half = buffer + 4 * _CHUNK
    source, stride = _find(plan, tensors, chunk, buffer)
    coming, coming_stride = _next(plan, tensors, chunk, last, buffer)
    if len(division[0]):
        _divide(plan, chunk, last, scratch, source, stride, division[0], division[1], division[2])
        source, stride = buffer, _ROW
    # The next chunk's memory is asked for in its own order, into the second cache level: momentum during the
    # columns, the gradient during the rows. Asked for in the order of use, it took half as long again.
    for block in range(4):
        ahead = own.ctypes.data + 4 * _CHUNK + block * 16 * _ROW
        forward.forward_columns(source + block * _COLUMNS, stride, half + block * 16 * _ROW, ahead, _COLUMNS)
    for block in range(4):
        ahead = coming + block * 16 * coming_stride
        target = own.ctypes.data + block * 16 * _ROW
        forward.forward_rows(half + block * _COLUMNS, target, rates[0], rates[1], ahead, coming_stride)


@kernel
def vote(
    first,
    last,
    scratch,
    plan,
    tensors,
    squares,
    second,
    corrections,
    momentum,
    beta,
    step,
    group_size,
    coefficients,
    packed,
    silent,
    taken,
):
    """`m = beta * m + step * DCT(gradient)` and its votes, for fp32 `momentum` [all elements] and uint8 `packed`.

    `squares` has an address for each of `tensors`, 0 beside a 0, or is empty. If it is not empty, the kernel also divides the
    gradients, by fp32 `second` (beta2, 1 - beta2, epsilon) and the tensors' `corrections`, `1 / (1 - beta2^t)`.
    `coefficients` int16 [4096] as `votes.coefficients`. Groups of zeros are marked in uint8 `silent` [chunks, groups / 8], as
    `silence.pack` does. What is voted for moves to fp32 `taken` [votes], unless that is empty, and leaves zeros. Returns
    whether a coefficient is NaN.
    """
    groups, width = _CHUNK // group_size, 1
    while 1 << width <= group_size:
        width += 1
    magnitudes, positions = np.empty(groups, dtype=np.int32), np.empty(groups, dtype=np.int32)
    found = np.empty((2, _SIDE), dtype=np.int32)
    broken = False
    for chunk in range(first, last):
        own = momentum[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        accumulate(plan, tensors, chunk, last, scratch, (squares, second, corrections), own, (beta, step))
        _largest(own.ctypes.data, group_size, found, magnitudes, positions)
        rest = taken[chunk * groups : (chunk + 1) * groups] if len(taken) else taken
        codes = packed[chunk * groups * width // 8 :]
        broken |= _write(own, magnitudes, positions, group_size, coefficients, codes, silent[chunk], rest)
    return broken


@kernel
def put(first, last, _scratch, momentum, group_size, coefficients, packed, values):
    """Write fp32 `values` [votes] into `momentum` [all elements] where the votes `packed` are; zeros if it is empty."""
    groups, width = _CHUNK // group_size, 1
    while 1 << width <= group_size:
        width += 1
    byte = first * groups * width // 8
    for chunk in range(first, last):
        word, filled = 0, 0
        for group in range(groups):
            while filled < width:
                word |= np.int64(packed[byte]) << filled
                byte += 1
                filled += 8
            place = chunk * _CHUNK + coefficients[(word & (group_size - 1)) * groups + group]
            momentum[place] = values[chunk * groups + group] if len(values) else np.float32(0)
            word >>= width
            filled -= width


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
            iteration.move_map(buffer, pairs, e2, target, stride, factor, lr, iterations, signs)
            continue
        coming, coming_stride = _next(plan, tensors, chunk, last, buffer)
        for row in range(0, _SIDE, inverse.ROWS_AT_ONCE):
            ahead, ahead_stride = target + (row + _ROWS_AHEAD) * stride, stride
            if row + _ROWS_AHEAD >= _SIDE:
                ahead, ahead_stride = coming + (row + _ROWS_AHEAD - _SIDE) * coming_stride, coming_stride
            inverse.turn_rows(pairs + 4 * row, e2, target + row * stride, stride, factor, lr, ahead, ahead_stride)
        if chunk >= plan[0].shape[0]:
            _visit_pool(plan, tensors, chunk, buffer, True)
