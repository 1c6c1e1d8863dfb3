"""Muon's orthogonal matrices of 64x64 chunks, each alone: the same bits on every device, in whole numbers of 12 bits.

A chunk has sums of 64 products only. Numbers within +-4096 and +-8191 give sums below 2^31, exact in int32 (x86 adds pairs of
such products in one instruction), in fp64, and in fp32 by digits. Arithmetic by element is one operation at a time, and each is
rounded once as IEEE 754 says. Kernels compute the same bits. The module knows neither layouts nor votes. ADR 25.
"""

from __future__ import annotations

import torch
from torch import Tensor

from node.optim.exact.dct import full_precision
from node.optim.exact.elementwise import SMALLEST, root_
from node.optim.exact.orthogonal import COEFFICIENTS, ENTRY_MAX
from node.optim.layout import CHUNK_SIDE

WHOLE_EXPONENT = 11
"""A chunk is scaled by a power of two that brings its largest magnitude to between 2^11 and 2^12."""

FACTOR_UNITS = 2.0**11
"""Entries of the factor `aI + bA + cA^2` are in units of 2^-11."""

FACTOR_MAX = 8191
"""Largest entry of the factor in these units: 64 * 8191 * 4096 is below 2^31. In a sound iteration, entries are below 3.45."""

GRAM_MIN = 2.0 ** (2 * WHOLE_EXPONENT)
"""The largest square of a row is at least this, unless the chunk counts as zeros."""

LARGEST_MIN = 2.0**-20
"""A chunk's largest magnitude after an iteration counts as at least this. It is beyond 2^-8, unless the chunk is zeros."""

SCALE = 8.0
"""The root of a side: orthogonal chunks times this have a root mean square of 1."""

DIGIT = 128
"""fp32 multiplies digits: numbers are `128 * high + low`, and both are within +-64."""

_EXPONENT_BITS, _FRACTION_BITS, _BIAS = 0x7F800000, 23, 127


def orthogonal_chunks(chunks: Tensor, iterations: int) -> Tensor:
    """Roughly `U V^T` of each fp32 chunk [n, 64, 64] = U S V^T, at a root mean square of about 1. Zeros give zeros.

    Muon's quintic Newton-Schulz iteration `x = x (aI + bA + cA^2)` with `A = x^T x`. First, x is divided by the root of the
    norm of A. This is at least its largest singular value, and nearer to it than the norm of x is: for a random chunk 2.4 times
    """
    a, b, c = COEFFICIENTS
    x = chunks
    for number in range(iterations):
        peak = x.abs().amax((1, 2), keepdim=True)
        scale = _power(peak if number == 0 else peak.clamp_(min=LARGEST_MIN))
        if number == 0:
            scale = torch.where(peak < SMALLEST, 0.0, scale)
        q = x.mul(scale).round_()
        gram = _products(q.mT, q).to(torch.float32)
        less = _power(gram.diagonal(dim1=1, dim2=2).amax(1).clamp_(min=GRAM_MIN)[:, None, None])
        whole = gram.mul(less).round_()
        # A = whole * unit, and x = q * root
        if number == 0:
            squares = whole.to(torch.float64).square_().sum((1, 2), keepdim=True)
            unit = root_(squares.clamp_(min=1.0)).reciprocal_()
            root = root_(unit.mul(less))
        else:
            root = scale.to(torch.float64).reciprocal_()
            unit = root.mul(root).div_(less)
        factor = gram.mul_(unit.mul(less).mul_(b).to(torch.float32))
        square = _products(whole, whole).to(torch.float32)
        factor.add_(square.mul_(unit.mul(unit).mul_(c).to(torch.float32)))
        factor.diagonal(dim1=1, dim2=2).add_(a)
        factor.mul_(FACTOR_UNITS).round_().clamp_(-FACTOR_MAX, FACTOR_MAX)
        x = _products(q, factor).to(torch.float32).mul_(root.div_(FACTOR_UNITS).to(torch.float32))
        x.clamp_(-ENTRY_MAX, ENTRY_MAX)
    return x.mul_(SCALE)


def _power(peak: Tensor) -> Tensor:
    """The power of two that brings positive normal fp32 to between 2^11 and 2^12, from its bits."""
    bits = peak.view(torch.int32) & _EXPONENT_BITS
    return ((2 * _BIAS + WHOLE_EXPONENT << _FRACTION_BITS) - bits).view(torch.float32)


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Matrix products of fp32 whole numbers [n, 64, 64], exact: fp64 on a CPU, int32 elsewhere, where fp64 may be slow."""
    with full_precision(one.device):
        if one.device.type == "cpu":
            return one.to(torch.float64) @ other.to(torch.float64)
        return _by_digits(one, other)


def _by_digits(one: Tensor, other: Tensor) -> Tensor:
    """The same by digits in fp32: the sums of their products stay below 2^19."""
    left, right = _digits(one, 1), _digits(other, 2)
    four = (left @ right).to(torch.int32)
    high, low = slice(0, CHUNK_SIDE), slice(CHUNK_SIDE, None)
    across = four[:, high, low] + four[:, low, high]
    return (four[:, high, high] * DIGIT + across) * DIGIT + four[:, low, low]


def _digits(whole: Tensor, dimension: int) -> Tensor:
    high = whole.mul(1 / DIGIT).round_()
    return torch.cat((high, whole.sub(high, alpha=DIGIT)), dimension)
