"""A peer's private second moment: gradients are divided by their own running root mean square before they become momentum.

As in Adam (arXiv 1412.6980), of which the votes then carry the sign. It costs each peer 4 bytes a parameter and nothing on the
wire. Votes, aggregate and replicated state have the same form without it, so peers with and without it can train together.
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
    """`v = beta2 * v + (1 - beta2) * g^2`, and `g / sqrt(v / (1 - beta2^t) + 1e-16)`.

    t counts this peer's own gradients of the tensor, as torch's Adam does: one that had none for long starts as all did.

    `compiled`: in numba's kernel, for CPU tensors; it rounds in its own way, which is the peer's own business.
    """

    def __init__(self, parameters: Sequence[Tensor], beta2: float, *, compiled: bool = False) -> None:
        self.beta2, self._compiled = beta2, compiled
        self.counts = [0] * len(parameters)
        """Gradients that each tensor has had."""
        self.squares = [torch.zeros_like(local_part(parameter)) for parameter in parameters]

    def advance(self, gradients: Sequence[Tensor | None]) -> list[float]:
        """Count one gradient of each tensor that has one, which the caller is about to divide; `1 - beta2^t` of each."""
        self.counts = [count + (g is not None) for count, g in zip(self.counts, gradients, strict=True)]
        return [1 - self.beta2 ** max(count, 1) for count in self.counts]

    @torch.no_grad()
    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        """In place, fp32; None stays None. The gradients must be finite: what v has seen it keeps."""
        corrections = self.advance(gradients)
        given = zip(gradients, self.squares, corrections, strict=True)
        there = [(local_part(g), square, correction) for g, square, correction in given if g is not None]
        if self._compiled and all(own.is_contiguous() and own.dtype == torch.float32 for own, _, _ in there):
            from node.optim.backends.numba import moment

            moment.divide(there, self.beta2, EPSILON)
        else:
            for own, square, correction in there:
                square.mul_(self.beta2).addcmul_(own, own, value=1 - self.beta2)
                own.div_((square / correction).add_(EPSILON).sqrt_())

    def state_dict(self) -> dict[str, Any]:
        """Private to the peer."""
        return {"counts": list(self.counts), "squares": self.squares}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, by copy. Raises `ValueError` if it belongs to other parameters."""
        squares = state["squares"]
        if [tuple(square.shape) for square in squares] != [tuple(square.shape) for square in self.squares]:
            raise ValueError("the saved second moment belongs to other parameters")
        for mine, theirs in zip(self.squares, squares, strict=True):
            mine.copy_(theirs)
        self.counts = counts_of(state)


def counts_of(state: dict[str, Any]) -> list[int]:
    """Of a saved second moment; one saved by an earlier version has one count for all tensors."""
    if "counts" not in state:
        return [int(state["count"])] * len(state["squares"])
    return [int(count) for count in state["counts"]]


def checked(beta2: float, *, magnitudes: bool) -> float:
    """A setting's value: 0 for no second moment. Raises `ValueError`."""
    if not 0 <= beta2 < 1 or math.isnan(beta2):
        raise ValueError(f"beta2 {beta2} is not within 0 <= beta2 < 1")
    if beta2 and magnitudes:
        raise ValueError("magnitudes and beta2 exclude each other: divided gradients have no size of their own")
    return beta2


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: a DTensor's shard, or else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
