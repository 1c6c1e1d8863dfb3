"""DeMo and its family: what one peer does with its gradient, and what every peer does with everybody's votes.

The functions are the maths; `DeMo` only holds state between them. Momentum is private to the peer and lives in the DCT
domain, where the transform being orthonormal means that taking votes out of it is writing zeros. Parameters are the
replicated state: `DeMo.apply` gives the same bits on every device. It refuses gradients that are not finite and votes
that do not fit, before it changes anything; it knows no learning rate schedule, no other peer and no clock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from node.optim import aggregate, bits, dct, second_moment, transforms, votes
from node.optim.base import Base, BaseConfig
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout, Source, named_tensors
from node.optim.payload import Format, Selection
from node.optim.second_moment import SecondMoment
from node.optim.tiles import core_pairs
from node.optim.transforms import Transform
from node.optim.values import GRIDS

TILE_CHUNKS_CPU = 256
"""Chunks handled at a time on a CPU: 4 MiB of fp32, so that a tile and its scratch stay in the last cache level (192
to 512 were equal within noise and faster than 32 to 128: 50M parameters, 2 cores of an EPYC, 32 MiB of level 3)."""

TILE_CHUNKS_DEVICE = 8192
"""Chunks handled at a time elsewhere: 128 MiB of fp32, enough work for a launch, little memory beside the model."""

_SCRATCH_PLANES = 3
"""Tiles of scratch that `votes.select` needs. Reused: fresh memory costs a page fault for every 4 KiB, which took
longer than the arithmetic."""

BACKEND_VARIABLE = "SWARMENTUM_OPTIM_BACKEND"
"""Environment variable that chooses the step's backend: `auto` (numba on a CPU where it is installed) or one of them."""

BACKENDS = ("auto", "torch", "numba", "triton")

CLIP_EPSILON = 1e-6
"""As in torch's `clip_grad_norm_`."""


class NonFiniteGradient(ArithmeticError):  # noqa: N818
    """The gradient's norm is infinite or NaN; nothing was changed. The peer's own fault: it abstains from this step."""


@dataclass(frozen=True)
class DeMoConfig:
    """What a peer may set. Only `group_size` and `top_k` are its own: on the rest all peers of a run must agree.

    The default is DeMo with group votes and signs; every other combination is made of the parts that `payload`, `values`,
    `transforms` and `base` describe.
    """

    beta: float = 0.999
    """Decay of the momentum a step; the reference's default (0.95 made no difference, docs/architecture.md)."""
    beta2: float = 0.0
    """Decay of the peer's private second moment (`second_moment`), by which gradients are divided; 0 for none.

    The norm is not clipped then: no element is far above 1. Costs 4 bytes a parameter, and `propose` may write into `.grad`.
    """
    weight_decay: float = 0.0
    """Decoupled, times lr. None by default, as in the reference; every measurement in docs/architecture.md has none."""
    clip_norm: float | None = 1.0
    """Largest norm of the whole gradient, the usual 1 for language models; None for no limit."""
    group_size: int = 128
    """Coefficients that share a vote; one of `votes.GROUP_SIZES`. Each peer chooses by its uplink."""
    selection: Selection = "groups"
    """`groups`, or `topk`: the largest of a chunk, wherever they are."""
    top_k: int = 32
    """Components of a chunk, with `topk`; one of `topk.SIZES`. Each peer chooses by its uplink."""
    values: Literal["sign", "2bit", "8bit"] = "sign"
    """What a vote says beside where it is."""
    transform: str | Transform = "dct"
    """One of `transforms.NAMES`, or one made by `transforms.given`."""
    magnitudes: bool = False
    """Updates have the size that the peers' votes have (the median of a chunk's), instead of a root mean square of 1.

    The momentum then takes the gradient itself, without the learning rate. Only with base `sgd`.
    """
    refused: Literal["restore", "drop"] = "restore"
    """What becomes of votes that were not accepted: they stay in the momentum, or leave it as if they had been."""
    base: BaseConfig = BaseConfig()  # noqa: RUF009 - frozen
    """What moves the parameters, given the aggregate."""

    def __post_init__(self) -> None:
        self.form.votes_a_chunk(self.size)
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta {self.beta} is not within 0 <= beta < 1")
        second_moment.checked(self.beta2, magnitudes=self.magnitudes)
        if not (0 <= self.weight_decay < math.inf):
            raise ValueError(f"weight decay {self.weight_decay} is negative or not finite")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip norm {self.clip_norm} is not positive and finite")
        if isinstance(self.transform, str):
            transforms.named(self.transform)
        if self.magnitudes and self.base.name != "sgd":
            raise ValueError(f"magnitudes have no effect with base {self.base.name!r}: only sgd keeps sizes")
        if self.refused not in {"restore", "drop"}:
            raise ValueError(f"refused {self.refused!r} is neither restore nor drop")

    @property
    def size(self) -> int:
        """Group size or k, whichever the selection has."""
        return self.group_size if self.selection == "groups" else self.top_k

    @property
    def form(self) -> Format:
        """The payload's format. Raises `ValueError` for values that do not exist."""
        if self.values not in GRIDS:
            raise ValueError(f"values {self.values!r} are none of {', '.join(GRIDS)}")
        return Format(self.selection, GRIDS[self.values], self.magnitudes)

    @property
    def default_votes(self) -> bool:
        """Whether votes are those that have kernels of their own."""
        return self.form.plain and self.transform == "dct"

    @property
    def default_method(self) -> bool:
        """Whether votes and base are those that have kernels of their own."""
        return self.default_votes and self.base.name == "sign"


