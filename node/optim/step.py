"""The maths of one step, as functions of tensors: a gradient joins the momentum, votes leave it, parameters move.

Momentum is private to a peer, so its rounding is no contract. Parameters are replicated: every operation on them rounds the
same way on every device. This module holds no state and knows no backend. This module refuses a learning rate that fp32 cannot
hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from node.optim.exact.orthogonal import cut_off
from node.optim.exact.transforms import VOTE_SUM_MAX, Transform
from node.optim.layout import CHUNK_ELEMENTS, Layout, core_pairs, tile_chunks
from node.optim.votes import groups as votes
from node.optim.votes import values
from node.optim.votes.payload import Ballot, Format

CLIP_EPSILON = 1e-6
"""As in torch's `clip_grad_norm_`."""

Decay: TypeAlias = float | Sequence[float]
"""Weight decay of all parameters, or of each."""
Contributions: TypeAlias = Sequence[tuple[int, bytes]]
"""The votes of a log entry, of each peer in it: their size (of groups, or k) and their payload."""


class NonFiniteGradient(ArithmeticError):  # noqa: N818
    """The gradient's norm is infinite or NaN, and nothing was changed. The peer abstains from this step."""


@dataclass(frozen=True)
class Votes:
    """One peer's proposal for one step: bytes of the method's format, and the norm before clipping.

    `size` is the group size, or k of top-k.
    """

    payload: bytes
    size: int
    gradient_norm: float


