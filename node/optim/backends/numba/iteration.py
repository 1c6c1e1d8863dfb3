"""The iteration of one chunk from the instructions of `newton`: `exact.chunkwise` in the same bits. ADR 25."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from node.optim.backends.numba import emit, inverse, newton
from node.optim.exact.chunkwise import FACTOR_UNITS, GRAM_MIN, LARGEST_MIN, WHOLE_EXPONENT
from node.optim.exact.orthogonal import COEFFICIENTS
from node.optim.exact.smallest import SMALLEST

_CHUNK, _SIDE, _ROW = 4096, 64, 256
_, _LINEAR, _QUADRATIC = COEFFICIENTS


@njit(nogil=True)
def _power(value):
    """The power of two that brings a positive number to between 2^11 and 2^12."""
    _, exponent = math.frexp(value)
    return math.ldexp(1.0, WHOLE_EXPONENT + 1 - exponent)


@njit(nogil=True)
def orthogonalise(x, gram, rows, pairs, whole, factor, iterations):
    """`chunkwise.orthogonal_chunks` without its scale, of the fp32 chunk at the address `x`, in place.

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