@dataclass(frozen=True)
class Votes:
    """One peer's proposal for one step: bytes of the method's format, and the norm before clipping.

    `size` is the group size, or k of top-k.
    """

    payload: bytes
    size: int
    gradient_norm: float


def accumulate(momentum: Tensor, coefficients: Tensor, beta: float, lr: float) -> Tensor:
    """`m = beta * m + lr * g` in place, fp32 [count, 64, 64] both; private, so its rounding is no contract.

    The learning rate is inside: with summed votes it decides which steps' gradients weigh more (docs/architecture.md).
    """
    return momentum.mul_(beta).add_(coefficients, alpha=lr)


def spend(momentum: Tensor, packed: Tensor, group_size: int) -> Tensor:
    """Zero the voted coefficients of `momentum` [count, 64, 64] in place; `packed` is uint8, see `votes.pack`."""
    where, _ = votes.indices(packed, group_size)
    momentum.view(-1, CHUNK_ELEMENTS).scatter_(1, where, 0.0)
    return momentum


def decay_factor(lr: float, weight_decay: float) -> float:
    """`1 - lr * wd`, computed once in fp32: part of the replicated update."""
    return float(np.float32(1) - np.float32(lr) * np.float32(weight_decay))


def apply_update(parameter: Tensor, direction: Tensor, lr: float, weight_decay: float) -> Tensor:
    """`p = p * (1 - lr * wd) - lr * direction` in place, fp32 of any shape; `lr` must be exact in fp32.

    Two roundings, the same on every device: one for the product with the factor, which is computed once in fp32, and
    one for the difference. `lr * direction` is exact (the direction is -1, 0 or 1), so a fused multiply-add in the
    second step changes nothing. A factor of one is skipped: multiplying by it changes no bit.
    """
    factor = decay_factor(lr, weight_decay)
    if factor != 1:
        parameter.mul_(factor)
    return parameter.add_(direction, alpha=-lr)


def total_norm(gradients: Sequence[Tensor | None]) -> float:
    """The norm of all gradients together; None and empty ones count as zeros."""
    there = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    return float(torch.nn.utils.get_total_norm(there)) if there else 0.0


def exact_float32(value: float) -> float:
    """`value`, which must be finite and exact in fp32 (it travels as 32 bits). Raises `ValueError` otherwise."""
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if not math.isfinite(value) or rounded != value:
        raise ValueError(f"learning rate {value!r} is not an fp32 value; round it first with float(numpy.float32(...))")
    return float(value)


class Backend(Protocol):
    """The heavy half of a step. Gradients and parameters are contiguous, on one device, in the layout's order."""

    name: str

    def norm(self, gradients: Sequence[Tensor | None]) -> float:
        """The norm of all gradients (fp32; None counts as zeros), infinite or NaN where one of them is."""
        ...

    def vote(
        self,
        gradients: Sequence[Tensor | None],
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        """`accumulate` the gradients' coefficients in `momentum` [chunks, 64, 64], and the packed votes of `select`.

        `step` is what `accumulate` calls lr. With `second`, gradients are divided first, in place or not. Raises
        `votes.NotANumber` once all momentum has been written.
        """
        ...

    def spend(self, momentum: Tensor, packed: Tensor, group_size: int) -> None:
        """See `spend`."""
        ...

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: float
    ) -> None:
        """`apply_update` by the direction of `ballots`, `(group_size, payload)` each.

        The same bits from every backend. Raises `VotesError` before anything is changed.
        """
        ...


