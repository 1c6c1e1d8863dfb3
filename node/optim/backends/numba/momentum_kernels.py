"""A gradient joins the momentum, and votes leave it, over a range of chunks. The momentum: fp32, or the bits of bf16 in uint16.

`kernels` has the conventions, and moves the parameters. Votes are a function of the momentum that is kept. So gradients may
join it (`fold`) before the votes are made.
"""

import numpy as np
from numba import njit

from node.optim.backends.numba import forward
from node.optim.backends.numba.kernels import _find, _next, _visit_pool, kernel

_CHUNK, _SIDE = 4096, 64
_ROW = 256
"""Bytes in a row of 64 fp32."""
_COLUMNS = 64
"""Bytes in 16 columns."""
_INFINITY_BITS = 0x7F800000


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


@njit(nogil=True)
def open_chunk(momenta, chunk, scratch):
    """A chunk of momentum as fp32 [4096]: itself, or what its bf16 is, in the last plane of `scratch`."""
    momentum, short = momenta
    if len(short):
        own = scratch.view(np.float32)[3 * _CHUNK : 4 * _CHUNK]
        numbers, halves = own.view(np.uint32), short[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        for place in range(_CHUNK):
            numbers[place] = np.uint32(halves[place]) << np.uint32(16)
        return own
    return momentum[chunk * _CHUNK : (chunk + 1) * _CHUNK]


@njit(nogil=True)
def round_chunk(momenta, own):
    """Round what `open_chunk` gave to bf16, ties to even, if the momentum is kept so: votes are those of what is kept."""
    if len(momenta[1]):
        numbers = own.view(np.uint32)
        for place in range(_CHUNK):
            number = numbers[place]
            odd = number >> np.uint32(16) & np.uint32(1)
            numbers[place] = (number + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)


@njit(nogil=True)
def close_chunk(momenta, chunk, own):
    """Keep what `open_chunk` gave and `round_chunk` rounded."""
    short = momenta[1]
    if len(short):
        numbers, halves = own.view(np.uint32), short[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        for place in range(_CHUNK):
            halves[place] = np.uint16(numbers[place] >> np.uint32(16))


@njit(nogil=True)
def put_number(momenta, place, value):
    """Write one number into the momentum."""
    momentum, short = momenta
    if len(short):
        one = np.empty(1, dtype=np.float32)
        one[0] = value
        number = one.view(np.uint32)[0]
        odd = number >> np.uint32(16) & np.uint32(1)
        short[place] = np.uint16((number + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    else:
        momentum[place] = value


@kernel
def fold(first, last, scratch, plan, tensors, momenta, beta, step):
    """`m = beta * m + step * DCT(gradient)` alone; arguments as `vote`."""
    nothing = momenta[0][:0]
    for chunk in range(first, last):
        own = open_chunk(momenta, chunk, scratch)
        accumulate(plan, tensors, chunk, last, scratch, (tensors[:0], nothing, nothing), own, (beta, step))
        round_chunk(momenta, own)
        close_chunk(momenta, chunk, own)


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
    momenta,
    beta,
    step,
    group_size,
    coefficients,
    packed,
    silent,
    taken,
):
    """`m = beta * m + step * DCT(gradient)` and its votes, for `momenta` [all elements] and uint8 `packed`.

    `momenta`: fp32, and the bits of bf16 in uint16; one of the two is empty. Without `tensors` the momentum has its gradients
    already (`fold`). `squares` has an address for each of `tensors`, 0 beside a 0, or is empty. If it is not empty, the kernel
    also divides the gradients, by fp32 `second` (beta2, 1 - beta2, epsilon) and the tensors' `corrections`,
    `1 / (1 - beta2^t)`. `coefficients` int16 [4096] as `votes.coefficients`. Groups of zeros are marked in uint8 `silent`
    [chunks, groups / 8], as `silence.pack` does. What is voted for moves to fp32 `taken` [votes], unless that is empty, and
    leaves zeros. Returns whether a coefficient is NaN.
    """
    groups, width = _CHUNK // group_size, 1
    while 1 << width <= group_size:
        width += 1
    magnitudes, positions = np.empty(groups, dtype=np.int32), np.empty(groups, dtype=np.int32)
    found = np.empty((2, _SIDE), dtype=np.int32)
    broken = False
    for chunk in range(first, last):
        own = open_chunk(momenta, chunk, scratch)
        if len(tensors):
            accumulate(plan, tensors, chunk, last, scratch, (squares, second, corrections), own, (beta, step))
            round_chunk(momenta, own)
        _largest(own.ctypes.data, group_size, found, magnitudes, positions)
        rest = taken[chunk * groups : (chunk + 1) * groups] if len(taken) else taken
        codes = packed[chunk * groups * width // 8 :]
        broken |= _write(own, magnitudes, positions, group_size, coefficients, codes, silent[chunk], rest)
        close_chunk(momenta, chunk, own)
    return broken


@kernel
def put(first, last, _scratch, momenta, group_size, coefficients, packed, values):
    """Write fp32 `values` [votes] into the momentum (`vote`) where the votes `packed` are; zeros if it is empty."""
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
            put_number(momenta, place, values[chunk * groups + group] if len(values) else np.float32(0))
            word >>= width
            filled -= width
