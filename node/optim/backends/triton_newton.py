"""Newton-Schulz iterations of one chunk in Triton: `orthogonal_chunks` in the same bits, by int8 products. ADR 25."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from node.optim.exact import orthogonal as whole_matrices
from node.optim.exact.elementwise import SMALLEST

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: to add it and take it away again rounds fp32 below 2^22 half to even."""
_ROUND_BITS = tl.constexpr(int(np.float32(12582912.0).view(np.int32)))

_CONSTANT, _LINEAR, _QUADRATIC = map(tl.constexpr, whole_matrices.COEFFICIENTS)
_ENTRY_MAX = tl.constexpr(whole_matrices.ENTRY_MAX)
_FACTOR_MAX = tl.constexpr(float(whole_matrices.FACTOR_MAX))
_FACTOR_UNITS = tl.constexpr(whole_matrices.FACTOR_UNITS)
_GRAM_MIN = tl.constexpr(whole_matrices.GRAM_MIN)
_LARGEST_MIN = tl.constexpr(whole_matrices.LARGEST_MIN)
_SCALE = tl.constexpr(whole_matrices.SCALE)
_SMALLEST = tl.constexpr(SMALLEST)
_EXPONENT_BITS = tl.constexpr(0x7F800000)
_INVERSE_BITS = tl.constexpr(2 * 127 << 23)
_WHOLE = tl.constexpr(2.0**whole_matrices.WHOLE_EXPONENT)
_DIGIT = tl.constexpr(whole_matrices.DIGIT)


@triton.jit
def orthogonal(turned, diagonal, ITERATIONS: tl.constexpr):
    """`orthogonal_chunks` of one chunk, fp32 [64, 64], transposed on both sides. `diagonal` is true there.

    Tensor cores read int8 along the sum alone. Of `x^T x` both factors lie so in the transposed chunk, and what is symmetric
    lies so anyway.
    """
    turned = _iteration(turned, diagonal, True)
    for _ in range(ITERATIONS - 1):
        turned = _iteration(turned, diagonal, False)
    return turned * _SCALE


@triton.jit
def _iteration(turned, diagonal, FIRST: tl.constexpr):
    peak = tl.max(tl.max(tl.abs(turned), axis=1), axis=0)
    scale = (
        tl.where(peak < _SMALLEST, 0.0, _power(tl.maximum(peak, _SMALLEST)))
        if FIRST
        else _power(tl.maximum(peak, _LARGEST_MIN))
    )
    high, low = _digits(_rounded(turned * scale))
    gram = _product(high, low, tl.trans(high), tl.trans(low)).to(tl.float32)
    largest = tl.max(tl.max(tl.where(diagonal, gram, 0.0), axis=1), axis=0)
    less = _power(tl.maximum(largest, _GRAM_MIN))
    whole = _rounded(gram * less)
    wide = less.to(tl.float64)
    if FIRST:
        squares = tl.sum(tl.sum(whole * whole, axis=1).to(tl.int64), axis=0).to(tl.float64)
        unit = 1.0 / tl.sqrt(tl.maximum(squares, 1.0))
        root = tl.sqrt(unit * wide)
    else:
        root = 1.0 / scale.to(tl.float64)
        unit = root * root / wide
    linear, quadratic = (unit * wide * _LINEAR).to(tl.float32), (unit * unit * _QUADRATIC).to(tl.float32)
    large, small = _digits(whole)
    squared = _product(large, small, tl.trans(large), tl.trans(small)).to(tl.float32)
    factor = gram * linear + squared * quadratic
    factor = tl.where(diagonal, factor + _CONSTANT, factor) * _FACTOR_UNITS
    factor = tl.minimum(tl.maximum(_whole(factor), -_FACTOR_MAX), _FACTOR_MAX).to(tl.int32)
    large, small = _digits(factor)
    turned = _product(large, small, high, low).to(tl.float32) * (root / _FACTOR_UNITS).to(tl.float32)
    return tl.minimum(tl.maximum(turned, -_ENTRY_MAX), _ENTRY_MAX)


@triton.jit
def _power(peak):
    """The power of two that brings positive normal fp32 to between 2^11 and 2^12."""
    inverse = _INVERSE_BITS - (peak.to(tl.int32, bitcast=True) & _EXPONENT_BITS)
    return inverse.to(tl.float32, bitcast=True) * _WHOLE


@triton.jit
def _whole(value):
    return (value + ROUND) - ROUND


@triton.jit
def _rounded(value):
    """As int32: the lowest bits of the sum that rounds."""
    return (value + ROUND).to(tl.int32, bitcast=True) - _ROUND_BITS


@triton.jit
def _digits(value):
    high = (value + _DIGIT // 2) >> 7
    return high.to(tl.int8), (value - high * _DIGIT).to(tl.int8)


@triton.jit
def _product(high, low, beside, below):
    """The product of int32 [64, 64] within +-8191, by digits of int8: exact."""
    across = tl.dot(low, beside, tl.dot(high, below, out_dtype=tl.int32), out_dtype=tl.int32)
    return (tl.dot(high, beside, out_dtype=tl.int32) * _DIGIT + across) * _DIGIT + tl.dot(
        low, below, out_dtype=tl.int32
    )
