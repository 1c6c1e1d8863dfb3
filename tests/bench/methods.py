"""The rows of `python -m tests.bench convergence`: how each way to train together makes a step, and what it sends.

A row is a name in `METHODS`, a class and its settings. The class is made from the model and the number of peers, and has
one method, `step`. Adding a row adds an entry; adding a way to train adds a class. It knows no data, schedule or seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from node.optim.demo import DeMo, DeMoConfig
from node.optim.layout import named_tensors
from node.report import allreduce_bytes

Backward: TypeAlias = Callable[[int], None]
"""Puts the gradient of a peer's next batch, at the model's present parameters, into `.grad`."""


class Training(Protocol):
    """All peers of one run, on one model: they are replicas, so one copy of the parameters serves for all."""

    def step(self, backward: Backward, lr: float) -> float:
        """Every peer once, then everybody's update. Returns the bytes that a peer sends, the mean over the peers."""
        ...


@dataclass(frozen=True)
class Method:
    """A row: `make(model, peers, **settings)` gives a `Training`."""

    make: Callable[..., Training]
    settings: Mapping[str, Any]


class AdamWDDP:
    """The mean gradient through an fp32 ring all-reduce, then AdamW; decay on matrices only, as is usual."""

    def __init__(
        self, model: nn.Module, peers: int, *, betas: tuple[float, float], weight_decay: float, clip_norm: float
    ) -> None:
        self._parameters = [tensor for _, tensor in named_tensors(model)]
        self._peers, self._clip_norm = peers, clip_norm
        groups = [
            {"params": [p for p in self._parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self._parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, betas=betas)

    def step(self, backward: Backward, lr: float) -> float:
        mean_gradient(self._parameters, backward, self._peers, self._clip_norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        return ring_bytes(self._parameters)


class SignumDDP:
    """The mean gradient through an fp32 ring all-reduce, then the sign of its momentum."""

    def __init__(self, model: nn.Module, peers: int, *, beta: float, clip_norm: float) -> None:
        self._parameters = [tensor for _, tensor in named_tensors(model)]
        self._peers, self._beta, self._clip_norm = peers, beta, clip_norm
        self._momenta = [torch.zeros_like(parameter) for parameter in self._parameters]

    def step(self, backward: Backward, lr: float) -> float:
        mean_gradient(self._parameters, backward, self._peers, self._clip_norm)
        with torch.no_grad():
            for parameter, momentum in zip(self._parameters, self._momenta, strict=True):
                assert parameter.grad is not None
                momentum.lerp_(parameter.grad, 1 - self._beta)
                parameter.sub_(momentum.sign(), alpha=lr)
        return ring_bytes(self._parameters)


class GroupVotes:
    """`node.optim.DeMo`: each peer's votes at its own group size; every vote is accepted in its step."""

    def __init__(self, model: nn.Module, peers: int, *, group_sizes: Sequence[int], **config: Any) -> None:
        sizes = [group_sizes[peer % len(group_sizes)] for peer in range(peers)]
        self._peers = [DeMo(model, DeMoConfig(group_size=size, **config)) for size in sizes]

    def step(self, backward: Backward, lr: float) -> float:
        contributions = []
        for index, peer in enumerate(self._peers):
            backward(index)
            proposal = peer.propose(lr)
            contributions.append((proposal.size, proposal.payload))
            peer.settle(accepted=True)
        self._peers[0].apply(contributions, lr)
        return sum(len(payload) for _, payload in contributions) / len(contributions)


class PreconditionedVotes:
    """Group votes of `g / sqrt(v)`, with Adam's second moment v kept privately by each peer: what is replicated is as
    before. The momentum then weighs parameters alike, and the norm needs no limit."""

    def __init__(self, model: nn.Module, peers: int, *, beta2: float, epsilon: float, **votes: Any) -> None:
        self._parameters = [tensor for _, tensor in named_tensors(model)]
        self._squares = [[torch.zeros_like(parameter) for parameter in self._parameters] for _ in range(peers)]
        self._beta2, self._epsilon, self._steps = beta2, epsilon, 0
        self._votes = GroupVotes(model, peers, clip_norm=None, **votes)

    def step(self, backward: Backward, lr: float) -> float:
        self._steps += 1

        def preconditioned(peer: int) -> None:
            backward(peer)
            for parameter, square in zip(self._parameters, self._squares[peer], strict=True):
                if parameter.grad is not None:
                    precondition(parameter.grad, square, self._beta2, self._epsilon, self._steps)

        return self._votes.step(preconditioned, lr)


def precondition(gradient: Tensor, square: Tensor, beta2: float, epsilon: float, steps: int) -> Tensor:
    """`v = beta2 * v + (1 - beta2) * g^2`, then `g / (sqrt(v / (1 - beta2^steps)) + epsilon)`, both in place."""
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return gradient.div_((square / (1 - beta2**steps)).sqrt_().add_(epsilon))


def mean_gradient(parameters: Sequence[Tensor], backward: Backward, peers: int, clip_norm: float) -> None:
    """Leave the mean of all peers' gradients in `.grad`, its norm at most `clip_norm`."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for peer in range(peers):
        backward(peer)
        for mean, parameter in zip(total, parameters, strict=True):
            if parameter.grad is not None:
                mean.add_(parameter.grad, alpha=1 / peers)
    for mean, parameter in zip(total, parameters, strict=True):
        parameter.grad = mean
    norm = nn.utils.clip_grad_norm_(parameters, clip_norm)
    if not math.isfinite(norm):
        raise ArithmeticError(f"gradient norm {float(norm)}")


def ring_bytes(parameters: Sequence[Tensor]) -> float:
    """What a peer sends in an fp32 ring all-reduce of all parameters (its limit for many peers)."""
    return allreduce_bytes(sum(parameter.numel() for parameter in parameters))


PRECONDITION: Final = {"beta2": 0.95, "epsilon": 1e-8}

METHODS: Final[Mapping[str, Method]] = {
    "adamw-ddp": Method(AdamWDDP, {"betas": (0.8, 0.99), "weight_decay": 0.0, "clip_norm": 1.0}),
    "signum-ddp": Method(SignumDDP, {"beta": 0.8, "clip_norm": 1.0}),
    **{f"groups-g{size}": Method(GroupVotes, {"group_sizes": (size,)}) for size in (8, 16, 32, 64, 128)},
    "adam-votes-g16": Method(PreconditionedVotes, {"group_sizes": (16,), "beta": 0.9, **PRECONDITION}),
    "adam-votes-g128": Method(PreconditionedVotes, {"group_sizes": (128,), "beta": 0.95, **PRECONDITION}),
    "mixed": Method(GroupVotes, {"group_sizes": (16, 16, 128, 128)}),
}
