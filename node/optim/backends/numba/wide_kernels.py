"""Votes at places that follow from the step, and the exact inverse of sums with any cap, over a range of chunks.

`kernels` has the default's. Here sums are inverted at 12 bits without rounding, the same bits as `Transform.inverse_exact`. A
chunk goes through 16-bit lanes where they hold its first pass (nearly always), and through fp64 otherwise. A *place* is a
coefficient's number with its bits in the order of `inverse.find_votes`: `64 * column + 32 * (row % 2) + row // 2`. To move bits
about changes no XOR, so places follow from the step as coefficients do. ADR 33.
"""

import numpy as np
from numba import njit

from node.optim.backends.numba import emit, inverse, newton
from node.optim.backends.numba.kernels import _find, _next, _read, _visit_pool, kernel, move_map, orthogonalise
from node.optim.backends.numba.momentum_kernels import accumulate, close_chunk, open_chunk, put_number, round_chunk

_CHUNK, _SIDE = 4096, 64
_ROW = 256
"""Bytes in a row of 64 fp32, and of 64 int32."""
_ROWS_AHEAD = 16
_GROUPS_MAX = 512
_SPARSE_MAX = 512
"""Votes for a chunk up to which it is faster to take them one by one than to take every place."""

COLUMN_MAX = 45
"""Votes in a column whose transform fits int16 for sure: 45 * 724 < 2^15, and no entry of the basis is above 724."""

# numbers that fit int16 after the first pass fit int32 after the second: 64 * 724 * 2^15 < 2^31


@kernel
def vote_drawn(
    first, last, scratch, plan, tensors, squares, second, corrections, momenta, beta, step, order, moved, packed,
    silent, taken,
):  # fmt: skip
    """As `momentum_kernels.vote`, where votes are at the coefficients `order ^ moved[chunk]`, int16 [votes] and [chunks].

    uint8 `packed`, zeros before, gets one bit a vote: 1 is negative.
    """
    count = len(order)
    broken = False
    for chunk in range(first, last):
        own = open_chunk(momenta, chunk, scratch)
        if len(tensors):
            accumulate(plan, tensors, chunk, last, scratch, (squares, second, corrections), own, (beta, step))
            round_chunk(momenta, own)
        broken |= emit.not_numbers(own.ctypes.data, _CHUNK) != 0
        rest = taken[chunk * count : (chunk + 1) * count] if len(taken) else taken
        _take(own, order, moved[chunk], chunk * count, packed, silent[chunk], rest)
        close_chunk(momenta, chunk, own)
    return broken


@njit(nogil=True)
def _take(own, order, moved, begin, packed, silent, taken):
    """The votes of one chunk from bit `begin` of `packed` on, the marks of zeros, and what is taken; see `vote_drawn`."""
    negative, quiet = 0, 0
    for vote in range(len(order)):
        place = np.int64(order[vote] ^ moved)
        value = own[place]
        negative |= (value < 0) << (vote & 7)
        quiet |= (value == 0) << (vote & 7)
        if len(taken):
            taken[vote] = value
            own[place] = 0.0
        if vote & 7 == 7 or vote == len(order) - 1:
            packed[(begin + vote) >> 3] |= np.uint8(negative << (begin & 7))
            silent[vote >> 3] = quiet
            negative, quiet = 0, 0


@kernel
def put_drawn(first, last, _scratch, momenta, order, moved, values):
    """Write fp32 `values` [votes] into the momentum (`momentum_kernels.vote`) where votes are; zeros if it is empty."""
    for chunk in range(first, last):
        for vote in range(len(order)):
            place = chunk * _CHUNK + np.int64(order[vote] ^ moved[chunk])
            put_number(momenta, place, values[chunk * len(order) + vote] if len(values) else np.float32(0))


