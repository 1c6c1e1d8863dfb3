"""The rows of `python -m tests.bench convergence`: how each way to train together makes a step, and what it sends.

A row is a name in `METHODS`, a class and its settings. The class is made from the model and the number of peers, and has
one method, `step`. Adding a row adds an entry; adding a way to train adds a class. It knows no data, schedule or seed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from node.optim.base import TABLES, BaseConfig, is_named_table
from node.optim.demo import DeMo, DeMoConfig
from node.optim.exact import transforms
from node.optim.layout import Layout, named_tensors
from node.optim.local import LocalConfig, LocalSteps
from node.optim.paper_demo import PaperConfig, PaperDeMo
from node.optim.parameter_groups import author_of
from node.optim.step import as_tensor, look_ahead, spend
from node.pictures import allreduce_bytes
from protos.optimizer_config import OptimizerConfig

Backward: TypeAlias = Callable[[int], None]
"""Puts the gradient of a peer's next batch, at the model's present parameters, into `.grad`."""


class Training(Protocol):
    """All peers of one run, on one model: they are replicas, so one copy of the parameters serves for all."""

    def step(self, backward: Backward, lr: float) -> float:
        """Every peer once, then everybody's update. Returns the bytes that a peer sends, the mean over the peers."""
        ...


RUN_SCHEDULE: Final = "run"
"""The schedule that a run has by default: 10 steps of warm-up, then a cosine to a tenth (coordinator/clock/rules.py)."""


@dataclass(frozen=True)
class Method:
    """A row: `make(model, peers, **settings)` gives a `Training`."""

    make: Callable[..., Training]
    settings: Mapping[str, Any]
    family: str = "votes"
    """The colour in the picture."""
    peers: int | None = None
    """Instead of what the table has."""
    batch: int | None = None
    """Samples of a peer in a step, instead of what the table has."""
    schedule: str | None = None
    """Instead of what the table has."""
    against: str = ""
    """What the names of its baselines end in: those with as many samples a step, and the same schedule."""


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


