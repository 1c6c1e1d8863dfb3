"""A peer's private second moment: the peer divides gradients by their own running root mean square before the momentum.

This is the division of Adam (arXiv 1412.6980); the votes carry the sign of such a momentum. The second moment costs each peer
4 bytes a parameter and nothing on the wire. Votes, aggregate and replicated state have the same form without it, so peers with
and without it can train together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from node.optim.dtensor import is_dtensor

EPSILON = 1e-16
"""The number under the root, added to a square. Adam adds 1e-8 to the root instead. Under the root, a processor's instruction
for an inverse root serves. The difference matters only for gradients of about 1e-8."""


class SecondMoment:
    """`v = beta2 * v + (1 - beta2) * g^2`, and `g / sqrt(v / (1 - beta2^t) + 1e-16)`.

    t counts this peer's own gradients of the tensor, as torch's Adam does. So a tensor whose first gradient comes late starts
    as all tensors did.

    `compiled`: numba's kernel computes it, for CPU tensors. The kernel rounds in its own way, and may, as the state is private.
    """

    def __init__(self, parameters: Sequence[Tensor], beta2: float, *, compiled: bool = False) -> None:
        self.beta2, self._compiled = beta2, compiled
        self.counts = [0] * len(parameters)
        """How many gradients each tensor has had."""
        self.squares = [torch.zeros_like(local_part(parameter)) for parameter in parameters]

    def advance(self, gradients: Sequence[Tensor | None]) -> list[float]:
        """Count one gradient of each tensor that has one, which the caller divides next. Returns `1 - beta2^t` of each."""
        self.counts = [count + (g is not None) for count, g in zip(self.counts, gradients, strict=True)]
        return [1 - self.beta2 ** max(count, 1) for count in self.counts]

    @torch.no_grad()
    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        """Divide in place, fp32; None stays None. The gradients must be finite, because v keeps a part of every gradient."""
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
        """The state, which is private to the peer."""
        return {"counts": list(self.counts), "squares": self.squares}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state, by copy. Raises `ValueError` if the state belongs to other parameters."""
        squares = state["squares"]
        if [tuple(square.shape) for square in squares] != [tuple(square.shape) for square in self.squares]:
            raise ValueError("the saved second moment belongs to other parameters: load a state that this model saved")
        for mine, theirs in zip(self.squares, squares, strict=True):
            mine.copy_(theirs)
        self.counts = counts_of(state)


def counts_of(state: dict[str, Any]) -> list[int]:
    """The counts of a saved second moment. A state that an earlier version saved has one count for all tensors."""
    if "counts" not in state:
        return [int(state["count"])] * len(state["squares"])
    return [int(count) for count in state["counts"]]


def checked(beta2: float, *, magnitudes: bool) -> float:
    """The setting's value, if it is allowed; 0 is no second moment. Raises `ValueError` otherwise."""
    if not 0 <= beta2 < 1 or math.isnan(beta2):
        raise ValueError(f"beta2 {beta2} is not within 0 <= beta2 < 1")
    if beta2 and magnitudes:
        raise ValueError(
            "magnitudes and beta2 exclude each other: divided gradients have no size of their own; set one to 0"
        )
    return beta2


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: a DTensor's shard, or else all of it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()
