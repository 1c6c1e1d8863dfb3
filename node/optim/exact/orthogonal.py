"""Muon's orthogonal matrices with the same bits on every device: of whole matrices, and of 64x64 chunks, each alone.

A product of rounded numbers differs between devices. fp64 holds whole numbers up to 2^53, but on a home GPU it is a 64th as
fast as fp32. Arithmetic by element is one operation at a time, and each is rounded once as IEEE 754 says. The module knows
neither layouts nor momentum nor votes. ADR 25.

Of whole matrices (`orthogonalised`), a row is `(128 * high + low) * 2^e`, with both digits within +-64. Tensor cores and VNNI
multiply such digits in int8 and add them up exactly in int32.

A chunk (`orthogonal_chunks`) has sums of 64 products only, of whole numbers of 12 bits. Numbers within +-4096 and +-8191 give
sums below 2^31, exact in int32 (x86 adds pairs of such products in one instruction), in fp64, and in fp32 by digits. Kernels
compute the same bits.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from node.optim.exact.transforms import EXACT_INTEGER_MAX, full_precision
from node.optim.layout import CHUNK_SIDE

COEFFICIENTS = tuple(float(np.float32(value)) for value in (3.4445, -4.7750, 2.0315))
"""Coefficients of the quintic iteration `aX + bXX^TX + c(XX^T)^2X` (K. Jordan, Muon)."""
DIGIT_MAX = 64
"""Largest magnitude of a digit. A processor whose int8 products add pairs in int16 (before VNNI) would cut larger sums off."""
SIDE_MAX = (2**31 - 1) // (2 * DIGIT_MAX**2)
"""Rows or columns of a matrix, at most: sums of twice as many products (two pairs of digits) stay below 2^31."""
ENTRY_MAX = 2.0
"""Largest entry of the iteration's matrices, so that all stays finite. In a sound iteration, entries and singular values are
below 1.3."""
_ALIGNED = 32
"""Rows and columns are filled up with zeros to a multiple of this: cuBLAS asks for 8, tensor cores work best with 32."""
_WHOLE_BITS = 22
"""The norm is taken in whole numbers up to 2^22: int64 holds the squares of a row."""
_SLICE = EXACT_INTEGER_MAX // DIGIT_MAX**2
"""Columns whose products fp32 adds up exactly, where there is no int8."""
_DITHER_ROWS = 256
"""After so many rows the dither starts again."""
_EXPONENT_BITS, _FRACTION_BITS, _BIAS = 0x7F800000, 23, 127
_SMALLEST = 2.0**-40
"""A row's largest magnitude counts as at least this: rows below it lose digits, and scales stay within fp32."""


class Digits(NamedTuple):
    """`(128 * high + low) / scale`: int8 [rows, columns], and fp32 powers of two [rows, 1]."""

    high: Tensor
    low: Tensor
    scale: Tensor


