"""DeMo v1 as its authors run it, as one peer's optimizer: the interface of `DeMo`, the maths of the paper.

    m <- beta m + lr g                      in the DCT domain of each chunk, with the gradient clipped as set.
    votes: the k largest |m| of each chunk, with their values to 16 bits.
    m <- m without the coefficients that the log accepted.
    p <- p (1 - lr wd) - lr sign(inverse DCT(mean over the peers that sent a coefficient)).

Source: arXiv 2411.19870v1, algorithm 1 and section 4; ADR 32. docs/optimizers.md says what differs from the published code.
Refuses gradients that are not finite and votes that do not fit, before it changes anything. No robustness is claimed: a mean is
as large as its largest sender wants it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from node.optim.laid_out import LaidOut
from node.optim.layout import Layout, Source, kinds_of, trainable_tensors
from node.optim.paper.coefficient_payload import Cut, PaperForm
from node.optim.paper.mean import directions, orthonormal
from node.optim.run_settings import RUN, check
from node.optim.saved import check_state, private_state
from node.optim.step import NonFiniteGradient, Votes, apply_update, as_tensor, clip_scale, exact_float32, total_norm
from node.optim.votes.groups import NotANumber
from node.optim.votes.topk import SIZES
from node.optim.voting import ParameterState
from protos.optimizer_defaults import PAPER_SETS


@dataclass(frozen=True)
class PaperConfig:
    """Settings of `[optimizer]` that `method = "paper"` has. Its authors clip no gradient."""

    beta: float = PAPER_SETS["beta"]
    weight_decay: float = RUN.weight_decay
    """Of all parameters."""
    clip_norm: float | None = None
    """Largest norm of the whole gradient; the authors' large runs have 1."""
    chunk: int = RUN.chunk
    """Longest side of a chunk."""
    top_k: int = RUN.top_k
    """Components of a chunk. Each peer may choose its own."""
    refused: str = RUN.refused

    def __post_init__(self) -> None:
        check(self, RUN)
        if self.top_k not in SIZES:
            raise ValueError(f"top_k {self.top_k} is none of {SIZES}")

    @property
    def size(self) -> int:
        """This peer's k."""
        return self.top_k


