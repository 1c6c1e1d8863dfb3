"""Local steps: a peer takes H optimizer steps of its own, and what they moved is its gradient for the swarm (DiLoCo).

Douillard et al., arXiv 2311.08105; with DeMo's momentum, arXiv 2510.03371; with error feedback alone, arXiv 2508.15706. The
replicated parameters are only lent: `give_back` puts them back bit for bit and leaves `start - end` in `.grad`. AdamW's two
buffers are the peer's own and live on from one round to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from node.optim.demo import NonFiniteGradient


@dataclass(frozen=True)
class LocalConfig:
    """The inner optimizer, AdamW: private to a peer, though peers of a run use the same."""

    steps: int = 1
    """H; 1 is no local training: the gradient itself goes into the momentum."""
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"{self.steps} local steps, at least 1")
        if not self.lr > 0:
            raise ValueError(f"local learning rate {self.lr} is not positive")


class LocalSteps:
    """The inner AdamW over parameters that `borrow` and `give_back` bracket."""

    def __init__(self, parameters: Sequence[Tensor], config: LocalConfig) -> None:
        self.config = config
        self.parameters = list(parameters)
        self._start: list[Tensor] | None = None
        self._adamw = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=self.parameters[0].device.type in {"cpu", "cuda"},
        )

    @property
    def borrowed(self) -> bool:
        """Whether the parameters are away from the replicated state."""
        return self._start is not None

    @property
    def start(self) -> list[Tensor]:
        """The replicated parameters, while they are borrowed. To be read only."""
        assert self._start is not None, "nothing is borrowed"
        return self._start

    @torch.no_grad()
    def borrow(self) -> None:
        """Remember the replicated parameters."""
        assert self._start is None, "they are borrowed already"
        self._start = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def step(self, lr_factor: float = 1.0) -> None:
        """One AdamW step on the gradients in `.grad`, with the learning rate times `lr_factor` (the run's schedule).

        Raises `NonFiniteGradient` before anything but `.grad` is changed.
        """
        assert self._start is not None, "borrow first"
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm}")
        for group in self._adamw.param_groups:
            group["lr"] = self.config.lr * lr_factor
        self._adamw.step()

    @torch.no_grad()
    def give_back(self) -> None:
        """The replicated parameters again; `.grad` is how far the local steps went from them, downhill positive."""
        assert self._start is not None, "nothing is borrowed"
        for parameter, start in zip(self.parameters, self._start, strict=True):
            parameter.grad = start - parameter
            parameter.copy_(start)
        self._start = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, private to the peer."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Raises `ValueError` if it belongs to other parameters."""
        self._adamw.load_state_dict(state)
