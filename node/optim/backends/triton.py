"""The step on a GPU in two Triton kernels (`triton_kernels`): one makes votes, the other moves the parameters.

It is what a CUDA device takes by itself (`choose`). Tests compare it with the portable path, in Triton's interpreter and, where
there is one, on a GPU (an H200 gave the same bits). ADR 7.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from node.optim.backends import triton_kernels
from node.optim.base import Base
from node.optim.exact import transforms
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout
from node.optim.second_moment import EPSILON, SecondMoment
from node.optim.step import Decay, as_tensor, decay_factor, decayed, spend, total_norm
from node.optim.votes import bits, silence
from node.optim.votes import groups as votes
from node.optim.votes.groups import NotANumber
from node.optim.votes.payload import PLAIN

CAPABILITY_MIN = (8, 0)
"""The first GPUs (Ampere) that have int8 products in the shape that Triton makes."""


def inverse_warps(capability: tuple[int, int]) -> int:
    """Warps of a chunk's inverse. On Hopper one group of four, because a second one would compute the same numbers again."""
    return 4 if capability[0] == 9 else 8


def forward_options(capability: tuple[int, int]) -> tuple[str, int]:
    """The forward transform's products, and its warps: as compiled for each GPU, they keep all numbers in registers.

    Hopper and Blackwell's B200 have tensor cores wide enough for three TF32 products in place of one of fp32. On other GPUs
    this would spill registers, and so would fewer warps.
    """
    return ("tf32x3", 4) if capability[0] in {9, 10} else ("ieee", 16)


Division: TypeAlias = tuple[Tensor, Tensor, Tensor, float, float, float]
"""What `join` divides by: addresses, corrections, whether each element has its own, and numbers."""


class BallotRows(NamedTuple):
    """A step's ballots for a kernel, and what its addresses point to."""

    tensors: tuple[Tensor, ...]
    kept: object