class PaperDeMo:
    """One peer's momentum, fp32 [chunks, high, wide] of each tensor in the DCT domain, and votes that are not judged yet."""

    backend = "torch"

    def __init__(self, source: Source, config: PaperConfig, kinds: Mapping[str, str] | None = None) -> None:
        """`kinds`: what modules say of the parameters (`layout.kinds_of`), if `source` has none."""
        named = trainable_tensors(source)
        self.config = config
        shapes = ((name, tuple(tensor.shape)) for name, tensor in named)
        self.layout = Layout.of_shapes(shapes, kinds_of(source) if kinds is None else kinds)
        self.parameters = [tensor for _, tensor in named]
        self._laid_out = LaidOut(named)
        self.form = PaperForm.of(named, config.chunk)
        self._device = self.parameters[0].device
        self._momentum = [
            torch.zeros(cut.chunks, cut.high, cut.wide, dtype=torch.float32, device=self._device)
            for cut in self.form.cuts
        ]
        self._pending: tuple[int, bytes] | None = None

    @property
    def size(self) -> int:
        """This peer's k, for its next votes."""
        return self.config.size

    @size.setter
    def size(self, size: int) -> None:
        self.config = replace(self.config, top_k=size)

    @property
    def base_state(self) -> dict[str, Tensor]:
        """None: the sign has no state."""
        return {}

    @property
    def replicated(self) -> list[Tensor]:
        """The replicated state: the parameters."""
        return self.parameters

    @property
    def pending(self) -> bool:
        """Whether votes are out that `settle` has not been told about."""
        return self._pending is not None

    @property
    def open_votes(self) -> Votes | None:
        """The proposal that `settle` has not been told about; its gradient norm is not kept."""
        return None if self._pending is None else Votes(self._pending[1], self._pending[0], math.nan)

    @torch.no_grad()
    def propose(self, lr: float, step: int | None = None) -> Votes:
        """Take the gradients from `.grad` (None counts as zero) into the momentum, and vote for its largest entries.

        `lr` is exact in fp32; the `step` has no effect. Raises `NonFiniteGradient` or `ValueError` before anything is changed,
        and `NotANumber` once the momentum itself has overflowed.
        """
        assert self._pending is None, "settle the last votes first"
        lr = exact_float32(lr)
        self.check_parameters()
        gradients = [None if p.grad is None else p.grad.detach().to(torch.float32) for p in self.parameters]
        norm = total_norm(gradients)
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm}")
        scale = clip_scale(norm, self.config.clip_norm) * lr
        chosen = []
        for cut, momentum, gradient in zip(self.form.cuts, self._momentum, gradients, strict=True):
            momentum.mul_(self.config.beta)
            if gradient is not None:
                momentum.add_(_transformed(cut, gradient), alpha=scale)
            chosen.append(_largest(cut, momentum, self.config.top_k))
        if not all(bool(torch.isfinite(values).all()) for _, values in chosen):
            raise NotANumber("the momentum has a coefficient that is not a number")
        payload = self.form.encode(chosen, self.config.top_k)
        self._pending = (self.config.top_k, payload)
        return Votes(payload, self.config.top_k, norm)

    @torch.no_grad()
    def settle(self, accepted: bool) -> None:
        """Close the last proposal: accepted votes leave the momentum; of others, `config.refused` decides."""
        assert self._pending is not None, "nothing was proposed"
        if accepted or self.config.refused == "drop":
            size, payload = self._pending
            taken = zip(self.form.cuts, self._momentum, self.form.decode(payload, size), strict=True)
            for cut, momentum, spoken in taken:
                where = torch.from_numpy(spoken.where).to(self._device)
                momentum.view(cut.chunks, cut.elements).scatter_(1, where, 0.0)
        self._pending = None

    @torch.no_grad()
    def apply(
        self,
        contributions: Sequence[tuple[int, bytes]],
        lr: float,
        step: int | None = None,
        authors: Sequence[bytes] = (),
    ) -> None:
        """Move the parameters by the votes of a log entry, `(k, payload)` each, at its learning rate; the rest has no effect.

        Bit-identical on every device, for every order of the contributions. Raises `VotesError` or `ValueError` before
        anything is changed.
        """
        lr = exact_float32(lr)
        self._laid_out.check_parameters()
        spoken = (self.form.decode(payload, size) for size, payload in contributions)
        found = directions(self.form.cuts, spoken, self._device)
        for parameter, direction in zip(self.parameters, found, strict=True):
            apply_update(parameter.detach(), direction.to(torch.float32), lr, self.config.weight_decay)

    def check_parameters(self) -> None:
        """As `Voting.check_parameters`."""
        self._laid_out.check_parameters()
        self._laid_out.check_gradients()

    def parameter_state(self) -> list[ParameterState]:
        """The live momentum of each parameter, [chunks, high, wide]."""
        assert self._pending is None, "settle the last votes first"
        return [ParameterState({"momentum": momentum}) for momentum in self._momentum]

    second_counts = None
    """The paper's method has no second moment."""

    def resume(self, pending: None, second_counts: None, steps: tuple[int, int]) -> None:
        """As `DeMo.resume`: this method counts nothing."""

    def ahead(self, lr: float) -> AbstractContextManager[None]:
        """The paper has no late gradients: a run refuses `overlap` with this method. Raises `ValueError`."""
        raise ValueError("the paper's method has no look-ahead (`overlap`)")

    @property
    def _method(self) -> str:
        return f"paper, chunks of {self.config.chunk}"

    def state_dict(self) -> dict[str, Any]:
        """The private state: momentum, pending votes (or None) with their k, and the layout's digest."""
        pending = (
            None if self._pending is None else (self._pending[0], as_tensor(self._pending[1], torch.device("cpu")))
        )
        momentum = torch.cat([momentum.reshape(-1) for momentum in self._momentum])
        return private_state(self.layout, self._method, momentum, pending, None)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, by copy. Raises `ValueError` if it belongs to another layout or method, or does not fit."""
        elements = sum(momentum.numel() for momentum in self._momentum)
        check_state(state, self.layout, self._method, [elements], second=False)
        packed, size = state["pending"], state["pending_size"]
        payload = None if packed is None else bytes(packed.cpu().numpy())
        if payload is not None:
            self.form.check(payload, size, 0)
        parts = state["momentum"].split([momentum.numel() for momentum in self._momentum])
        for momentum, part in zip(self._momentum, parts, strict=True):
            momentum.view(-1).copy_(part)
        self._pending = None if payload is None else (size, payload)


def _transformed(cut: Cut, gradient: Tensor) -> Tensor:
    """The DCT of each chunk: fp32 [chunks, high, wide]. Private, so its rounding is no contract."""
    down, across = _forward(cut.high, gradient.device), _forward(cut.wide, gradient.device)
    return down @ cut.split(gradient) @ across.T


@cache
def _forward(side: int, device: torch.device) -> Tensor:
    return torch.from_numpy(orthonormal(side)).to(device=device, dtype=torch.float32)


def _largest(cut: Cut, momentum: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each chunk: int64 indices [chunks, k], ascending, and their values."""
    flat = momentum.view(cut.chunks, cut.elements)
    where = flat.abs().topk(cut.sent(k), dim=1, sorted=False).indices.sort(dim=1).values
    return where, flat.gather(1, where)