@njit(nogil=True)
def _add_ballot(chunk, signs, silent, totals):
    """Add one peer's votes for a chunk to int16 `totals`: bits at the address `signs`, and those of silent votes or 0."""
    count = len(totals)
    if count % inverse.VOTES_AT_ONCE == 0:
        inverse.add_signs(totals.ctypes.data, signs + chunk * count // 8, count)
    else:
        for vote in range(count):
            bit = chunk * count + vote
            totals[vote] += 1 - 2 * (emit.byte_at(signs + (bit >> 3)) >> (bit & 7) & 1)
    if silent:
        row = silent + chunk * ((count + 7) // 8)
        for vote in range(count):
            totals[vote] -= emit.byte_at(row + (vote >> 3)) >> (vote & 7) & 1


@njit(nogil=True)
def _sum_drawn(chunk, ballots, orders, moved, nested, totals, places, sums):
    """The votes of all ballots for a chunk into int16 `sums` [4096], and every place that has one into int16 `places`.

    `ballots` int64 [n, 4], those with most votes first: which of the sizes, votes a chunk, and the addresses of `_add_ballot`.
    `orders` int16 [sizes, votes] and `moved` int16 [sizes, chunks]. `nested`: places of few votes are among those of many; else
    sizes have places of their own. With one size the sums stay in int16 `totals`, by vote.
    """
    single = orders.shape[0] == 1
    ballot, found = 0, 0
    while ballot < ballots.shape[0]:
        size, count = ballots[ballot, 0], ballots[ballot, 1]
        own = totals[:count]
        own[:] = 0
        while ballot < ballots.shape[0] and ballots[ballot, 0] == size:
            _add_ballot(chunk, ballots[ballot, 2], ballots[ballot, 3], own)
            ballot += 1
        if size == 0 or not nested:
            for vote in range(count):
                places[found + vote] = orders[size, vote] ^ moved[size, chunk]
            found += count
        if not single:
            for vote in range(count):
                sums[np.int64(orders[size, vote] ^ moved[size, chunk])] += own[vote]
    return found


@njit(nogil=True)
def _sum_groups(chunk, ballots, codes, places, signs, sums):
    """The same of group votes. `ballots` as `kernels.apply`; int16 `signs` of as many as `places`."""
    found = 0
    for ballot in range(ballots.shape[0]):
        size = ballots[ballot, 0]
        count = _CHUNK // size
        read = _read(ballots[ballot, 1] + chunk * ballots[ballot, 2], size, codes)
        apart = signs.ctypes.data - places.ctypes.data
        inverse.find_votes(read, size, places.ctypes.data + 2 * found, apart)
        silent = ballots[ballot, 3]
        for vote in range(count):
            quiet = silent and emit.byte_at(silent + chunk * (count // 8) + (vote >> 3)) >> (vote & 7) & 1
            sums[np.int64(places[found + vote])] += 0 if quiet else signs[found + vote]
        found += count
    return found


@njit(nogil=True)
def _capped(places, found, cap, sums, said, load, single, sure):
    """Each place's capped sum once into int16 `said`, where `sums` becomes zero; whether `_turn` holds the first pass for sure.

    `single`: the sums are in `said` already. `sure`: it holds whatever there is.
    """
    if not single:
        for vote in range(found):
            place = np.int64(places[vote])
            said[vote] = sums[place]
            sums[place] = 0
    for vote in range(found):
        said[vote] = min(max(said[vote], np.int16(-cap)), np.int16(cap))
    if sure:
        return True
    load[:] = 0
    for vote in range(found):
        load[np.int64(places[vote]) >> 6] += abs(said[vote])
    return load.max() <= COLUMN_MAX


@njit(nogil=True)
def _turn(places, said, found, columns, rows):
    """The first pass in 16 bits: every place's sum times its row of the basis, added to its column."""
    emit.clear(columns, 2 * _CHUNK)
    for vote in range(found):
        place = np.int64(places[vote])
        inverse.add_row_times(columns + (place >> 5 << 6), rows + ((place & 63) << 6), np.int64(said[vote]))


@njit(nogil=True)
def _turn_every(sums, places, said, cap, every, columns, beyond):
    """`_capped` and `_turn` where votes are nearly everywhere. Whether 16 bits hold a chunk; if not, all places are listed."""
    inverse.turn_all(sums.ctypes.data, cap, every.ctypes.data, columns, beyond.ctypes.data)
    narrow = not beyond.any()
    if not narrow:
        for place in range(_CHUNK):
            places[place], said[place] = place, sums[place]
    sums[:] = 0
    return narrow


@njit(nogil=True)
def _turn_widely(places, said, found, basis, half, total):
    """Both passes in fp64, which holds every sum: the inverse into fp64 `total` [64, 64].

    `basis` fp64 [64, 64] of whole numbers; fp64 `half` [64 columns, 64] is scratch. Even rows are the first half of a place.
    """
    half[:] = 0
    for vote in range(found):
        place = np.int64(places[vote])
        row = 2 * (place & 31) + (place >> 5 & 1)
        if said[vote]:
            value = np.float64(said[vote])
            for to in range(_SIDE):
                half[place >> 6, to] += value * basis[row, to]
    total[:] = 0
    for row in range(_SIDE):
        for column in range(_SIDE):
            value = half[column, row]
            for to in range(_SIDE):
                total[row, to] += value * basis[column, to]


@njit(nogil=True)
def _move_widely(buffer, total, said, target, stride, factor, lr, mapped, iterations, signs):
    """The update of a chunk by the inverse `total`: its orthogonal factor (`kernels.move_map`) or its signs.

    int32 `said` [64, 64] is scratch.
    """
    rows, x, whole = buffer + 4 * _CHUNK, buffer + 8 * _CHUNK, buffer + 12 * _CHUNK
    if mapped:
        real = said.view(np.float32)
        real[:] = total
        emit.copy(x, said.ctypes.data, 4 * _CHUNK)
        orthogonalise(x, buffer, rows, rows + 2 * _CHUNK, whole, whole + 2 * _CHUNK, iterations)
        newton.move_rows(x, target, stride, factor, lr, signs)
        return
    said[:] = np.sign(total)
    for row in range(_SIDE):
        inverse.move_row(said.ctypes.data + row * _ROW, target + row * stride, factor, lr)


@kernel
def apply_wide(
    first, last, scratch, plan, tensors, ballots, orders, moved, nested, sure, cap, factor, lr, rows, every, second, basis,
    room, maps, iterations, signs,
):  # fmt: skip
    """`p = p * factor - lr * direction` for the parameters, with the last three as `kernels.apply`.

    `orders` is empty for group votes.

    `ballots`, `orders`, `moved`: see `_sum_drawn` and `_sum_groups`. The basis at 12 bits is int16 `rows` [64, 32], `every` as
    `inverse.turn_all`, `second` as `inverse.turn_rows`, and fp64 `basis` [64, 64]. `room`: how many votes for a chunk there
    are. `sure`: see `_capped`.
    """
    buffer = scratch.ctypes.data
    columns = buffer + 4 * _CHUNK
    pairs = columns + 2 * _CHUNK
    single, dense = orders.shape[0] == 1, orders.shape[0] > 1 and room > _SPARSE_MAX
    found_room = np.empty((3, max(room, _CHUNK)), dtype=np.int16)
    places, said, totals = found_room[0], found_room[1], found_room[1 if single else 2]
    codes, load = np.empty(_GROUPS_MAX, dtype=np.uint8), np.empty(_SIDE, dtype=np.int64)
    sums = np.zeros(_CHUNK, dtype=np.int16)
    half, total = np.empty((_SIDE, _SIDE), dtype=np.float64), np.empty((_SIDE, _SIDE), dtype=np.float64)
    whole = np.empty((_SIDE, _SIDE), dtype=np.int32)
    beyond = np.empty(16, dtype=np.int32)
    for chunk in range(first, last):
        if orders.shape[0]:
            found = _sum_drawn(chunk, ballots, orders, moved, nested, totals, places, sums)
        else:
            found = _sum_groups(chunk, ballots, codes, places, said, sums)
        if dense:
            found, narrow = _CHUNK, _turn_every(sums, places, said, cap, every, columns, beyond)
        else:
            narrow = _capped(places, found, cap, sums, said, load, single, sure)
            _turn(places, said, found if narrow else 0, columns, rows.ctypes.data)
        inverse.pair(columns, pairs)
        target, stride = _find(plan, tensors, chunk, buffer)
        coming, coming_stride = _next(plan, tensors, chunk, last, buffer)
        if not narrow:
            _turn_widely(places, said, found, basis, half, total)
            _move_widely(buffer, total, whole, target, stride, factor, lr, maps[chunk], iterations, signs)
        elif maps[chunk]:
            move_map(buffer, pairs, second.ctypes.data, target, stride, factor, lr, iterations, signs)
        else:
            for row in range(0, _SIDE, inverse.ROWS_AT_ONCE):
                ahead, ahead_stride = target + (row + _ROWS_AHEAD) * stride, stride
                if row + _ROWS_AHEAD >= _SIDE:
                    ahead, ahead_stride = coming + (row + _ROWS_AHEAD - _SIDE) * coming_stride, coming_stride
                inverse.turn_rows(
                    pairs + 4 * row, second.ctypes.data, target + row * stride, stride, factor, lr, ahead, ahead_stride
                )
        if chunk >= plan[0].shape[0]:
            _visit_pool(plan, tensors, chunk, buffer, True)