@runtime_checkable
class Taking(Backend, Protocol):
    """A backend that can take votes out of the momentum while it is at hand: to spend them later is a pass of its own."""

    def take(
        self,
        gradients: Sequence[Tensor | None],
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        second: SecondMoment | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `vote` and then `spend`. Also the coefficients that were spent, fp32, valid until the next call.

        Where `votes.NotANumber` is raised, they are still in the momentum.
        """
        ...

    def put_back(self, momentum: Tensor, packed: Tensor, group_size: int, taken: Tensor) -> None:
        """The inverse of spending what `take` returned."""
        ...


class Portable:
    """`Backend` in torch operations, for any device, by tiles of chunks; only what is in the pool has a buffer."""

    name = "torch"

    def __init__(self, layout: Layout, device: torch.device, tile_chunks: int) -> None:
        self._layout = layout
        self._device = device
        self._tile_chunks = tile_chunks
        largest = min(tile_chunks, layout.chunks) * CHUNK_ELEMENTS
        self._scratch = torch.empty(_SCRATCH_PLANES * largest, dtype=torch.float32, device=device)
        # gradients on the way in, directions on the way out
        self._tile = torch.empty(largest, dtype=torch.float32, device=device).view(-1, CHUNK_SIDE, CHUNK_SIDE)
        self._pool = self._tile.new_empty(layout.chunks - layout.core_chunks, CHUNK_SIDE, CHUNK_SIDE)

    def norm(self, gradients: Sequence[Tensor | None]) -> float:
        return total_norm(gradients)

    def vote(
        self,
        gradients: Sequence[Tensor | None],
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        if second is not None:
            second.divide(gradients)
        packed = []
        self._pool.view(-1)[self._layout.pool_elements :].zero_()
        _fill(self._layout.pool_pairs(gradients, self._pool.view(-1)))
        for tile, scratch in self._tiles():
            gradient = self._room(tile)
            _fill(core_pairs(self._layout, gradients, tile, gradient))
            coefficients = dct.forward(gradient, out=gradient, scratch=scratch[0])
            accumulated = accumulate(momentum[tile], coefficients, beta, step)
            packed.append(votes.pack(*votes.select(accumulated, group_size, scratch), group_size))
        return torch.cat(packed)

    def spend(self, momentum: Tensor, packed: Tensor, group_size: int) -> None:
        spend(momentum, packed, group_size)

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: float
    ) -> None:
        total = aggregate.VoteSum(self._layout.chunks, self._device)
        for group_size, payload in ballots:
            total.add(group_size, payload)
        for tile, scratch in self._tiles():
            out = self._room(tile)
            sums = total.sums(tile.start, tile.stop, out=out.view(torch.int32))
            aggregate.direction(sums, out=out, scratch=scratch[:2])
            _update(core_pairs(self._layout, parameters, tile, out), lr, weight_decay)
        _update(self._layout.pool_pairs(parameters, self._pool.view(-1)), lr, weight_decay)

    def _room(self, tile: slice) -> Tensor:
        """A tile's gradients or directions: fp32 [count, 64, 64], of the pool its own."""
        first = tile.start - self._layout.core_chunks
        return self._tile[: tile.stop - tile.start] if first < 0 else self._pool[first : first + tile.stop - tile.start]

    def _tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of chunks, of cores or of the pool, each with scratch of its size: fp32 [3, count, 64, 64]."""
        chunks, cores = self._layout.chunks, self._layout.core_chunks
        starts = [*range(0, cores, self._tile_chunks), *range(cores, chunks, self._tile_chunks)]
        for first, last in pairwise([*starts, chunks]):
            room = self._scratch[: _SCRATCH_PLANES * (last - first) * CHUNK_ELEMENTS]
            yield slice(first, last), room.view(_SCRATCH_PLANES, last - first, CHUNK_SIDE, CHUNK_SIDE)


def _fill(pairs: Iterable[tuple[Tensor | None, Tensor]]) -> None:
    for part, chunk in pairs:
        if part is None:
            chunk.zero_()
        else:
            chunk.copy_(part)


def _update(pairs: Iterable[tuple[Tensor | None, Tensor]], lr: float, weight_decay: float) -> None:
    for part, direction in pairs:
        assert part is not None
        apply_update(part, direction, lr, weight_decay)


class DeMo:
    """The optimizer's state between steps: fp32 momentum `[chunks, 64, 64]`, and votes that the log has not judged.

    A step is `propose` (own gradient to own votes), then, once the log has spoken, `settle` (were they accepted?) and
    `apply` (everybody's). Parameters must be fp32, contiguous and on one device; tied weights count once.
    """

    def __init__(self, source: Source, config: DeMoConfig) -> None:
        named = named_tensors(source)
        if not any(tensor.numel() for _, tensor in named):
            raise ValueError("no parameter to train")
        for name, tensor in named:
            if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device != named[0][1].device:
                raise ValueError(f"parameter {name} is not contiguous fp32 on {named[0][1].device}")
        self.config = config
        self.layout = Layout.of(named)
        self.parameters = [tensor for _, tensor in named]
        self._device = self.parameters[0].device
        self._momentum = self.layout.empty(self._device).zero_()
        self._transform = (
            config.transform if isinstance(config.transform, Transform) else transforms.named(config.transform)
        )
        self._base = Base(config.base, self.layout, self._device)
        choice = os.environ.get(BACKEND_VARIABLE, "auto")
        compiled = choice in {"auto", "numba"} and self._device.type == "cpu" and find_spec("numba") is not None
        self._backend = self._choose_backend(choice, compiled=compiled)
        if self._device.type == "cpu":
            bits.compiled()  # now, and not in the middle of a round
        self._pending: tuple[int, Tensor] | None = None
        self._taken: Tensor | None = None  # the pending votes' coefficients, if they have left the momentum already
        self._second = SecondMoment(self.parameters, config.beta2, compiled=compiled) if config.beta2 else None

    @property
    def momentum(self) -> Tensor:
        """fp32 [chunks, 64, 64], in the transform's domain; pending votes are still in it. To be read only."""
        self._put_back()
        return self._momentum

    @property
    def base_state(self) -> dict[str, Tensor]:
        """What the base optimizer keeps about the aggregate, by name: replicated, fp32, may be written into. Often empty."""
        return self._base.state

    @property
    def replicated(self) -> list[Tensor]:
        """The replicated state in a fixed order: parameters, then the base's."""
        return [*self.parameters, *self.base_state.values()]

    @property
    def backend(self) -> str:
        """What takes the votes and, for the default method, applies them: "numba", "torch" or "triton"."""
        return self._backend.name

    @property
    def pending(self) -> bool:
        """Whether votes are out that `settle` has not been told about."""
        return self._pending is not None

    @torch.no_grad()
    def propose(self, lr: float) -> Votes:
        """Take the gradients from `.grad` (None counts as zero) into the momentum and vote for its largest entries.

        `lr` is exact in fp32. The votes stay in the momentum until `settle`, which must come before the next
        `propose`. Raises `NonFiniteGradient` or `ValueError` before anything is changed, and `votes.NotANumber` once
        the momentum itself has overflowed. Leaves `.grad` alone, unless there is a second
        moment (numba's kernels leave it alone then, too).
        """
        assert self._pending is None, "settle the last votes first"
        lr = exact_float32(lr)
        gradients = [_dense(parameter.grad) for parameter in self.parameters]
        norm = self._backend.norm(gradients)
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm}")
        limit = None if self._second is not None else self.config.clip_norm
        scale = clip_scale(norm, limit) * (1.0 if self.config.magnitudes else lr)
        size = self.config.size
        given = gradients, self._momentum, self.config.beta, scale, size, self._second
        if isinstance(self._backend, Taking):
            packed, self._taken = self._backend.take(*given)
        else:
            packed = self._backend.vote(*given)
        self._pending = (size, packed)
        return Votes(votes.to_bytes(packed), size, norm)

    @property
    def open_votes(self) -> Votes | None:
        """The proposal that `settle` has not been told about; its gradient norm is not kept."""
        if self._pending is None:
            return None
        return Votes(votes.to_bytes(self._pending[1]), self._pending[0], math.nan)

    @contextmanager
    def ahead(self, lr: float, rule: Literal["residual", "momentum", "votes"] = "residual") -> Iterator[None]:
        """Parameters where this peer expects them a step later, for the gradient of a step that is late.

        `p - lr * sign(inverse(m))`, with m the momentum without the votes that are out (`residual`, as DisTrO does), with
        them (`momentum`), or those votes alone. Undone bit for bit at the end; costs a copy of the parameters and one of
        the momentum. Private: nobody else computes it.
        """
        with torch.no_grad():
            start = [parameter.detach().clone() for parameter in self.parameters]
            expected = self.momentum.clone()
            if self._pending is not None and rule != "momentum":
                self._backend.spend(expected, self._pending[1], self._pending[0])
            if rule == "votes":
                expected = self._momentum - expected
            direction = self._transform.inverse(expected).sign_()
            for part, signs in self.layout.pairs([parameter.detach() for parameter in self.parameters], direction):
                assert part is not None
                part.sub_(signs, alpha=lr)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, was in zip(self.parameters, start, strict=True):
                    parameter.copy_(was)

    @torch.no_grad()
    def settle(self, accepted: bool) -> None:
        """Close the last proposal: accepted votes leave the momentum; what of refused ones, `config.refused` says."""
        assert self._pending is not None, "nothing was proposed"
        if not accepted and self.config.refused == "restore":
            self._put_back()
        elif self._taken is None:
            size, packed = self._pending
            self._backend.spend(self._momentum, packed, size)
        self._pending = self._taken = None

    @torch.no_grad()
    def _put_back(self) -> None:
        """Pending votes that have left the momentum return to it."""
        if self._taken is not None:
            assert self._pending is not None
            assert isinstance(self._backend, Taking)
            size, packed = self._pending
            self._backend.put_back(self._momentum, packed, size, self._taken)
            self._taken = None

    @torch.no_grad()
    def apply(self, contributions: Sequence[tuple[int, bytes]], lr: float) -> None:
        """Move the parameters by the votes of a log entry, `(size, payload)` each, at its learning rate.

        Bit-identical on every device, for every order of the contributions and number of threads. An empty entry
        still decays the weights. Raises `VotesError` or `ValueError` before anything is changed. Momentum is not
        touched.
        """
        lr = exact_float32(lr)
        parameters = [parameter.detach() for parameter in self.parameters]
        self._backend.apply(contributions, parameters, lr, self.config.weight_decay)

    @property
    def _method(self) -> str:
        """What the saved tensors mean: the momentum's domain, and whose the base's state is."""
        return f"{self._transform.name}, {self.config.base.name}"

    def state_dict(self) -> dict[str, Any]:
        """The private state: momentum, pending votes (or None) with their size, and the layout's digest.

        Without `base_state`, which is no peer's own.
        """
        size, packed = self._pending or (None, None)
        return {
            "layout": self.layout.digest().hex(),
            "method": self._method,
            "momentum": self.momentum,
            "pending": packed,
            "pending_size": size,
            "second": None if self._second is None else self._second.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, by copy. Raises `ValueError` if it belongs to another layout or does not fit."""
        if state["layout"] != self.layout.digest().hex():
            raise ValueError("the saved momentum belongs to another model: the layouts differ")
        if state["method"] != self._method:
            raise ValueError(f"the saved state is of method {state['method']!r}, not {self._method!r}")
        packed, size = state["pending"], state["pending_size"]
        if packed is not None:
            self.config.form.check(votes.to_bytes(packed), size, self.layout.chunks)
        if state["momentum"].shape != self._momentum.shape:
            raise ValueError("the saved momentum does not fit the layout")
        if (self._second is None) != (state["second"] is None):
            raise ValueError("the saved state and this optimizer do not both have a second moment")
        if self._second is not None:
            self._second.load_state_dict(state["second"])
        self._momentum.copy_(state["momentum"])
        self._taken = None
        self._pending = None if packed is None else (size, packed.to(self._device, copy=True))

    def _choose_backend(self, choice: str, *, compiled: bool) -> Backend:
        """What computes this method's step; `compiled`: with numba's kernels where there are any.

        Raises `ValueError` if `choice` is none, or cannot be had.
        """
        if choice not in BACKENDS:
            raise ValueError(f"{BACKEND_VARIABLE} is {choice!r}, not one of {', '.join(BACKENDS)}")
        if choice == "numba" and not compiled:
            raise ValueError(
                f"{BACKEND_VARIABLE} is numba, which serves a CPU and must be installed (swarmentum[node])"
            )
        tile_chunks = TILE_CHUNKS_CPU if self._device.type == "cpu" else TILE_CHUNKS_DEVICE
        config, kernels = self.config, None
        if compiled and config.default_votes:
            from node.optim.fused.backend import Fused

            kernels = Fused(self.layout)
        if not config.default_method:
            from node.optim.family import Family, Mixed

            family = Family(self.layout, self._device, tile_chunks, config.form, self._transform, self._base)
            return family if kernels is None else Mixed(kernels, family)
        if choice == "triton":
            if find_spec("triton") is None:
                raise ValueError(f"{BACKEND_VARIABLE} is triton, which is not installed: it comes with torch for CUDA")
            from node.optim.triton_step import Triton

            return Triton(self.layout, self._device)
        return kernels or Portable(self.layout, self._device, tile_chunks)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """As contiguous fp32; a copy only where it is not."""
    return None if gradient is None else gradient.detach().to(torch.float32).contiguous()


def clip_scale(norm: float, limit: float | None) -> float:
    return 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))
