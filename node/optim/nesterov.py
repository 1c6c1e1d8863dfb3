"""A peer's own Nesterov momentum: what its gradients pass before they join the momentum that the votes are taken from.

    n <- mu n + g
    g <- g + mu n

DiLoCo's outer optimizer (arXiv 2311.08105) is this rule on the mean of all peers. The rule is linear: the mean of the peers'
results is the result of their mean. So each peer can apply it before the votes, and only parameters are replicated. Votes leave
the other momentum, and n keeps what it has. It costs a peer 4 bytes a parameter, and nothing on the wire. It refuses nothing:
the caller has checked that gradients are finite. ADR 33.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from node.optim.second_moment import local_part


class Nesterov:
    """n of every parameter, fp32 in its shape (of sharded ones this rank's rows), private to the peer."""

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.momenta = [torch.zeros_like(local_part(parameter)) for parameter in parameters]

    @torch.no_grad()
    def advance(self, scale: float = 1.0) -> None:
        """Replace `.grad` of every parameter, in place: `scale` times it is g. None counts as zeros, and becomes a tensor."""
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local_part(parameter.grad)
            momentum.mul_(self.decay).add_(own, alpha=scale)
            own.mul_(scale).add_(momentum, alpha=self.decay)

    def state_dict(self) -> dict[str, Any]:
        """Private to the peer."""
        return {"momenta": self.momenta}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, by copy. Raises `ValueError` if it belongs to other parameters."""
        momenta = state["momenta"]
        if [tuple(momentum.shape) for momentum in momenta] != [tuple(momentum.shape) for momentum in self.momenta]:
            raise ValueError("the saved Nesterov momentum belongs to other parameters")
        for mine, theirs in zip(self.momenta, momenta, strict=True):
            mine.copy_(theirs)
