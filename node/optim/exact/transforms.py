"""Orthonormal transforms of 64x64 chunks: forward in fp32 for the private momentum, inverse in exact integers for all peers.

A chunk X has the coefficients `T X T^T`. Any orthonormal T serves. The cosine transform is DeMo's (arXiv 2411.19870). Hadamard
costs no multiplications. The identity votes for parameters themselves, as SparseLoCo does (arXiv 2508.15706). A user may give a
matrix. The default method's inverse (`dct.inverse_exact`) is narrower and faster. Refuses a matrix that is not orthonormal,
because zeros in its domain would not take exactly the votes out of the momentum.
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

from node.optim.exact import dct
from node.optim.exact.dct import full_precision
from node.optim.layout import CHUNK_SIDE

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
        return dct.forward(chunks, out, scratch, self.basis(chunks.device))

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
    "dct": dct.basis_matrix,
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