class Triton:
    """`backends.base.Backend` on a GPU. The backend reads and writes cores in place, and strips and vectors through one
    pool."""

    name = "triton"

    def __init__(self, layout: Layout, device: torch.device, base: Base) -> None:
        """`base` is chunkwise."""
        self._layout, self._device = layout, device
        self._maps = base.maps.to(device, torch.uint8)
        self._orthogonal = (base.config.iterations if base.config.block else 0, base.config.output == "sign")
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else CAPABILITY_MIN
        if capability < CAPABILITY_MIN:
            has, needs = (".".join(map(str, pair)) for pair in (capability, CAPABILITY_MIN))
            raise ValueError(
                f"the Triton kernels need a GPU of compute capability {needs}, and this GPU has {has}: choose torch"
            )
        self._precision, self._warps = forward_options(capability)
        self._inverse_warps = inverse_warps(capability)
        core = [
            (number, row * CHUNK_SIDE * place.width + column * CHUNK_SIDE, place.width)
            for number, place in enumerate(layout.places)
            for row in range(place.core_height // CHUNK_SIDE)
            for column in range(place.core_width // CHUNK_SIDE)
        ]
        table = np.array(core, dtype=np.int64).reshape(-1, 3)
        pool = layout.chunks - layout.core_chunks
        self._owner, self._offset = table[:, 0], 4 * table[:, 1]
        rows = np.concatenate((table[:, 2], np.full(pool, CHUNK_SIDE, dtype=np.int64)))
        self._rows = torch.from_numpy(rows).to(device)
        planes = torch.zeros(3, pool, CHUNK_SIDE, CHUNK_SIDE, dtype=torch.float32, device=device)
        self._pool, self._beside, self._corrections = planes.unbind()
        apart = np.repeat(np.array([0, 1], dtype=np.int64), (len(table), pool))
        self._apart = torch.from_numpy(apart).to(device)
        self._widths = functools.reduce(
            operator.or_, (4 * place.width for place in layout.places if place.core_chunks), 16
        )
        self._pool_offset = 4 * CHUNK_ELEMENTS * np.arange(pool, dtype=np.int64)
        self._basis = transforms.basis(device).contiguous()
        self._turned = transforms.integer_basis(device).T.to(torch.int32).contiguous()

    def norm(self, gradients: Sequence[Tensor | None]) -> float:
        return total_norm(gradients)

    def fold(
        self,
        gradients: Sequence[Tensor | None],
        pool: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        chunks: range,
    ) -> None:
        """See `Backend.fold`. Its votes count for nothing."""
        own = slice(chunks.start, chunks.stop)
        where = self._addresses(gradients, pool)
        self._run(where[own], self._rows[own], momentum[own], beta, step, votes.GROUP_SIZES[-1], self._unit(gradients))

    def vote(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        """See `Backend.vote`. Gradients stay as they are."""
        if gradients is None:  # nothing joins, and nothing changes: m = 1 * m + 0
            nothing = torch.zeros(self._layout.chunks, dtype=torch.int64, device=self._device)
            return self._packed(*self._find(nothing, momentum, 1.0, 0.0, group_size, self._unit(())), group_size)
        self._fill(self._pool, gradients)
        where = self._addresses(gradients, self._pool)
        if second is None:
            unit = self._unit(gradients)
            return self._packed(*self._find(where, momentum, beta, step, group_size, unit), group_size)
        pairs = zip(second.squares, gradients, strict=True)
        squares = [None if gradient is None else square for square, gradient in pairs]
        self._fill(self._beside, squares)
        found = torch.tensor(
            [1 / value for value in second.advance(gradients)], dtype=torch.float32, device=self._device
        )
        beside = self._addresses(squares, self._beside), self._corrected(found), self._apart
        division = *beside, second.beta2, 1 - second.beta2, EPSILON
        unit = self._unit([*gradients, *squares])
        made = self._find(where, momentum, beta, step, group_size, unit, division)
        for part, strip in self._strips(squares, self._beside):
            if part is not None:
                part.copy_(strip)
        return self._packed(*made, group_size)

    def _find(
        self,
        where: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        size: int,
        unit: int,
        division: Division | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of all chunks: the codes of their votes, silent votes, and which chunks hold NaN."""
        return self._run(where, self._rows, momentum, beta, step, size, unit, division)

    def _run(
        self,
        where: Tensor,
        rows: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        unit: int,
        division: Division | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel over some chunks: codes, silent votes, and which chunks hold NaN. Without `division`, nothing divides."""
        groups, chunks = votes.groups(group_size), len(where)
        codes, silent = torch.empty(2, chunks, groups, dtype=torch.uint8, device=self._device).unbind()
        broken = torch.empty(chunks, dtype=torch.int32, device=self._device)
        beside, corrections, apart, *numbers = division or (where, where, where, 0.0, 0.0, 0.0)
        triton_kernels.vote[(chunks,)](
            where, rows, momentum, self._basis, codes, silent, broken, beta, step, beside, corrections, apart, *numbers,
            groups, group_size, self._precision, division is not None, unit, num_warps=self._warps, enable_fp_fusion=True,
        )  # fmt: skip
        return codes, silent, broken

    def _packed(self, codes: Tensor, silent: Tensor, broken: Tensor, group_size: int) -> Tensor:
        """The payload."""
        if bool(broken.any()):
            raise NotANumber("the momentum holds NaN")
        packed = bits.pack(codes, self._bits(group_size))
        tail = silence.encode(silence.pack(silent.to(torch.bool))) if bool(silent.any()) else b""
        return torch.cat([packed, as_tensor(tail, self._device)]) if tail else packed

    def _bits(self, size: int) -> int:
        return votes.bits(size)

    def spend(self, momentum: Tensor, packed: Tensor, group_size: int) -> None:
        spend(momentum, packed, group_size)

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        ballot_rows = self._group_rows(ballots)
        weight_decay = decayed(parameters, lr, weight_decay)
        self._fill(self._pool, parameters)
        factor = decay_factor(lr, weight_decay)
        triton_kernels.apply[(self._layout.chunks,)](
            self._addresses(parameters, self._pool), self._rows, *ballot_rows.tensors, self._turned, factor, lr, self._maps,
            factor != 1, *self._orthogonal, self._unit(parameters), num_warps=self._inverse_warps, enable_fp_fusion=False,
        )  # fmt: skip
        self._take_strips(parameters)

    def _group_rows(self, ballots: Sequence[tuple[int, bytes]]) -> BallotRows:
        """Ballots of group votes as `group_sums` takes them, by size: addresses of codes, of silent votes or 0, and starts."""
        chunks = self._layout.chunks
        codes, silents = [], []
        for size, payload in sorted(ballots, key=lambda ballot: ballot[0]):
            read = PLAIN.read(payload, size, chunks).to(self._device)
            codes.append(
                bits.unpack(read.grouped.reshape(-1), votes.bits(size), chunks * votes.groups(size)).contiguous()
            )
            silents.append(
                None if read.silent is None else silence.unpack(read.silent, votes.groups(size)).to(torch.uint8)
            )
        smaller = [sum(size < bound for size, _ in ballots) for bound in (*votes.GROUP_SIZES, math.inf)]
        starts = torch.tensor(smaller, dtype=torch.int32, device=self._device)
        return BallotRows((self.listed(codes), self.listed(silents), starts), (codes, silents))

    def listed(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Their addresses, int64; 0 for None."""
        found = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return torch.tensor(found or [0], dtype=torch.int64, device=self._device)

    def _take_strips(self, parameters: Sequence[Tensor]) -> None:
        for part, strip in self._strips(parameters, self._pool):
            assert part is not None
            part.copy_(strip)

    def _addresses(self, tensors: Sequence[Tensor | None], pool: Tensor) -> Tensor:
        """The address of each chunk's first element; 0 for a chunk that counts as zeros."""
        base = np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], dtype=np.int64)[self._owner]
        core = np.where(base == 0, 0, base + self._offset)
        whole = np.concatenate((core, pool.data_ptr() + self._pool_offset))
        return torch.from_numpy(whole).to(self._device)

    def _unit(self, tensors: Sequence[Tensor | None]) -> int:
        """Elements that may be read at once: all rows of all cores begin at a multiple of so many (4, 2 or 1)."""
        there = (tensor.data_ptr() for tensor in tensors if tensor is not None)
        together = functools.reduce(operator.or_, there, self._widths)
        return (together & -together) // 4

    def _corrected(self, corrections: Tensor) -> Tensor:
        """The address of each chunk's first correction in fp32 [tensors]: its tensor's, or that of the pool's first element."""
        flat = self._corrections.view(-1)
        for number, place in enumerate(self._layout.places):
            flat[place.pool_offset : place.pool_offset + place.pool_elements] = corrections[number]
        core = corrections.data_ptr() + 4 * self._owner
        return torch.from_numpy(np.concatenate((core, self._corrections.data_ptr() + self._pool_offset))).to(
            self._device
        )

    def _fill(self, pool: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Copy strips and vectors in, with zeros behind them, because the last update has written there, too."""
        pool.view(-1)[self._layout.pool_elements :].zero_()
        for part, strip in self._strips(tensors, pool):
            if part is None:
                strip.zero_()
            else:
                strip.copy_(part)

    def _strips(self, tensors: Sequence[Tensor | None], pool: Tensor) -> list[tuple[Tensor | None, Tensor]]:
        """The tensors' parts in the pool, each beside its place there; empty without tensors."""
        return list(self._layout.pool_pairs(tensors, pool.view(-1))) if tensors else []
