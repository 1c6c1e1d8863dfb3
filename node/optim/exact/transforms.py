"""Orthonormal transforms of 64x64 chunks: forward in fp32 for the private momentum, inverse in exact integers for all peers.

A chunk X has the coefficients `T X T^T`. Any orthonormal T serves. The cosine transform (DCT-II) is DeMo's (arXiv 2411.19870).
Hadamard costs no multiplications. The identity votes for parameters themselves, as SparseLoCo does (arXiv 2508.15706). A user
may give a matrix. Refuses one that is not orthonormal, because zeros in its domain would not take exactly the votes out of the
momentum.

`forward` may differ in its last bits between devices. `inverse_exact` is part of the replicated state: it gives the same
integers on every device, in any order of summation. The default method's, of the DCT alone, is narrower and faster than that of
a `Transform`. Refuses approximate matrix products (TF32, bf16, autocast), whatever the process has switched on. ADR 7.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.layout import CHUNK_SIDE

VOTE_SUM_MAX = 2
"""The default cap of vote sums: the most robust aggregate that was measured (ADR 11), and the bound of the proof below.

With sums within +-3 a partial sum of the second pass could pass 2^24. Larger caps take `Transform.inverse_exact`.
"""

CAP_MAX = 127
"""The largest cap of a run (ADR 33)."""

BASIS_SHIFT = 9
"""s: the integer basis is `round(2^s * D)`."""

MIDDLE_SHIFT = 1
"""r: between the passes, values are divided by `2^r` and rounded half to even. See `inverse_exact` for the proof."""

_IEEE = ("ieee", "none")
"""Settings under which a product is IEEE fp32; `none` is torch's default."""

EXACT_INTEGER_MAX = 2**24
"""fp32 holds every integer up to here; a sum whose partial sums stay below it is exact in any order, fused or not."""


@functools.cache
def basis_matrix() -> npt.NDArray[np.float64]:
    frequency, place = np.meshgrid(np.arange(CHUNK_SIDE), np.arange(CHUNK_SIDE), indexing="ij")
    # the angle is reduced in integers (one turn is 4 * 64), so that no cosine of a large number is asked for
    turn = (frequency * (2 * place + 1)) % (4 * CHUNK_SIDE)
    matrix: npt.NDArray[np.float64] = np.sqrt(2 / CHUNK_SIDE) * np.cos(np.pi * turn / (2 * CHUNK_SIDE))
    matrix[0] = np.sqrt(1 / CHUNK_SIDE)
    return matrix


@functools.cache
def basis(device: torch.device) -> Tensor:
    """D, fp32 [64 frequencies, 64 places]: orthonormal DCT-II, computed in fp64 on the CPU and rounded once."""
    return torch.tensor(basis_matrix(), dtype=torch.float32, device=device)


@functools.cache
def integer_basis(device: torch.device) -> Tensor:
    """E = round(2^9 * D), fp32 [64, 64] of integers; a test pins its hash (no entry is near a rounding tie)."""
    return torch.tensor(np.rint(2.0**BASIS_SHIFT * basis_matrix()), dtype=torch.float32, device=device)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """fp32 matrix products are IEEE fp32 inside, with every choice of the process. The choice is put back afterwards.

    The function changes only the settings of the matrix product itself (torch 2.9 and later), because they decide the product.
    torch's older getter raises in a process that has used the newer settings. The settings belong to the process, so only one
    thread may be in here at a time. The function also ends autocast, which would turn the operands to bf16.
    """
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    changed = [(setting, value) for setting, value in zip(settings, before, strict=True) if value not in _IEEE]
    for setting, _ in changed:
        setting.fp32_precision = "ieee"
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, value in changed:
            setting.fp32_precision = "none"  # as inherited, if the value came from a wider setting
            if setting.fp32_precision != value:
                setting.fp32_precision = value


def forward(
    chunks: Tensor, out: Tensor | None = None, scratch: Tensor | None = None, by: Tensor | None = None
) -> Tensor:
    """Coefficients `D X D^T` of fp32 chunks [count, 64, 64]; row and column of the result are frequencies.

    `by` takes the place of D, if given: fp32 [64, 64], orthonormal.
    `out` (may be `chunks`) and `scratch` have the shape of `chunks`; they are made if not given.
    """
    matrix = basis(chunks.device) if by is None else by
    out, scratch = _or_new(out, chunks), _or_new(scratch, chunks)
    with full_precision(chunks.device):
        torch.mm(chunks.view(-1, CHUNK_SIDE), matrix.T, out=scratch.view(-1, CHUNK_SIDE))
        return torch.bmm(matrix.expand(chunks.shape), scratch, out=out)


