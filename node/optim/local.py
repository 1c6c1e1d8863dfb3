"""Local steps: a peer takes H optimizer steps of its own, and what they moved is its gradient for the swarm (DiLoCo).

Douillard et al., arXiv 2311.08105; with DeMo's momentum, arXiv 2510.03371; with error feedback alone, arXiv 2508.15706. The
replicated parameters are only lent: `give_back` puts them back bit for bit and leaves `start - end` in `.grad`. The inner
optimizer's buffers are the peer's own and live on from one round to the next. Of sharded parameters each rank moves its own
rows. Muon (arXiv 2505.23725: MuLoCo) is torch's; it takes whole matrices, so it does not work with sharded parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from node.optim.base import BaseConfig, is_table
from node.optim.laid_out import is_dtensor
from node.optim.layout import ParameterPlace
from node.optim.run_settings import LOCAL, RUN, check
from node.optim.second_moment import local_part
from node.optim.step import NonFiniteGradient


@dataclass(frozen=True)
class LocalConfig:
    """The inner optimizer: private to a peer, though peers of a run use the same. `muon` moves matrices by torch's Muon, with
    updates as large as AdamW's, and tables and vectors by AdamW. Its settings are those of `[optimizer.local]`, and the run's
    `clip_norm`."""

    steps: int = LOCAL.steps
    """H; 1 is no local training: the gradient itself goes into the momentum."""
    lr: float = LOCAL.lr
    beta1: float = LOCAL.beta1
    beta2: float = LOCAL.beta2
    weight_decay: float = LOCAL.weight_decay
    clip_norm: float | None = RUN.clip_norm
    optimizer: str = LOCAL.optimizer
    """`adamw` or `muon`."""

    def __post_init__(self) -> None:
        check(self, LOCAL)
        check(self, RUN, but=("lr", "beta2", "weight_decay"))


ADAMW_BUFFERS: Final = ("exp_avg", "exp_avg_sq")
MUON_BUFFER: Final = "momentum_buffer"


class LocalSteps:
    """The inner optimizer over parameters that `borrow` and `give_back` bracket."""

    def __init__(
        self, parameters: Sequence[Tensor], config: LocalConfig, places: Sequence[ParameterPlace] = ()
    ) -> None:
        """`places`: of the parameters in their layout, which tell tables; only for Muon. Raises `ValueError`."""
        self.config = config
        self.parameters = list(parameters)
        self._start: list[Tensor] | None = None
        first = self.parameters[0]
        self._group = first.device_mesh.get_group() if is_dtensor(first) else None
        self._own = [local_part(parameter).detach() for parameter in self.parameters]  # the same memory
        self._fused = first.device.type in {"cpu", "cuda"}
        maps = [False] * len(self._own)
        if config.optimizer == "muon":
            if is_dtensor(first):
                raise ValueError("local steps with muon need whole matrices, and the parameters are sharded: use adamw")
            maps = [len(place.shape) == 2 and not is_table(BaseConfig(), place) for place in places]
        rest, matrices = (
            [it for it, is_map in zip(self._own, maps, strict=True) if is_map is which] for which in (False, True)
        )
        self._muon = None
        if matrices:
            self._muon = torch.optim.Muon(
                matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        self._adamw = torch.optim.AdamW(
            rest or [torch.zeros((), device=first.device)],  # torch refuses an optimizer of nothing
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=self._fused,
        )
        self._is_map = dict(zip(self._own, maps, strict=True))

    def buffers(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Each parameter with its live buffers: AdamW's `exp_avg` and `exp_avg_sq` of this rank's rows, and `step`, or Muon's
        `momentum_buffer`.

        Without a call, the optimizers make them in their first step.
        """
        return [(parameter, self._buffers_of(own)) for parameter, own in zip(self.parameters, self._own, strict=True)]

    def _buffers_of(self, own: Tensor) -> dict[str, Tensor]:
        if self._muon is not None and self._is_map[own]:
            state: dict[str, Tensor] = self._muon.state[own]
            if MUON_BUFFER not in state:
                state[MUON_BUFFER] = torch.zeros_like(own)
            return dict(state)
        if own not in self._adamw.state:
            step = torch.zeros((), dtype=torch.float32, device=own.device if self._fused else "cpu")
            self._adamw.state[own] = {"step": step, **{name: torch.zeros_like(own) for name in ADAMW_BUFFERS}}
        return dict(self._adamw.state[own])

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
        """Remember the replicated parameters."""
        assert self._start is None, "they are borrowed already"
        self._find()
        self._start = [own.clone() for own in self._own]

    def _find(self) -> None:
        """A parameter may have got other memory since: `p.data = ...`, an average that is lent to it, a cast there and back."""
        for own, parameter in zip(self._own, self.parameters, strict=True):
            own.data = local_part(parameter).detach()

    @torch.no_grad()
    def step(self, lr_factor: float = 1.0) -> None:
        """One inner step on the gradients in `.grad`, with the learning rate times `lr_factor` (the run's schedule).

        Raises `NonFiniteGradient` before anything but `.grad` is changed.
        """
        assert self._start is not None, "borrow first"
        self._find()
        for own, parameter in zip(self._own, self.parameters, strict=True):
            own.grad = None if parameter.grad is None else local_part(parameter.grad)
        norm = self._norm()
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm}")
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                self._own, self.config.clip_norm, torch.tensor(norm, dtype=torch.float32)
            )
        for optimizer in (self._adamw, self._muon):
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["lr"] = self.config.lr * lr_factor
                optimizer.step()

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
    def give_back(self, *, gradient: bool = True) -> None:
        """The replicated parameters again; `.grad` is how far the local steps went from them, downhill positive.

        Without `gradient`, of a round that ends without votes: a parameter that has another shape now stays as it is.
        """
        assert self._start is not None, "nothing is borrowed"
        self._find()
        for parameter, own, start in zip(self.parameters, self._own, self._start, strict=True):
            if gradient:
                parameter.grad = _like(start - own, parameter)
            if own.shape == start.shape:
                own.copy_(start)
        self._start = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, private to the peer."""
        return self._adamw.state_dict() | ({} if self._muon is None else {"muon": self._muon.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Raises `ValueError` if it belongs to other parameters, or to another inner optimizer."""
        if ("muon" in state) != (self._muon is not None):
            raise ValueError("the saved state of local steps belongs to another inner optimizer")
        if self._muon is not None:
            self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict({key: value for key, value in state.items() if key != "muon"})


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    """A rank's rows as what the parameter is: a DTensor, or a tensor."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor  # loaded with the parameter

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
