"""DeMo v1 as its authors run it, as one peer's optimizer: the interface of `DeMo`, the maths of the paper.

    m <- beta m + lr g                      in the DCT domain of each chunk, with the gradient clipped as set.
    votes: the k largest |m| of each chunk, with their values to 16 bits.
    m <- m without the coefficients that the log accepted.
    p <- p (1 - lr wd) - lr sign(inverse DCT(mean over the peers that sent a coefficient)).

Source: arXiv 2411.19870v1, algorithm 1 and section 4; ADR 32. docs/optimizers.md says what differs from the published code.
Refuses gradients that are not finite and votes that do not fit, before it changes anything. No robustness is claimed: a mean
is as large as its largest sender wants it.

The aggregate has the same bits everywhere: the mean over a coefficient's senders, and the sign of its inverse. Every number
of it is a whole number in fp64, smaller than 2^53, so that sums are exact in any order, on any device:

    a value             q 2^(24 - (E - e)). E is the largest exponent of the chunk. Below 2^39, rounded half to even.
    the sum             of at most 2^12 peers. Below 2^51.
    the mean            divided (correctly rounded by IEEE 754), rounded, then 2^17 times coarser. At most 2^22.
    the basis           round(2^18 D). D is the orthonormal DCT of a side. A row's absolute sum is at most
                        2^18 sqrt(128) < 2^21.6.
    after one side      below 2^43.6. Then 2^18 times coarser, rounded: below 2^25.6.
    after both sides    below 2^47.2.

A coefficient without a sender is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.coefficient_payload import VALUE_BITS, Cut, PaperForm, Spoken
from node.optim.laid_out import LaidOut, zeros
from node.optim.layout import Layout, Source, kinds_of, trainable_tensors
from node.optim.run_settings import RUN, check
from node.optim.step import (
    Contributions,
    NonFiniteGradient,
    Votes,
    apply_update,
    as_tensor,
    clip_scale,
    exact_float32,
    total_norm,
)
from node.optim.votes.groups import NotANumber
from node.optim.votes.topk import SIZES
from node.optim.voting import ParameterState, check_state, private_state
from protos.optimizer_defaults import PAPER_SETS

UNIT_BITS = 24
"""A value keeps so many bits below the unit of the chunk's largest exponent."""
COARSER_BITS = 17
BASIS_BITS = 18
PEERS_MAX = 4096


class Mean:
    """The mean of one tensor: add every peer's votes, in any order; then call `direction`."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._spoken: list[Spoken] = []

    def add(self, spoken: Spoken) -> None:
        """Add one peer's votes. At most PEERS_MAX peers: a log entry has fewer."""
        assert len(self._spoken) < PEERS_MAX
        self._spoken.append(spoken)

    def coefficients(self) -> npt.NDArray[np.float64]:
        """fp64 whole numbers [chunks, high * wide], each chunk in units of its own; 0 for a coefficient without a sender."""
        cut = self._cut
        total = np.zeros((cut.chunks, cut.elements))
        senders = np.zeros((cut.chunks, cut.elements), np.int16)
        largest = np.full(cut.chunks, np.iinfo(np.int16).min, np.int16)
        for it in self._spoken:
            largest = np.where(it.speaks, np.maximum(largest, it.exponents), largest)
        for it in self._spoken:
            rows = np.flatnonzero(it.speaks)
            shift = UNIT_BITS - (largest[rows] - it.exponents[rows]).astype(np.int32)
            values = np.rint(np.ldexp(it.values[rows].astype(np.float64), shift[:, None]))
            total[rows[:, None], it.where[rows]] += values
            senders[rows[:, None], it.where[rows]] += 1
        mean = np.rint(total / np.maximum(senders, 1))
        return np.asarray(np.rint(np.ldexp(mean, -COARSER_BITS)))

    def direction(self, device: torch.device) -> Tensor:
        """The sign of the inverse transform, in the parameter's shape: int8 -1, 0 or 1 on `device`."""
        cut = self._cut
        where = torch.device("cpu") if device.type == "mps" else device  # Metal has no fp64
        chunks = torch.from_numpy(self.coefficients()).to(where).view(cut.chunks, cut.high, cut.wide)
        down, across = basis(cut.high).to(where), basis(cut.wide).to(where)
        rows = torch.matmul(down.T, chunks).mul_(2.0**-BASIS_BITS).round_()
        return cut.merge(torch.matmul(rows, across).sign_().to(torch.int8)).to(device)


@cache
def orthonormal(side: int) -> npt.NDArray[np.float64]:
    """The DCT-II of a side, orthonormal: [frequencies, places]."""
    frequency, place = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    turn = (frequency * (2 * place + 1)) % (4 * side)  # reduced in integers, so no cosine has a large argument
    matrix: npt.NDArray[np.float64] = np.sqrt(2 / side) * np.cos(np.pi * turn / (2 * side))
    matrix[0] = np.sqrt(1 / side)
    return matrix


@cache
def basis(side: int) -> Tensor:
    """`round(2^18 D)`, fp64 [side, side]. The CPU makes it, so all devices have the same; a test pins its hash."""
    return torch.from_numpy(np.rint(2.0**BASIS_BITS * orthonormal(side)))


def directions(cuts: Iterable[Cut], votes: Iterable[Iterable[Spoken]], device: torch.device) -> list[Tensor]:
    """The direction of every tensor, from every peer's votes for each.

    `votes` may be generators: the votes of one tensor are gone before those of the next are asked for.
    """
    found, peers = [], [iter(peer) for peer in votes]
    for cut in cuts:
        mean = Mean(cut)
        for peer in peers:
            mean.add(next(peer))
        found.append(mean.direction(device))
    return found


assert VALUE_BITS + UNIT_BITS == 39


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
        shapes_of_cuts = [(cut.chunks, cut.high, cut.wide) for cut in self.form.cuts]
        self._momentum = [zeros(shape, torch.float32, self._device) for shape in shapes_of_cuts]
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
        self, contributions: Contributions, lr: float, step: int | None = None, authors: Sequence[bytes] = ()
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