class MuonDDP:
    """The mean gradient through an fp32 ring all-reduce, then Muon: Nesterov momentum, orthogonalised, for all matrices.

    The recipe is that of Muon's author (K. Jordan): momentum .95, Nesterov, five quintic Newton-Schulz iterations; embeddings,
    head and vectors by AdamW. Two things differ. The iteration runs in fp32, not bf16. An update has a root mean square of 1,
    as an update by signs has, so that all rows share one grid of rates. AdamW takes the same rate.
    """

    def __init__(
        self, model: nn.Module, peers: int, *, momentum: float, betas: tuple[float, float], clip_norm: float
    ) -> None:
        named = named_tensors(model)
        self._parameters = [tensor for _, tensor in named]
        self._matrices = [tensor for name, tensor in named if tensor.dim() == 2 and not is_named_table(name, TABLES)]
        matrices = set(map(id, self._matrices))
        rest = [tensor for tensor in self._parameters if id(tensor) not in matrices]
        self._peers, self._momentum, self._clip_norm = peers, momentum, clip_norm
        self._buffers = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._adamw = torch.optim.AdamW(rest, betas=betas, weight_decay=0.0)

    def step(self, backward: Backward, lr: float) -> float:
        mean_gradient(self._parameters, backward, self._peers, self._clip_norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        with torch.no_grad():
            for matrix, buffer in zip(self._matrices, self._buffers, strict=True):
                assert matrix.grad is not None
                buffer.mul_(self._momentum).add_(matrix.grad)
                matrix.sub_(orthogonal(matrix.grad + self._momentum * buffer), alpha=lr)
        return ring_bytes(self._parameters)


def orthogonal(matrix: Tensor) -> Tensor:
    """fp32 [rows, columns] -> nearly its orthogonal factor, scaled to a root mean square of about 1; zeros stay zeros."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = wide / wide.norm().clamp_min(NORM_MIN)
    for _ in range(NEWTON_SCHULZ_STEPS):
        a, b, c = NEWTON_SCHULZ
        square = found @ found.T
        found = a * found + (b * square + c * square @ square) @ found
    back = found.T if matrix.shape[0] > matrix.shape[1] else found
    return back * math.sqrt(max(matrix.shape))


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


class Votes:
    """`node.optim.DeMo`: each peer's votes at its own size (group size or k); of `lost` votes the log takes none."""

    def __init__(
        self,
        model: nn.Module,
        peers: int,
        *,
        sizes: Sequence[int],
        base: Mapping[str, Any] | None = None,
        lost: float = 0.0,
        **config: Any,
    ) -> None:
        common = DeMoConfig(**config, base=BaseConfig(**(base or {})))
        self.peers: list[DeMo | PaperDeMo] = [
            DeMo(model, replace(common.with_size(sizes[peer % len(sizes)]), author=author_of(peer)))
            for peer in range(peers)
        ]
        self._begin(lost)

    def _begin(self, lost: float) -> None:
        self._lost, self._random = lost, torch.Generator().manual_seed(0)
        self._step = 1

    def step(self, backward: Backward, lr: float) -> float:
        for index, peer in enumerate(self.peers):
            backward(index)
            self.propose(peer, lr)
        return self.commit(lr)

    def propose(self, peer: DeMo | PaperDeMo, lr: float) -> None:
        peer.propose(lr, self._step)

    def commit(self, lr: float) -> float:
        """What follows once all peers have proposed."""
        contributions, authors, sent = [], [], 0
        for index, peer in enumerate(self.peers):
            votes = peer.open_votes
            assert votes is not None
            sent += len(votes.payload)
            accepted = float(torch.rand((), generator=self._random)) >= self._lost
            peer.settle(accepted)
            if accepted:
                contributions.append((votes.size, votes.payload))
                authors.append(author_of(index))
        self.peers[0].apply(contributions, lr, self._step, authors)
        self._step += 1
        return sent / len(self.peers)


class PaperVotes(Votes):
    """`node.optim.paper`: DeMo v1 as published, each peer with k components of a chunk."""

    def __init__(self, model: nn.Module, peers: int, **config: Any) -> None:
        self.peers = [PaperDeMo(model, PaperConfig(**config)) for _ in range(peers)]
        self._begin(lost=0.0)


class LateVotes(Votes):
    """A step's gradient is taken while the step before is exchanged: at the parameters as they were, or looking ahead."""

    def __init__(self, model: nn.Module, peers: int, *, ahead: str | None, **votes: Any) -> None:
        super().__init__(model, peers, **votes)
        self._ahead: Any = ahead
        self._parameters = [tensor for _, tensor in named_tensors(model)]
        self._late: list[list[Tensor | None]] = []

    def step(self, backward: Backward, lr: float) -> float:
        if not self._late:
            for index in range(len(self.peers)):
                backward(index)
                self._late.append(self._taken())
        for index, peer in enumerate(self.peers):
            for parameter, gradient in zip(self._parameters, self._late[index], strict=True):
                parameter.grad = gradient
            self.propose(peer, lr)
            with self._looking_ahead(peer, lr):
                backward(index)
            self._late[index] = self._taken()
        return self.commit(lr)

    def _looking_ahead(self, peer: DeMo, lr: float) -> AbstractContextManager[None]:
        """`residual` is what the program does; `momentum` and `votes` are rules that were compared with it."""
        if self._ahead is None:
            return nullcontext()
        return peer.ahead(lr) if self._ahead == "residual" else self._by_rule(peer, lr)

    @contextmanager
    def _by_rule(self, peer: DeMo, lr: float) -> Iterator[None]:
        expected = peer.momentum.clone()
        if self._ahead == "votes":
            open_votes = peer.open_votes
            assert open_votes is not None
            rest = expected.clone()
            spend(rest, as_tensor(open_votes.payload, rest.device), open_votes.size)
            expected -= rest
        start = [parameter.detach().clone() for parameter in peer.parameters]
        with torch.no_grad():
            look_ahead(peer.layout, peer.parameters, expected, transforms.named("dct"), lr)
        yield
        with torch.no_grad():
            for parameter, was in zip(peer.parameters, start, strict=True):
                parameter.copy_(was)

    def _taken(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in self._parameters]


class LocalRounds:
    """Each peer takes `local_steps` AdamW steps of its own; then where they led is exchanged: whole, or as votes.

    The step's learning rate is the inner one. The model shows the replicated parameters between rounds.
    """

    def __init__(
        self,
        model: nn.Module,
        peers: int,
        *,
        local_steps: int,
        outer_lr: float,
        outer_momentum: float = 0.0,
        betas: tuple[float, float] = (0.8, 0.99),
        inner: Literal["adamw", "muon"] = "adamw",
        **votes: Any,
    ) -> None:
        self._parameters = [tensor for _, tensor in named_tensors(model)]
        config, places = LocalConfig(local_steps, INNER_LR, *betas, optimizer=inner), Layout.of(model).places
        self._inner = [LocalSteps(self._parameters, config, places) for _ in range(peers)]
        self._where: list[list[Tensor]] = []
        self._done, self._outer_lr = 0, float(np.float32(outer_lr))
        self._votes = Votes(model, peers, clip_norm=None, **votes) if votes else None
        self._outer = torch.optim.SGD(
            self._parameters, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )

    def step(self, backward: Backward, lr: float) -> float:
        start = not self._done
        for index, inner in enumerate(self._inner):
            if start:
                inner.borrow()
                self._where.append(self._here())
            self._go(self._where[index])
            backward(index)
            inner.step(lr / INNER_LR)
            self._where[index] = self._here()
            self._go(inner.start)
        self._done = (self._done + 1) % self._inner[0].config.steps
        return 0.0 if self._done else self._exchange()

    def _exchange(self) -> float:
        total = [torch.zeros_like(parameter) for parameter in self._parameters]
        for index, inner in enumerate(self._inner):
            self._go(self._where[index])
            inner.give_back()
            if self._votes is not None:
                self._votes.propose(self._votes.peers[index], self._outer_lr)
            for mean, parameter in zip(total, self._parameters, strict=True):
                assert parameter.grad is not None
                mean.add_(parameter.grad, alpha=1 / len(self._inner))
        self._where = []
        if self._votes is not None:
            return self._votes.commit(self._outer_lr)
        for mean, parameter in zip(total, self._parameters, strict=True):
            parameter.grad = mean
        self._outer.step()
        return ring_bytes(self._parameters)

    def _here(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _go(self, where: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, where, strict=True):
            parameter.copy_(value)


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


NEWTON_SCHULZ_STEPS: Final = 5
NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
"""Of `aX + bXX^TX + c(XX^T)^2X` (K. Jordan, Muon)."""
NORM_MIN: Final = 1e-12

SECOND: Final = {"beta": 0.95, "beta2": 0.99}
"""Decay of the momentum and of the private second moment."""

SIZED: Final = {"magnitudes": True, "base": {"name": "sgd"}, "beta": 0.95}
INNER_LR: Final = 0.5
"""What the step's rate is divided by and multiplied with again, both exactly."""
LOCAL: Final = {"local_steps": 15, "outer_lr": 0.7}

MUON: Final = {"base": {"name": "muon"}, **SECOND}
CHUNKS: Final = {"name": "muon", "block": 64}
"""Muon of each chunk of 64 x 64 alone."""
INNER: Final = {"outer_lr": 0.7, "betas": (0.9, 0.95)}
"""As arXiv 2510.03371 publishes them."""
IN_THE_PEER: Final = {**INNER, **SIZED, "nesterov": 0.9, "values": "8bit"}
LESS: Final[Mapping[int, Mapping[str, Any]]] = {
    4: {"sizes": (1,), "selection": "full"},
    8: {"sizes": (1536,), "selection": "topk"},
    16: {"sizes": (640,), "selection": "topk"},
}
"""How many times fewer bytes than fp32 of all parameters, and the votes that take as many."""
ADAMW_DDP: Final = {"betas": (0.8, 0.99), "weight_decay": 0.0, "clip_norm": 1.0}
MUON_DDP: Final = {"momentum": 0.95, "betas": (0.8, 0.99), "clip_norm": 1.0}
BASELINES: Final = ("adamw-ddp", "muon-ddp")
"""Without a family: lines in the picture. A method is compared with those whose names end as its `against` says."""


def _default(more: Mapping[str, Any] | None = None, **where: Any) -> Method:
    """What `run create` writes, and `DeMoOptimizer` does for a module; `more`: a peer's own settings."""
    run = OptimizerConfig()
    base = run.base.model_dump(include={"name", "block", "output", "iterations"})
    settings = {"sizes": (run.group_size,), "base": base, "beta": run.beta, "beta2": run.beta2}
    return Method(Votes, settings | dict(more or {}), "muon votes", **where)


def _swarms(against: str, **where: Any) -> dict[str, Method]:
    """The default, votes applied by their signs, Muon votes, and votes whose sums peers take (`flat`: one place in so many,
    with a cap): with more peers, or another schedule."""
    base = {**CHUNKS, "iterations": 2}
    return {
        **{
            f"flat-{one_in}-cap{cap}{against or '-p16'}": Method(
                Votes,
                {"sizes": (one_in,), "selection": "random", "cap": cap, "base": base, **SECOND},
                "replication",
                against=against,
                **where,
            )
            for one_in, cap in ((16, 2), (16, 7), (4, 7))
        },
        f"default{against or '-p16'}": _default(against=against, **where),
        f"default-g16{against or '-p16'}": _default({"sizes": (16,)}, against=against, **where),
        f"signs{against or '-p16'}": Method(Votes, {"sizes": (128,), **SECOND}, against=against, **where),
        f"muon-votes-g16{against or '-p16'}": Method(
            Votes, {"sizes": (16,), **MUON}, "muon votes", against=against, **where
        ),
    }


def _baselines(against: str, **where: Any) -> dict[str, Method]:
    return {
        f"adamw-ddp{against}": Method(AdamWDDP, ADAMW_DDP, "uncompressed", against=against, **where),
        f"muon-ddp{against}": Method(MuonDDP, MUON_DDP, "uncompressed", against=against, **where),
    }


def _diloco_demo(steps: int) -> dict[str, Method]:
    """DiLoCo with so many local steps, and DiLoCo with DeMo at 4, 8 and 16 times fewer bytes (arXiv 2510.03371).

    `plain` is the row of 16 times without Nesterov momentum.
    """
    rounds = {"local_steps": steps}
    whole = Method(LocalRounds, {**rounds, **INNER, "outer_momentum": 0.9}, "local steps")
    less = {
        f"diloco-demo-h{steps}-x{times}": Method(LocalRounds, {**rounds, **IN_THE_PEER, **votes}, "local steps")
        for times, votes in LESS.items()
    }
    plain = {**rounds, **IN_THE_PEER, **LESS[16], "nesterov": 0.0}
    less[f"diloco-demo-h{steps}-plain"] = Method(LocalRounds, plain, "local steps")
    return {f"diloco-h{steps}": whole, **less}


def _inner_muon(steps: int) -> dict[str, Method]:
    """DiLoCo and SparseLoCo with AdamW and with Muon in the peers (MuLoCo, arXiv 2505.23725)."""
    rounds = {"local_steps": steps, **INNER}
    sparse = {"outer_lr": 1.0, "sizes": (64,), "selection": "topk", "values": "2bit", "transform": "identity", **SIZED}
    return {
        f"{name}-h{steps}-{inner}": Method(LocalRounds, {**rounds, **settings, "inner": inner}, "local steps")
        for inner in ("adamw", "muon")
        for name, settings in (("mean", {"outer_momentum": 0.9}), ("sparse", sparse))
    }


def _chunkwise(size: int, iterations: int, output: str = "real") -> Method:
    base = {**CHUNKS, "output": output, "iterations": iterations}
    return Method(Votes, {"sizes": (size,), "base": base, **SECOND}, "muon votes")


DRAWN: Final = ("random", "striding", "slicing")
"""Replication schemes of arXiv 2502.06728, at the bytes of group votes of 128; `full-h16` is the fourth."""

METHODS: Final[Mapping[str, Method]] = {
    **_baselines(""),
    "signum-ddp": Method(SignumDDP, {"beta": 0.8, "clip_norm": 1.0}, "uncompressed"),
    **{f"groups-g{size}": Method(Votes, {"sizes": (size,)}, "gradient votes") for size in (8, 16, 32, 64, 128)},
    "mixed": Method(Votes, {"sizes": (16, 16, 128, 128)}, "gradient votes"),
    "top-32, signs": Method(Votes, {"sizes": (32,), "selection": "topk"}, "top-k"),
    **{f"adam-votes-g{size}": Method(Votes, {"sizes": (size,), **SECOND}) for size in (8, 16, 32, 64, 128)},
    "adam-votes-topk-32": Method(Votes, {"sizes": (32,), "selection": "topk", **SECOND}, "top-k"),
    "adam-votes-g16-2bit": Method(Votes, {"sizes": (16,), "values": "2bit", **SECOND}),
    "adam-votes-g16-8bit": Method(Votes, {"sizes": (16,), "values": "8bit", **SECOND}),
    "adam-votes-g16-hadamard": Method(Votes, {"sizes": (16,), "transform": "hadamard", **SECOND}),
    "adam-votes-g16-identity": Method(Votes, {"sizes": (16,), "transform": "identity", **SECOND}),
    **{
        f"v2-{base['name']}-g16": Method(
            Votes, {"sizes": (16,), "base": base, **SECOND}, "muon votes" if base["name"] == "muon" else "votes"
        )
        for base in ({"name": "sgd", "momentum": 0.5}, {"name": "adamw", "beta1": 0.0, "beta2": 0.95}, {"name": "muon"})
    },
    "v2-muon-g128": Method(Votes, {"sizes": (128,), **MUON}, "muon votes"),
    "default": _default(),
    "default-g16": _default({"sizes": (16,)}),
    "default-small": _default({"second_moment": "factored", "momentum_type": "bf16"}),
    "muon64-g128-i5": _chunkwise(128, 5),
    "muon64-sign-g128": _chunkwise(128, 2, "sign"),
    "muon64-g16": _chunkwise(16, 2),
    **{
        name: Method(
            Votes,
            {"sizes": (16,), "selection": "independent", "cap": 4, "base": {**CHUNKS, "iterations": iterations}}
            | {**SECOND, "beta": beta},
            "muon votes",
        )
        for name, iterations, beta in (("muon64-own-16", 2, 0.95), ("muon64-own-16-i3", 3, 0.85))
    },
    **{f"paper-k{k}": Method(PaperVotes, {"top_k": k}, "paper") for k in (32, 8)},
    "paper-k32-clip": Method(PaperVotes, {"top_k": 32, "clip_norm": 1.0}, "paper"),
    **{
        f"paper-k{k}-beta95-clip": Method(PaperVotes, {"top_k": k, "beta": 0.95, "clip_norm": 1.0}, "paper")
        for k in (32, 8)
    },
    "late-g16": Method(LateVotes, {"sizes": (16,), "ahead": None, **SECOND}, "late or lost"),
    **{
        f"late-g16-{rule}": Method(LateVotes, {"sizes": (16,), "ahead": rule, **SECOND}, "late or lost")
        for rule in ("residual", "momentum", "votes")
    },
    **{
        f"lost30-g16-{refused}": Method(
            Votes, {"sizes": (16,), "lost": 0.3, "refused": refused, **SECOND}, "late or lost"
        )
        for refused in ("restore", "drop")
    },
    "diloco": Method(LocalRounds, {**LOCAL, "outer_momentum": 0.9}, "local steps"),
    "diloco-demo-g16": Method(LocalRounds, {**LOCAL, "sizes": (16,), "values": "8bit", **SIZED}, "local steps"),
    "sparseloco-64": Method(
        LocalRounds,
        {**LOCAL, "sizes": (64,), "selection": "topk", "values": "2bit", "transform": "identity", **SIZED},
        "local steps",
    ),
    **_diloco_demo(10),
    **_diloco_demo(30),
    **_inner_muon(15),
    **_inner_muon(30),
    **{
        f"{scheme}-16": Method(Votes, {"sizes": (16,), "selection": scheme, **SECOND}, "replication")
        for scheme in DRAWN
    },
    # at the bytes of group votes of 128, and of 512 and 32; sums of shared places may go further than 2
    **{
        f"{selection}-{one_in}-cap{cap}": Method(
            Votes, {"sizes": (one_in,), "selection": selection, "cap": cap, **SECOND}, "replication"
        )
        for selection, one_in, cap in (
            ("random", 16, 7),
            ("random", 4, 2),
            ("random", 4, 7),
            ("random", 64, 7),
            ("independent", 16, 7),
        )
    },
    **{
        f"independent-{one_in}": Method(
            Votes, {"sizes": (one_in,), "selection": "independent", **SECOND}, "replication"
        )
        for one_in in (4, 16)
    },
    "independent-16-muon": Method(Votes, {"sizes": (16,), "selection": "independent", **MUON}, "replication"),
    "random-16-muon": Method(Votes, {"sizes": (16,), "selection": "random", **MUON}, "replication"),
    **{
        f"{scheme}-16-identity": Method(
            Votes, {"sizes": (16,), "selection": scheme, "transform": "identity", **SECOND}, "replication"
        )
        for scheme in DRAWN
    },
    "full-h16": Method(
        LocalRounds, {**LOCAL, "local_steps": 16, "sizes": (1,), "selection": "full", **SIZED}, "replication"
    ),
    # 16 peers with a sample each where 4 had 4: as many samples a step, so the same baselines
    **_swarms("", peers=16, batch=1),
    **_baselines("-p64", peers=64, batch=1),
    **_swarms("-p64", peers=64, batch=1),
    **_baselines("-run-schedule", schedule=RUN_SCHEDULE),
    **_swarms("-run-schedule", schedule=RUN_SCHEDULE),
}
