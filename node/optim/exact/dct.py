"""The orthonormal DCT-II of 64x64 chunks, and its exact inverse on integers.

`forward` serves a peer's private momentum and may differ in its last bits between devices. `inverse_exact` is part of
the replicated state: it gives the same integers on every device, in any order of summation. It refuses approximate
matrix products (TF32, bf16, autocast), whatever the process has switched on. ADR 7.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.layout import CHUNK_SIDE

VOTE_SUM_MAX = 2
"""The default cap of vote sums: the most robust aggregate that was measured (ADR 11), and the bound of the proof below.

With sums within +-3 a partial sum of the second pass could pass 2^24. Larger caps take `transforms.Transform.inverse_exact`.
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
