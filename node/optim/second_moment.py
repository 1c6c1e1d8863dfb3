"""A peer's private second moment: gradients are divided by their own running root mean square before they become momentum.

As in Adam (arXiv 1412.6980), of which the votes then carry the sign. It costs each peer 4 bytes a parameter and nothing on the
wire: votes, aggregate and replicated state are as without it, so peers with and without it can train together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

EPSILON = 1e-16
"""Beside a square; under the root, unlike Adam's 1e-8 beside it, since a processor has an instruction for a root's inverse. It
only matters where gradients are about 1e-8."""


class SecondMoment:
    """`v = beta2 * v + (1 - beta2) * g^2`, and `g / sqrt(v / (1 - beta2^t) + 1e-16)`; t counts this peer's own gradients.

    `compiled`: in numba's kernel, for CPU tensors; it rounds in its own way, which is the peer's own business.
    """

    def __init__(self, parameters: Sequence[Tensor], beta2: float, *, compiled: bool = False) -> None:
        self.beta2, self._compiled = beta2, compiled
        self.count = 0
        self.squares = [torch.zeros_like(local_part(parameter)) for parameter in parameters]

    def advance(self) -> float:
        """Count one gradient, which the caller is about to divide; returns `1 - beta2^t`."""
        self.count += 1
        return 1 - self.beta2**self.count

    @torch.no_grad()
    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        """In place, fp32; None stays None. The gradients must be finite: what v has seen it keeps."""
        correction = self.advance()
        pairs = [(local_part(g), square) for g, square in zip(gradients, self.squares, strict=True) if g is not None]
        if self._compiled and all(own.is_contiguous() and own.dtype == torch.float32 for own, _ in pairs):
            from node.optim.fused import moment

            moment.divide([own for own, _ in pairs], [s for _, s in pairs], self.beta2, correction, EPSILON)
        else:
            for own, square in pairs:
                square.mul_(self.beta2).addcmul_(own, own, value=1 - self.beta2)
                own.div_((square / correction).add_(EPSILON).sqrt_())

    def state_dict(self) -> dict[str, Any]:
        """Private to the peer."""
        return {"count": self.count, "squares": self.squares}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, by copy. Raises `ValueError` if it belongs to other parameters."""
        squares = state["squares"]
        if [tuple(square.shape) for square in squares] != [tuple(square.shape) for square in self.squares]:
            raise ValueError("the saved second moment belongs to other parameters")
        for mine, theirs in zip(self.squares, squares, strict=True):
            mine.copy_(theirs)
        self.count = int(state["count"])


def checked(beta2: float, *, magnitudes: bool) -> float:
    """A setting's value: 0 for no second moment. Raises `ValueError`."""
    if not 0 <= beta2 < 1 or math.isnan(beta2):
        raise ValueError(f"beta2 {beta2} is not within 0 <= beta2 < 1")
    if beta2 and magnitudes:
        raise ValueError("magnitudes and beta2 exclude each other: divided gradients have no size of their own")
    return beta2


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank: a DTensor's shard, else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