def orthogonalised(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Roughly `U V^T` of fp32 [height, width] = U S V^T, at a root mean square of about 1: the same bits on every device.

    Muon's quintic Newton-Schulz iteration. Zero gives zero. No side may be longer than `SIDE_MAX`.
    """
    assert max(matrix.shape) <= SIDE_MAX, f"a matrix of {tuple(matrix.shape)} has sums beyond 31 bits"
    peak = float(matrix.abs().max()) if matrix.numel() else 0.0
    assert math.isfinite(peak), "the aggregate is finite"
    if peak < SMALLEST:
        return torch.zeros_like(matrix)
    tall = matrix.shape[0] > matrix.shape[1]
    given = matrix.T if tall else matrix
    rows, columns = (-(-side // _ALIGNED) * _ALIGNED for side in given.shape)
    x = given.new_zeros(rows, columns)
    # whole numbers, and their norm, exact in int64
    _, exponent = math.frexp(peak)
    whole = given.to(torch.float64).mul_(2.0 ** (_WHOLE_BITS - exponent)).round_()
    norm = math.isqrt(sum(whole.to(torch.int64).square_().sum(1).tolist())) + 1
    # a product with the inverse, computed here: CUDA would divide so, a CPU not
    x[: given.shape[0], : given.shape[1]] = whole.mul_(1.0 / norm)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        own = _digits(x)
        x = _whole(own)  # numbers too small for the digits go: the products do not see them, and would let them grow
        rest = _square(own)  # XX^T; its diagonal is much larger, and is taken out
        diagonal = _pop_diagonal(rest)
        # (XX^T)^2 = rest^2 + rest * (d_i + d_j), and d_i^2 on the diagonal
        quartic = _square(_digits(rest)).add_(rest * (diagonal[:, None] + diagonal))
        square = _pop_diagonal(quartic).add_(diagonal * diagonal)
        inner = quartic.mul_(c).add_(rest.mul_(b))
        x.mul_(square.mul_(c).add_(diagonal.mul_(b)).add_(a)[:, None])
        x.add_(_product(inner, own)).clamp_(-ENTRY_MAX, ENTRY_MAX)
    result = x[: given.shape[0], : given.shape[1]] * float(np.float32(math.sqrt(max(matrix.shape))))
    return (result.T if tall else result).contiguous()


def _pop_diagonal(matrix: Tensor) -> Tensor:
    """The diagonal, which becomes zeros: fp32 [side]."""
    diagonal = matrix.diagonal().clone()
    matrix.fill_diagonal_(0)
    return diagonal


def _digits(matrix: Tensor) -> Digits:
    """fp32 to two digits, each row by a power of two that brings its largest magnitude to between 2^12 and 2^13.

    The power comes from the bits of the largest magnitude, so nothing is rounded, and no device waits for another. A dither
    comes before the rounding. Without the dither, equal numbers would all be rounded the same way. On a long side, that would
    add up to a singular value of its own.
    """
    peak = matrix.abs().amax(1, keepdim=True).clamp_(min=_SMALLEST).view(torch.int32) & _EXPONENT_BITS
    scale = ((2 * _BIAS + 12 << _FRACTION_BITS) - peak).view(torch.float32)
    whole = matrix.mul(scale)
    dither = _dither(matrix.shape[1], matrix.device)
    for first in range(0, len(whole), _DITHER_ROWS):
        part = whole[first : first + _DITHER_ROWS]
        part.add_(dither[: len(part)])
    whole.round_()
    high = whole.mul(2.0**-7).round_()
    low = whole.sub_(high, alpha=2**7)
    return Digits(high.to(torch.int8), low.to(torch.int8), scale)


@functools.lru_cache(maxsize=8)
def _dither(columns: int, device: torch.device) -> Tensor:
    """The dither, added before rounding, the same on every device: fp32 [256, columns] as if drawn from within +-1/2."""
    number = np.arange(_DITHER_ROWS * columns, dtype=np.uint64)
    with np.errstate(
        over="ignore"
    ):  # mixed as in G. Steele et al., "Fast splittable pseudorandom number generators", 2014
        number = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        number = (number ^ number >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        number = (number ^ number >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    drawn = ((number ^ number >> np.uint64(31)) >> np.uint64(48)).astype(np.float32)
    within = (drawn + np.float32(0.5)) * np.float32(2.0**-16) - np.float32(0.5)
    return torch.from_numpy(within).view(_DITHER_ROWS, columns).to(device)


def _whole(digits: Digits) -> Tensor:
    """The value of the digits: fp32, exact."""
    return digits.high.to(torch.float32).mul_(2.0**7).add_(digits.low).mul_(_inverse(digits.scale))


def _square(one: Digits) -> Tensor:
    """The product with one's own transpose, fp32."""
    high, low = one.high.T, one.low.T
    across = _sums(one.high, low)
    across.add_(across.T.clone())
    inverse = _inverse(one.scale)
    return _joined(_sums(one.high, high), across, _sums(one.low, low)).mul_(inverse).mul_(inverse.T)


def _product(one: Tensor, other: Digits) -> Tensor:
    """fp32. The scales of the right factor's rows go to the left one's columns first."""
    left = _digits(one * _inverse(other.scale).T)
    across = _sums(torch.cat((left.high, left.low), 1), torch.cat((other.low, other.high), 0))
    total = _joined(_sums(left.high, other.high), across, _sums(left.low, other.low))
    return total.mul_(_inverse(left.scale))


def _joined(high: Tensor, across: Tensor, low: Tensor) -> Tensor:
    """`2^14 * high + 2^7 * across + low` of int32, as fp32: the sums are rounded, the powers of two are exact."""
    total = high.to(torch.float32).mul_(2.0**7).add_(across.to(torch.float32))
    return total.mul_(2.0**7).add_(low.to(torch.float32))


def _inverse(scale: Tensor) -> Tensor:
    """The inverse of powers of two, exact."""
    return ((2 * _BIAS << _FRACTION_BITS) - scale.view(torch.int32)).view(torch.float32)


def _sums(one: Tensor, other: Tensor) -> Tensor:
    """The matrix product of int8 digits, exact: int32."""
    return _int8(one, other) if _multiplies_int8(one.device) else _sliced(one, other)


def _sliced(one: Tensor, other: Tensor) -> Tensor:
    """In fp32, as many columns at a time as it adds up exactly."""
    total = torch.zeros(one.shape[0], other.shape[1], dtype=torch.int32, device=one.device)
    with full_precision(one.device):
        for first in range(0, one.shape[1], _SLICE):
            part = slice(first, first + _SLICE)
            total += (one[:, part].to(torch.float32) @ other[part].to(torch.float32)).to(torch.int32)
    return total


def _int8(one: Tensor, other: Tensor) -> Tensor:
    """On CUDA with the right factor turned, the order that every GPU's int8 has."""
    return torch._int_mm(one, other.T.contiguous().T if other.is_cuda else other)


@functools.cache
def _multiplies_int8(device: torch.device) -> bool:
    """Whether the device has int8 products worth using, exact where they are hardest; asked once a process.

    The test's sums are beyond fp32, the largest digits stand side by side, and the right factor lies in either order. Without
    oneDNN, torch multiplies in plain loops, and fp32 is faster. Without VNNI, oneDNN's int8 is up to 70 times slower than fp32
    on the same digits, so a CPU's clock decides. Both ways give the same bits.
    """
    if device.type == "cpu":
        onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if not onednn or platform.machine() not in {"x86_64", "AMD64"}:
            return False
    columns = 4 * _SLICE
    digits = torch.randint(1, DIGIT_MAX + 1, (2, 64, columns), generator=torch.Generator().manual_seed(0))
    digits[:, :, : columns // 2] = DIGIT_MAX
    digits[1, ::2] *= -1
    wanted = (digits[0].double() @ digits[1].double().T).to(torch.int32)
    one, other = digits.to(torch.int8).to(device).unbind()
    try:
        found = [_int8(one, right) for right in (other.T, other.T.contiguous())]
    except (RuntimeError, NotImplementedError):
        return False
    exact = all(torch.equal(sums.cpu(), wanted) for sums in found)
    return exact and (device.type != "cpu" or _is_faster_in_int8(one, other.T))


def _is_faster_in_int8(one: Tensor, other: Tensor) -> bool:
    def seconds(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        begin = time.perf_counter()
        product(one, other)
        return time.perf_counter() - begin

    return min(seconds(_int8) for _ in range(3)) < min(seconds(_sliced) for _ in range(3))


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
    left, right = _whole_digits(one, 1), _whole_digits(other, 2)
    four = (left @ right).to(torch.int32)
    high, low = slice(0, CHUNK_SIDE), slice(CHUNK_SIDE, None)
    across = four[:, high, low] + four[:, low, high]
    return (four[:, high, high] * DIGIT + across) * DIGIT + four[:, low, low]


def _whole_digits(whole: Tensor, dimension: int) -> Tensor:
    high = whole.mul(1 / DIGIT).round_()
    return torch.cat((high, whole.sub(high, alpha=DIGIT)), dimension)


# Rounding by element, alike on every processor. Below SMALLEST numbers are zeros: a processor that flushes the smallest
# numbers (below 2^-126) to zero would otherwise differ from one that does not. ADR 25.


SMALLEST = 2.0**-100


def flush(state: Tensor) -> Tensor:
    """Set state below SMALLEST to zero, in place."""
    return state.masked_fill_(state.abs() < SMALLEST, 0.0)


def cut_off(parameter: Tensor) -> Tensor:
    """Set parameters below SMALLEST to zero in place. Their sign stays, as that of a parameter that is -0 does."""
    return parameter.mul_(parameter.abs() >= SMALLEST)


# Square roots, correctly rounded. torch's are not on a CPU: they come from a library of Intel's, and the last bits follow the
# processor. Of four million roots of fp32, 709,000 were wrong in their last bit on an AMD EPYC, and 27,000 on an Intel Xeon; of
# fp64 one in 70. An H200 made all of them right. ADR 7.


@torch.no_grad()
def root_(value: Tensor) -> Tensor:
    """The square root of fp32 or fp64, in place. A device that is no CPU takes fp32 through fp64: with more than twice the
    digits, a root that is nearly right is rounded to the right one."""
    if value.device.type == "cpu":
        there = value.numpy()
        np.sqrt(there, out=there)
        return value
    return value.sqrt_() if value.dtype == torch.float64 else value.copy_(value.double().sqrt_())


class ExactRoots(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, torch's own `sqrt` gives these roots."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.sqrt.default:
            return root_(args[0].clone())
        if func is torch.ops.aten.sqrt_.default:
            return root_(args[0])
        if func is torch.ops.aten.sqrt.out:
            return root_((kwargs or {})["out"].copy_(args[0]))
        return func(*args, **(kwargs or {}))
