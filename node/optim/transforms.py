"""Orthonormal transforms of 64x64 chunks: forward in fp32 for the private momentum, inverse in exact integers for everybody.

A chunk X has the coefficients `T X T^T`. Any orthonormal T does: the cosine transform is DeMo's (arXiv 2411.19870), Hadamard
costs no multiplications, the identity votes for parameters themselves (as SparseLoCo does, arXiv 2508.15706), and a user may
give a matrix. Refuses a matrix that is not orthonormal: votes could not leave the momentum by writing zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim import dct
from node.optim.dct import EXACT_INTEGER_MAX, VOTE_SUM_MAX, full_precision
from node.optim.layout import CHUNK_SIDE

ORTHONORMAL_ERROR_MAX = 1e-6
"""How far `T T^T` may be from the identity, in any entry: fp32 rounding of an orthonormal matrix stays below it."""

WIDE_SHIFT = 12
"""s of the wide inverse: with sums up to `WIDE_SUM_MAX` every partial sum stays below 2^53, which fp64 holds exactly."""

WIDE_SUM_MAX = 2**21
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Transform:
    """An orthonormal 64x64 matrix, rows being basis vectors. Make one with `named` or `given`."""

    name: str
    matrix: Matrix = field(repr=False, compare=False)
    shift: int
    """The narrow inverse uses `round(2^shift * T)`: the largest shift up to 9 whose sums fp32 holds exactly."""

    @property
    def narrow_scale(self) -> int:
        """What `inverse(sums, narrow)` multiplies the inverse in real numbers by: `2^(2 * shift - 1)`."""
        return int(2 ** (2 * self.shift - dct.MIDDLE_SHIFT))

    @property
    def wide_scale(self) -> int:
        """What `inverse_wide` multiplies the inverse in real numbers by."""
        return int(4**WIDE_SHIFT)

    def basis(self, device: torch.device) -> Tensor:
        """T, fp32 [64, 64]."""
        return _on_device(self, 0, torch.float32, device)

    def integer_basis(self, device: torch.device) -> Tensor:
        """round(2^shift * T), fp32 [64, 64] of integers."""
        return _on_device(self, self.shift, torch.float32, device)

    def forward(self, chunks: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """Coefficients of fp32 chunks [count, 64, 64]. `out` (may be `chunks`) and `scratch` are made if not given."""
        if self.name == "identity":
            return chunks if out is None or out is chunks else out.copy_(chunks)
        matrix = self.basis(chunks.device)
        out = torch.empty_like(chunks) if out is None else out
        scratch = torch.empty_like(chunks) if scratch is None else scratch
        with full_precision(chunks.device):
            torch.mm(chunks.view(-1, CHUNK_SIDE), matrix.T, out=scratch.view(-1, CHUNK_SIDE))
            return torch.bmm(matrix.expand(chunks.shape), scratch, out=out)

    def inverse(self, coefficients: Tensor) -> Tensor:
        """Chunks of fp32 coefficients [count, 64, 64], in fp32: private, may differ in its last bits between devices."""
        matrix = self.basis(coefficients.device)
        with full_precision(coefficients.device):
            half = torch.bmm(matrix.T.expand(coefficients.shape), coefficients)
            return torch.mm(half.view(-1, CHUNK_SIDE), matrix).view(coefficients.shape)

    def inverse_exact(self, sums: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """`narrow_scale` times the inverse of integer sums within +-2, in whole numbers: fp32 [count, 64, 64].

        The proof is `dct.inverse_exact`'s, with this matrix's own column sums C: |Y| <= 2 C, |Y / 2| <= C, and no partial
        sum of the second pass exceeds C^2 <= 2^24 (`shift` is chosen so).
        """
        matrix = self.integer_basis(sums.device)
        out = torch.empty_like(sums) if out is None else out
        scratch = torch.empty_like(sums) if scratch is None else scratch
        with full_precision(sums.device):
            torch.bmm(matrix.T.expand(sums.shape), sums, out=scratch)
            scratch.mul_(2.0**-dct.MIDDLE_SHIFT).round_()
            torch.mm(scratch.view(-1, CHUNK_SIDE), matrix, out=out.view(-1, CHUNK_SIDE))
        return out

    def inverse_wide(self, sums: Tensor) -> Tensor:
        """`wide_scale` times the inverse of integer sums within +-WIDE_SUM_MAX, in whole numbers: fp64 [count, 64, 64].

        Without rounding between the passes: |Z| <= WIDE_SUM_MAX * C^2 <= 2^21 * (2^15 + 32)^2 < 2^53. A column of T has
        unit length, so C <= 8 * 2^12 + 64 / 2. Metal has no fp64: there the result is on the CPU.
        """
        where = sums.device if sums.device.type != "mps" else torch.device("cpu")
        matrix = _on_device(self, WIDE_SHIFT, torch.float64, where)
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
    return Transform(name, whole, _narrow_shift(whole))


def _narrow_shift(matrix: Matrix) -> int:
    """The largest shift up to the cosine transform's for which the narrow inverse is exact."""
    for shift in range(dct.BASIS_SHIFT, 0, -1):
        column = int(np.abs(np.rint(2.0**shift * matrix)).sum(0).max())
        half = VOTE_SUM_MAX * column // 2**dct.MIDDLE_SHIFT
        if max(VOTE_SUM_MAX * column, column * half) <= EXACT_INTEGER_MAX:
            return shift
    raise AssertionError("a column of an orthonormal matrix has unit length")


def _hadamard() -> Matrix:
    matrix = np.ones((1, 1))
    while len(matrix) < CHUNK_SIDE:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    whole: Matrix = matrix / math.sqrt(CHUNK_SIDE)
    return whole


_NAMED: dict[str, Callable[[], Matrix]] = {
    "dct": dct._basis_numpy,
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
