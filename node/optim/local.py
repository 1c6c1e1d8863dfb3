"""Local steps: a peer takes H optimizer steps of its own, and what they moved is its gradient for the swarm (DiLoCo).

Douillard et al., arXiv 2311.08105; with DeMo's momentum, arXiv 2510.03371; with error feedback alone, arXiv 2508.15706. The
replicated parameters are only lent: `give_back` puts them back bit for bit and leaves `start - end` in `.grad`. AdamW's two
buffers are the peer's own and live on from one round to the next. Of sharded parameters each rank moves its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from node.optim.dtensor import is_dtensor
from node.optim.run_settings import LOCAL, RUN, check
from node.optim.second_moment import local_part
from node.optim.step import NonFiniteGradient


@dataclass(frozen=True)
class LocalConfig:
    """The inner optimizer, AdamW: private to a peer, though peers of a run use the same. Its settings are those of
    `[optimizer.local]`, and the run's `clip_norm`."""

    steps: int = LOCAL.steps
    """H; 1 is no local training: the gradient itself goes into the momentum."""
    lr: float = LOCAL.lr
    beta1: float = LOCAL.beta1
    beta2: float = LOCAL.beta2
    weight_decay: float = LOCAL.weight_decay
    clip_norm: float | None = RUN.clip_norm

    def __post_init__(self) -> None:
        check(self, LOCAL)
        check(self, RUN, but=("lr", "beta2", "weight_decay"))


class LocalSteps:
    """The inner AdamW over parameters that `borrow` and `give_back` bracket."""

    def __init__(self, parameters: Sequence[Tensor], config: LocalConfig) -> None:
        self.config = config
        self.parameters = list(parameters)
        self._start: list[Tensor] | None = None
        first = self.parameters[0]
        self._group = first.device_mesh.get_group() if is_dtensor(first) else None
        self._own = [local_part(parameter).detach() for parameter in self.parameters]  # the same memory
        self._fused = first.device.type in {"cpu", "cuda"}
        self._adamw = torch.optim.AdamW(
            self._own,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=self._fused,
        )

    def buffers(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Each parameter with AdamW's live buffers: `exp_avg` and `exp_avg_sq` of this rank's rows, and `step`.

        Without a call, AdamW makes them in its first step.
        """
        for own in self._own:
            if own not in self._adamw.state:
                step = torch.zeros((), dtype=torch.float32, device=own.device if self._fused else "cpu")
                fresh = {"step": step, "exp_avg": torch.zeros_like(own), "exp_avg_sq": torch.zeros_like(own)}
                self._adamw.state[own] = fresh
        pairs = zip(self.parameters, self._own, strict=True)
        return [(parameter, dict(self._adamw.state[own])) for parameter, own in pairs]

    @property
    def borrowed(self) -> bool:
        """Whether the parameters are away from the replicated state."""
        return self._start is not None

    @property
    def start(self) -> list[Tensor]:
        """The replicated parameters (this rank's rows of sharded ones), while they are borrowed. To be read only."""
        assert self._start is not None, "nothing is borrowed"
        return self._start

    @torch.no_grad()
    def borrow(self) -> None:
        """Remember the replicated parameters. Between two rounds a parameter may have got other memory."""
        assert self._start is None, "they are borrowed already"
        for own, parameter in zip(self._own, self.parameters, strict=True):
            own.data = local_part(parameter).detach()
        self._start = [own.clone() for own in self._own]

    @torch.no_grad()
    def step(self, lr_factor: float = 1.0) -> None:
        """One AdamW step on the gradients in `.grad`, with the learning rate times `lr_factor` (the run's schedule).

        Raises `NonFiniteGradient` before anything but `.grad` is changed.
        """
        assert self._start is not None, "borrow first"
        for own, parameter in zip(self._own, self.parameters, strict=True):
            own.grad = None if parameter.grad is None else local_part(parameter.grad)
        norm = self._norm()
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm}")
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._own, self.config.clip_norm, torch.tensor(norm))
        for group in self._adamw.param_groups:
            group["lr"] = self.config.lr * lr_factor
        self._adamw.step()

    def _norm(self) -> float:
        """The norm of the whole gradient; one collective call if parameters are sharded."""
        there = [own.grad for own in self._own if own.grad is not None and own.grad.numel()]
        norm = torch.nn.utils.get_total_norm(there) if there else torch.zeros((), device=self._own[0].device)
        if self._group is not None:
            square = norm.double().square()
            dist.all_reduce(square, group=self._group)
            norm = square.sqrt()
        return float(norm)

    @torch.no_grad()
    def give_back(self) -> None:
        """The replicated parameters again; `.grad` is how far the local steps went from them, downhill positive."""
        assert self._start is not None, "nothing is borrowed"
        for parameter, own, start in zip(self.parameters, self._own, self._start, strict=True):
            parameter.grad = _like(start - own, parameter)
            own.copy_(start)
        self._start = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, private to the peer."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Raises `ValueError` if it belongs to other parameters."""
        self._adamw.load_state_dict(state)


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    """A rank's rows as what the parameter is: a DTensor, or a tensor."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor  # loaded with the parameter

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