def inverse_exact(sums: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The inverse DCT of capped vote sums in integers: fp32 [count, 64, 64] -> fp32 [count, 64, 64] of integers.

    `sums` holds integers within +-2. With E the integer basis: `Y = E^T V`, `Y' = round(Y / 2)` (half to even),
    `Z = Y' E`. Z is the inverse times about `2^17`; only its sign is used. `out` (may be `sums`) and `scratch` have the
    shape of `sums`; they are made if not given.

    Why every step is exact. Products and sums of integers are exact in fp32, in any order and with or without fused
    multiply-add, while no partial sum reaches 2^24. Any partial sum is at most the sum of all absolute values:

    - C = max over columns n of sum_k |E[k, n]| = 3707. A test recomputes it. In any case, C < 64/8 * 2^9 + rounding, because
      D's columns have unit length.
    - First pass: |Y| <= 2 C = 7414. Dividing by two and rounding half to even is exact: Y/2 has one fractional bit.
    - Second pass: |Y'| <= 3707, so every partial sum is at most C * 3707 = 13 741 849 < 2^24 = 16 777 216.

    The bound is reached: a test builds the votes that reach it. No larger pair of shifts fits: 2s - r = 18 would pass
    2^24. With 2s - r = 17, s = 9 is best for the sparse votes of small swarms.

    These percentages are of signs that differ from an inverse in real numbers. The columns are 32, 128, 1024 and 4096 voted
    coefficients a chunk (200 random chunks each). Signs differ only where the direction is next to zero.

    - s = 9: .36 .26 .22 .22
    - s = 10: .55 .27 .14 .12
    - s = 11: 1.00 .49 .18 .11

    Rounding is half to even, because half up adds a constant to each row of Y'. The second pass would turn that constant into a
    push on the first columns of a chunk. With half to even, opposite votes give the opposite direction.
    """
    matrix = integer_basis(sums.device)
    out, scratch = _or_new(out, sums), _or_new(scratch, sums)
    with full_precision(sums.device):
        torch.bmm(matrix.T.expand(sums.shape), sums, out=scratch)
        scratch.mul_(2.0**-MIDDLE_SHIFT).round_()
        torch.mm(scratch.view(-1, CHUNK_SIDE), matrix, out=out.view(-1, CHUNK_SIDE))
    return out


def _or_new(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty_like(like) if tensor is None else tensor


# Any transform: of a name, or of a matrix that is given.

ORTHONORMAL_ERROR_MAX = 1e-6
"""How far `T T^T` may be from the identity, in any entry: fp32 rounding of an orthonormal matrix stays below it."""

SHIFT = 12
"""s of the exact inverse: with sums up to `SUM_MAX` every partial sum stays below 2^53, which fp64 holds exactly."""

SUM_MAX = 2**21
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Transform:
    """An orthonormal 64x64 matrix, rows being basis vectors. Make one with `named` or `given`."""

    name: str
    matrix: Matrix = field(repr=False, compare=False)

    @property
    def scale(self) -> int:
        """The factor between `inverse_exact` and the inverse in real numbers."""
        return int(4**SHIFT)

    def basis(self, device: torch.device) -> Tensor:
        """T, fp32 [64, 64]."""
        return _on_device(self, 0, torch.float32, device)

    def forward(self, chunks: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """Coefficients of fp32 chunks [count, 64, 64]. `out` (may be `chunks`) and `scratch` are made if not given."""
        if self.name == "identity":
            return chunks if out is None or out is chunks else out.copy_(chunks)
        return forward(chunks, out, scratch, self.basis(chunks.device))

    def inverse(self, coefficients: Tensor) -> Tensor:
        """Chunks of fp32 coefficients [count, 64, 64], in fp32: private, may differ in its last bits between devices."""
        matrix = self.basis(coefficients.device)
        with full_precision(coefficients.device):
            half = torch.bmm(matrix.T.expand(coefficients.shape), coefficients)
            return torch.mm(half.view(-1, CHUNK_SIDE), matrix).view(coefficients.shape)

    def inverse_exact(self, sums: Tensor) -> Tensor:
        """`scale` times the inverse of whole-number sums within +-SUM_MAX, in whole numbers: fp64 [count, 64, 64].

        The basis is `E = round(2^12 * T)`. Every partial sum is exact: |Z| <= SUM_MAX * C^2 <= 2^21 * (2^15 + 32)^2 < 2^53.
        C is the largest absolute column sum of E. C is at most 8 * 2^12 + 64 / 2, because a column of T has unit length.
        Metal has no fp64: there the result is on the CPU.
        """
        where = sums.device if sums.device.type != "mps" else torch.device("cpu")
        matrix = _on_device(self, SHIFT, torch.float64, where)
        whole = sums.to(where).to(torch.float64)
        with torch.no_grad(), torch.autocast(where.type, enabled=False):
            half = torch.bmm(matrix.T.expand(whole.shape), whole)
            return torch.mm(half.view(-1, CHUNK_SIDE), matrix).view(sums.shape)


@functools.lru_cache(maxsize=32)
def _on_device(transform: Transform, shift: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = transform.matrix if shift == 0 else np.rint(2.0**shift * transform.matrix)
    return torch.tensor(matrix, dtype=dtype, device=device)


def given(name: str, matrix: npt.ArrayLike) -> Transform:
    """A transform of one's own. Raises `ValueError` unless `matrix` is 64x64, finite and orthonormal."""
    whole = np.asarray(matrix, dtype=np.float64)
    if whole.shape != (CHUNK_SIDE, CHUNK_SIDE):
        raise ValueError(f"transform {name!r} is {whole.shape}, not a matrix of {CHUNK_SIDE} by {CHUNK_SIDE}")
    error = float(np.abs(whole @ whole.T - np.eye(CHUNK_SIDE)).max()) if np.isfinite(whole).all() else math.inf
    if error > ORTHONORMAL_ERROR_MAX:
        raise ValueError(
            f"transform {name!r} is not orthonormal: T T^T is off by {error:.2g}, at most {ORTHONORMAL_ERROR_MAX:g}"
        )
    return Transform(name, whole)


def _hadamard() -> Matrix:
    matrix = np.ones((1, 1))
    while len(matrix) < CHUNK_SIDE:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    whole: Matrix = matrix / math.sqrt(CHUNK_SIDE)
    return whole


_NAMED: dict[str, Callable[[], Matrix]] = {
    "dct": basis_matrix,
    "hadamard": _hadamard,
    "identity": lambda: np.eye(CHUNK_SIDE),
}
NAMES = tuple(_NAMED)


@functools.cache
def named(name: str) -> Transform:
    """One of NAMES. Raises `ValueError` for another."""
    if name not in _NAMED:
        raise ValueError(f"transform {name!r} is none of {', '.join(NAMES)}")
    return given(name, _NAMED[name]())
