"""Muon's orthogonal matrices with the same bits on every device: matrix products in int8, of numbers of two digits.

A product of rounded numbers differs between devices, and fp64, which holds whole numbers up to 2^53, is a 64th as fast as
fp32 on a home GPU. Here a matrix is `(128 * high + low) * 2^e` with both digits within +-64, so that tensor cores and VNNI
multiply digits and add them up exactly in int32; the product of two low digits is left out. That is 14 bits, where Muon's
author computes with the 8 of bf16. What is done element by element is one operation at a time, each rounded once as IEEE 754
says. It knows neither layouts nor momentum.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from node.optim.dct import EXACT_INTEGER_MAX, full_precision

STEPS = 5
COEFFICIENTS = tuple(float(np.float32(value)) for value in (3.4445, -4.7750, 2.0315))
"""Of the quintic iteration `aX + bXX^TX + c(XX^T)^2X` (K. Jordan, Muon)."""

DIGIT_MAX = 64
"""Of magnitude. Beyond it a processor whose int8 products add pairs in int16 (before VNNI) would cut sums off."""

SIDE_MAX = (2**31 - 1) // (2 * DIGIT_MAX**2)
"""Rows or columns of a matrix, at most: sums of twice as many products (two pairs of digits) stay below 2^31."""

_ALIGNED = 32
"""Rows and columns are filled up with zeros to a multiple of this: cuBLAS asks for 8, tensor cores work best with 32."""

_WHOLE_BITS = 18
"""The norm is taken in whole numbers up to 2^18, whose squares int64 holds."""

_SLICE = EXACT_INTEGER_MAX // DIGIT_MAX**2
"""Columns whose products fp32 adds up exactly, where there is no int8."""

_EXPONENT_BITS, _FRACTION_BITS, _BIAS = 0x7F800000, 23, 127
_SMALLEST = 2.0**-40
"""Of a largest magnitude: with smaller ones the square of the scale would be too large for fp32."""


class Digits(NamedTuple):
    """`(128 * high + low) / scale`: int8 of one shape, and an fp32 power of two without dimensions."""

    high: Tensor
    low: Tensor
    scale: Tensor


def orthogonalised(matrix: Tensor) -> Tensor:
    """Roughly `U V^T` of fp32 [height, width] = U S V^T, at a root mean square of about 1: the same bits on every device.

    Muon's quintic Newton-Schulz iteration. Zero gives zero. No side may be longer than `SIDE_MAX`.
    """
    assert max(matrix.shape) <= SIDE_MAX, f"a matrix of {tuple(matrix.shape)} has sums beyond 31 bits"
    peak = float(matrix.abs().max()) if matrix.numel() else 0.0
    if peak == 0:
        return torch.zeros_like(matrix)
    tall = matrix.shape[0] > matrix.shape[1]
    given = matrix.T if tall else matrix
    rows, columns = (-(-side // _ALIGNED) * _ALIGNED for side in given.shape)
    x = given.new_zeros(rows, columns)
    # whole numbers, and their norm, exact in int64
    _, exponent = math.frexp(peak)
    whole = given.to(torch.float64).mul_(2.0 ** (_WHOLE_BITS - exponent)).round_()
    norm = math.isqrt(int(whole.to(torch.int64).square_().sum())) + 1
    # a product with the inverse, computed here: CUDA would divide so, a CPU not
    x[: given.shape[0], : given.shape[1]] = whole.mul_(1.0 / norm)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        own = _digits(x)
        rest = _square(own, own.high.T, own.low.T)  # XX^T, from which its diagonal goes, which is much larger
        diagonal = _taken(rest)
        even = _digits(rest)
        # (XX^T)^2 = rest^2 + rest * (d_i + d_j), and d_i^2 on the diagonal
        quartic = _square(even, even.high, even.low).add_(rest * (diagonal[:, None] + diagonal))
        square = _taken(quartic).add_(diagonal * diagonal)
        inner = _digits(quartic.mul_(c).add_(rest.mul_(b)))
        x.mul_(square.mul_(c).add_(diagonal.mul_(b)).add_(a)[:, None])
        x.add_(_product(inner, own))
    result = x[: given.shape[0], : given.shape[1]] * float(np.float32(math.sqrt(max(matrix.shape))))
    return (result.T if tall else result).contiguous()


def _taken(matrix: Tensor) -> Tensor:
    """The diagonal, which becomes zeros: fp32 [side]."""
    diagonal = matrix.diagonal().clone()
    matrix.fill_diagonal_(0)
    return diagonal


def _digits(matrix: Tensor) -> Digits:
    """fp32 to two digits, by a power of two that brings the largest magnitude to between 2^12 and 2^13.

    The power comes from the bits of the largest, so that nothing is rounded and no device waits for another.
    """
    peak = matrix.abs().max().clamp_(min=_SMALLEST).view(torch.int32) & _EXPONENT_BITS
    scale = ((2 * _BIAS + 12 << _FRACTION_BITS) - peak).view(torch.float32)
    whole = matrix.mul(scale).round_()
    high = whole.mul(2.0**-7).round_()
    low = whole.sub_(high, alpha=2**7)
    return Digits(high.to(torch.int8), low.to(torch.int8), scale)


def _square(one: Digits, high: Tensor, low: Tensor) -> Tensor:
    """The product with one's own transpose (whose digits are given), which is symmetric: fp32."""
    across = _sums(one.high, low)
    return _joined(_sums(one.high, high), across.add_(across.T.clone()), one.scale * one.scale)


def _product(one: Digits, other: Digits) -> Tensor:
    across = _sums(torch.cat((one.high, one.low), 1), torch.cat((other.low, other.high), 0))
    return _joined(_sums(one.high, other.high), across, one.scale * other.scale)


def _joined(high: Tensor, across: Tensor, scale: Tensor) -> Tensor:
    """`(2^14 * high + 2^7 * across) / scale` of int32, as fp32: the sums are rounded, the powers of two are exact."""
    inverse = ((2 * _BIAS << _FRACTION_BITS) - scale.view(torch.int32)).view(torch.float32)
    return high.to(torch.float32).mul_(2.0**7).add_(across.to(torch.float32)).mul_(inverse.mul_(2.0**7))


def _sums(one: Tensor, other: Tensor) -> Tensor:
    """The matrix product of int8 digits, exact: int32."""
    if _multiplies_int8(one.device):
        return torch._int_mm(one, other)
    total = torch.zeros(one.shape[0], other.shape[1], dtype=torch.int32, device=one.device)
    with full_precision(one.device):
        for first in range(0, one.shape[1], _SLICE):
            part = slice(first, first + _SLICE)
            total += (one[:, part].to(torch.float32) @ other[part].to(torch.float32)).to(torch.int32)
    return total


@functools.cache
def _multiplies_int8(device: torch.device) -> bool:
    """Whether the device has int8 products, and they are exact where they are hardest; asked once a process."""
    for signs in ((1, 1), (1, -1), (-1, -1)):
        one, other = (torch.full((64, 256), sign * DIGIT_MAX, dtype=torch.int8, device=device) for sign in signs)
        try:
            found = torch._int_mm(one, other.T)
        except (RuntimeError, NotImplementedError):
            return False
        if not bool((found == 256 * signs[0] * signs[1] * DIGIT_MAX**2).all()):
            return False
    return True