def as_tensor(payload: bytes, device: torch.device) -> Tensor:
    """A payload as a flat uint8 tensor on `device`."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def rounded_rate(value: float | Tensor) -> float:
    """A learning rate as fp32 has it; infinite if it is too large."""
    with np.errstate(over="ignore"):
        return float(np.float32(float(value)))


def exact_float32(value: float) -> float:
    """`value`, which must be finite and exact in fp32 (it travels as 32 bits). Raises `ValueError` otherwise."""
    rounded = rounded_rate(value)
    if not math.isfinite(value) or rounded != value:
        raise ValueError(f"learning rate {value!r} is not an fp32 value; round it first with float(numpy.float32(...))")
    return float(value)


# ---- a gradient on its way into the momentum -------------------------------------------------------------------------


def dense(gradient: Tensor | None) -> Tensor | None:
    """As contiguous fp32; a copy only if it is not."""
    return None if gradient is None else gradient.detach().to(torch.float32).contiguous()


def total_norm(gradients: Sequence[Tensor | None]) -> float:
    """The norm of all gradients together. None and empty tensors count as zeros."""
    there = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    return float(torch.nn.utils.get_total_norm(there)) if there else 0.0


def clip_scale(norm: float, limit: float | None) -> float:
    """The factor that clips a gradient of this norm to `limit`; 1 without a limit."""
    return 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))


def accumulate(momentum: Tensor, coefficients: Tensor, beta: float, lr: float) -> Tensor:
    """`m = beta * m + lr * g` in place, [count, 64, 64] both; `momentum` fp32 or bf16, `coefficients` fp32.

    The learning rate is inside, as in the authors' code: with summed votes it decides which steps' gradients weigh more.
    Returns what is kept, in fp32.
    """
    if momentum.dtype == torch.float32:
        return momentum.mul_(beta).add_(coefficients, alpha=lr)
    return momentum.copy_(momentum.float().mul_(beta).add_(coefficients, alpha=lr)).float()


# ---- votes on their way out of it ------------------------------------------------------------------------------------


def spend(momentum: Tensor, packed: Tensor, group_size: int) -> Tensor:
    """Zero the voted coefficients of `momentum` [count, 64, 64] in place; `packed` is a plain payload, uint8.

    The transform is orthonormal, so zeros in its domain take exactly the votes out. Silent votes do not matter: their
    whole group is zero.
    """
    where, _ = votes.indices(packed[: votes.vote_bytes(len(momentum), group_size)], group_size)
    momentum.view(-1, CHUNK_ELEMENTS).scatter_(1, where, 0.0)
    return momentum


def spend_ballot(flat: Tensor, ballot: Ballot, form: Format) -> None:
    """Take votes of any format out of `flat` momentum [chunks, 4096] in place. A coefficient with a silent vote stays.

    If votes have a common size, that size leaves. Otherwise the whole coefficient leaves. On the 8-bit grid the part
    beyond twice a typical vote does not count: it stays, and is voted for again.
    """
    loud, own = ballot.values != 0, flat.gather(1, ballot.where).float()
    if ballot.codes is None or form.grid is values.SIGN:
        most = int(VOTE_SUM_MAX * form.grid.unit)
        rest = torch.where(loud, values.clipped(own, ballot.values, form.grid, most), own)
    else:
        rest = own - ballot.values * values.scales(ballot.codes)[:, None]
    flat.scatter_(1, ballot.where, rest.to(flat.dtype))


# ---- parameters ------------------------------------------------------------------------------------------------------


def decay_factor(lr: float, weight_decay: float) -> float:
    """`1 - lr * wd`, computed once in fp32: part of the replicated update."""
    return float(np.float32(1) - np.float32(lr) * np.float32(weight_decay))


def decayed(parameters: Sequence[Tensor], lr: float, decay: Decay) -> float:
    """Decay parameters that each have their own weight decay. Returns the weight decay that is left for `apply_update`.

    The product rounds on its own there as well, so the bits are the same.
    """
    if isinstance(decay, int | float):
        return decay
    for parameter, own in zip(parameters, decay, strict=True):
        factor = decay_factor(lr, own)
        if factor != 1:
            parameter.mul_(factor)
    return 0.0


def apply_update(parameter: Tensor, direction: Tensor, lr: float, weight_decay: float) -> Tensor:
    """`p = p * (1 - lr * wd) - lr * direction` in place, fp32 of any shape; `lr` must be exact in fp32.

    Two roundings, the same on every device: one for the product with the factor, which is computed once in fp32, and
    one for the difference. `lr * direction` is exact (the direction is -1, 0 or 1), so a fused multiply-add in the
    second step changes nothing. A factor of one is skipped: multiplying by it changes no bit. What is then below
    `SMALLEST` becomes zero.
    """
    factor = decay_factor(lr, weight_decay)
    if factor != 1:
        parameter.mul_(factor)
    return cut_off(parameter.add_(direction, alpha=-lr))


def apply_real(parameter: Tensor, direction: Tensor, lr: float, weight_decay: float) -> Tensor:
    """As `apply_update` for a `direction` of any size, which becomes `lr * direction`: three roundings, never fused."""
    factor = decay_factor(lr, weight_decay)
    if factor != 1:
        parameter.mul_(factor)
    return cut_off(parameter.sub_(direction.mul_(lr)))


def look_ahead(layout: Layout, parameters: Sequence[Tensor], expected: Tensor, transform: Transform, lr: float) -> None:
    """`p -= lr * sign(inverse(expected))` in place, with `expected` [chunks, 64, 64], a tile of chunks at a time."""
    own, size = [parameter.detach() for parameter in parameters], tile_chunks(expected.device)
    for first in range(0, layout.core_chunks, size):
        tile = slice(first, min(first + size, layout.core_chunks))
        _move(core_pairs(layout, own, tile, transform.inverse(expected[tile].float()).sign_()), lr)
    if layout.chunks > layout.core_chunks:
        pool = transform.inverse(expected[layout.core_chunks :].float()).sign_()
        _move(layout.pool_pairs(own, pool.view(-1)), lr)


def _move(pairs: Iterable[tuple[Tensor | None, Tensor]], lr: float) -> None:
    for part, direction in pairs:
        assert part is not None
        part.sub_(direction, alpha=lr)
