"""The fused step behind the same calls as the portable one: addresses in, threads over ranges of chunks.

The backend refuses to hold a tensor of the size of the model: gradients are read where they are, parameters written in place.
ADR 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim import second_moment
from node.optim.backends.numba import inverse, kernels, momentum_kernels
from node.optim.base import Base
from node.optim.exact import transforms
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout, ParameterPlace
from node.optim.second_moment import SecondMoment
from node.optim.step import Decay, decay_factor, decayed
from node.optim.votes import groups as votes
from node.optim.votes import silence
from node.optim.votes.payload import PLAIN, Packed
from node.optim.votes.places import Draw

# The places of a layout's chunks in the tensors themselves, as tables of integers for the kernels.

BLOCK_ELEMENTS = 4 * CHUNK_ELEMENTS
"""Elements whose squares are added together first; in order, which is faster than by chunks."""

_FP32_BYTES = 4
_NONE = np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """Made once from a layout; tensors are known by their number in it, and by an address at each step.

    `core` int64 [core chunks, 3]: tensor, offset of the chunk's first element, distance of its rows (bytes both).
    `strips` int64 [strips, 6]: tensor, offset, distance of rows (bytes), elements a row, first element of the pool,
    and the one behind the last. `first_strips` int64 [pool chunks]: the strip that holds a pool chunk's first element.
    `blocks` int64 [blocks, 3]: tensor, offset and elements of parts of at most `BLOCK_ELEMENTS`, without a gap.
    """

    chunks: int
    tensors: int
    core: npt.NDArray[np.int64]
    strips: npt.NDArray[np.int64]
    first_strips: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layout: Layout) -> Plan:
        core = [_core(number, place) for number, place in enumerate(layout.places) if place.core_chunks]
        strips = [strip for number, place in enumerate(layout.places) for strip in _strips(number, place)]
        table = np.array(strips, dtype=np.int64).reshape(-1, 6)
        starts = np.arange(layout.chunks - layout.core_chunks, dtype=np.int64) * CHUNK_ELEMENTS
        first = np.searchsorted(table[:, 5], starts, side="right").astype(np.int64)
        blocks = [_blocks(number, place) for number, place in enumerate(layout.places)]
        number = len(layout.places)
        return cls(
            layout.chunks, number, np.concatenate([_NONE, *core]), table, first, np.concatenate([_NONE, *blocks])
        )

    @property
    def gathered(self) -> tuple[npt.NDArray[np.int64], ...]:
        """The tables of a plan whose pool is one tensor more, fp32 [pool chunks, 64, 64]."""
        pool = np.arange(self.chunks - len(self.core), dtype=np.int64)
        rows = np.full_like(pool, _FP32_BYTES * CHUNK_SIDE)
        own = np.stack([np.full_like(pool, self.tensors), _FP32_BYTES * CHUNK_ELEMENTS * pool, rows], axis=1)
        return np.concatenate([self.core, own]), self.strips[:0], self.first_strips[:0]


def _blocks(number: int, place: ParameterPlace) -> npt.NDArray[np.int64]:
    starts = np.arange(0, place.elements, BLOCK_ELEMENTS, dtype=np.int64)
    sizes = np.minimum(place.elements - starts, BLOCK_ELEMENTS)
    return np.stack([np.full_like(starts, number), _FP32_BYTES * starts, sizes], axis=1)


def _core(number: int, place: ParameterPlace) -> npt.NDArray[np.int64]:
    down, across = place.core_height // CHUNK_SIDE, place.core_width // CHUNK_SIDE
    table = np.empty((down, across, 3), dtype=np.int64)
    table[..., 0] = number
    table[..., 1] = _FP32_BYTES * CHUNK_SIDE * (place.width * np.arange(down)[:, None] + np.arange(across))
    table[..., 2] = _FP32_BYTES * place.width
    return table.reshape(-1, 3)


def _strips(number: int, place: ParameterPlace) -> list[tuple[int, ...]]:
    """The right strip beside the core and the bottom strip under it, as `layout` puts them in the pool."""
    high, wide, stride = place.core_height, place.core_width, _FP32_BYTES * place.width
    right = high * (place.width - wide)
    start, middle, end = place.pool_offset, place.pool_offset + right, place.pool_offset + place.pool_elements
    strips = [
        (number, _FP32_BYTES * wide, stride, place.width - wide, start, middle),
        (number, stride * high, stride, place.width, middle, end),
    ]
    return [strip for strip in strips if strip[4] < strip[5]]


RANGE_CHUNKS = 128
"""Chunks that a thread takes at a time, so that one held up by another program does not hold up the step."""

CACHE_LINE = 64

BALLOTS_MAX = 2**15 - 1
"""Votes for one coefficient are counted in int16."""

Scratch: TypeAlias = npt.NDArray[np.uint8]
Addresses: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.float32]
Momenta: TypeAlias = tuple[Values, npt.NDArray[np.uint16]]
NO_VALUES: Values = np.empty(0, dtype=np.float32)
NO_MOMENTA: Momenta = NO_VALUES, np.empty(0, dtype=np.uint16)


class Fused:
    """`backends.base.Backend` on a CPU. Tensors are contiguous fp32; scratch is some 60 KiB a thread, and 8 bytes
    for each vote that is counted for a chunk.

    Every chunk is computed alone, so no result depends on the number of threads, which is torch's. The threads live
    for one call: a start takes less than 0.1 ms, and a fork or the end of the process finds none.
    """

    name = "numba"
    _form = PLAIN

    def __init__(self, layout: Layout, base: Base) -> None:
        """`base` is chunkwise; with another one, only `apply` is not for it."""
        plan = Plan.of(layout)
        self._maps = base.maps.numpy().astype(np.uint8), base.config.iterations, int(base.config.output == "sign")
        self._chunks = plan.chunks
        self._blocks = plan.blocks
        self._plan = (plan.core, plan.strips, plan.first_strips)
        self._gathered = plan.gathered
        self._coefficients: npt.NDArray[np.int16] = np.stack([_coefficients(size) for size in votes.GROUP_SIZES])
        basis = transforms.integer_basis(torch.device("cpu")).numpy().astype(np.int16)
        self._inverse = _multiples(basis), second_basis(basis)
        self._taken = [NO_VALUES]  # kept, by copies too: fresh memory costs a page fault for every 4 KiB
        self._compile()

    def norm(self, gradients: Sequence[Tensor | None]) -> float:
        """The norm of all gradients; infinite if the square of it overflows fp32 in one place, as torch's does."""
        out = np.empty(len(self._blocks), dtype=np.float64)
        tensors = addresses(gradients)
        self._share(lambda *own: kernels.square_sums(*own, self._blocks, tensors, out), range(len(out)))
        return float(np.sqrt(out.sum()))

    def fold(
        self,
        gradients: Sequence[Tensor | None],
        pool: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        chunks: range,
    ) -> None:
        tensors, own_momenta = addresses([*gradients, pool]), momenta(momentum)
        rates = np.float32(beta), np.float32(step)
        self._share(lambda *own: momentum_kernels.fold(*own, self._gathered, tensors, own_momenta, *rates), chunks)

    def vote(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        return self._vote(gradients, momentum, beta, step, group_size, second, NO_VALUES)

    def take(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        second: SecondMoment | None = None,
    ) -> tuple[Tensor, Tensor]:
        count = self._chunks * self._form.votes_a_chunk(group_size)
        if self._taken[0].size != count:
            self._taken[0] = np.empty(count, dtype=np.float32)
        packed = self._vote(gradients, momentum, beta, step, group_size, second, self._taken[0])
        return packed, torch.from_numpy(self._taken[0])

    def at(self, _draw: Draw) -> Fused:
        """See `Stepping.at`: group votes have their places in their bytes."""
        return self

    def _vote(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        group_size: int,
        second: SecondMoment | None,
        taken: Values,
    ) -> Tensor:
        packed = np.zeros(self._form.body_bytes(self._chunks, group_size), dtype=np.uint8)
        rows = silence.row_bytes(self._form.votes_a_chunk(group_size))
        silent = np.empty((self._chunks, rows), dtype=np.uint8)
        tensors = addresses(gradients or ())
        division = _division(tensors, gradients or (), second)
        given = self._plan, tensors, *division, momenta(momentum), np.float32(beta), np.float32(step)
        broken = self._find(given, group_size, (packed, silent, taken))
        if any(broken):
            if taken.size:
                self.put_back(momentum, torch.from_numpy(packed), group_size, torch.from_numpy(taken))
            raise votes.NotANumber("the momentum holds NaN")
        tail = silence.encode(torch.from_numpy(silent))
        return torch.from_numpy(np.concatenate([packed, np.frombuffer(tail, dtype=np.uint8)]) if tail else packed)

    def _find(self, given: tuple[object, ...], group_size: int, out: tuple[Scratch, Scratch, Values]) -> list[object]:
        """Run the kernel that makes votes; `given` as it takes them, and where packed, silent and taken votes go."""
        table = self._table(group_size)
        return self._share(lambda *own: momentum_kernels.vote(*own, *given, group_size, table, *out))

    def put_back(self, momentum: Tensor, packed: Tensor, group_size: int, taken: Tensor) -> None:
        self._put(momentum, packed, group_size, taken.numpy())

    def spend(self, momentum: Tensor, packed: Tensor, group_size: int) -> None:
        self._put(momentum, packed, group_size, NO_VALUES)

    def _put(self, momentum: Tensor, packed: Tensor, group_size: int, values: Values) -> None:
        own_momenta, codes, table = momenta(momentum), packed.numpy(), self._table(group_size)
        self._share(lambda *own: momentum_kernels.put(*own, own_momenta, group_size, table, codes, values))

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        if len(ballots) > BALLOTS_MAX:
            raise votes.VotesError(
                f"{len(ballots)} ballots in one step; their votes are counted in 16 bits: at most {BALLOTS_MAX}"
            )
        packed = [PLAIN.read(payload, size, self._chunks) for size, payload in ballots]
        rows = [row_of_group_votes(own) for own in packed]
        weight_decay = decayed(parameters, lr, weight_decay)
        listed = np.array(rows, dtype=np.int64).reshape(-1, 4)
        tensors, numbers = addresses(parameters), (np.float32(decay_factor(lr, weight_decay)), np.float32(lr))
        self._share(
            lambda *own: kernels.apply(*own, self._plan, tensors, listed, *numbers, *self._inverse, *self._maps)
        )

    def _table(self, group_size: int) -> npt.NDArray[np.int16]:
        table: npt.NDArray[np.int16] = self._coefficients[votes.GROUP_SIZES.index(group_size)]
        return table

    def _compile(self) -> None:
        """Run every kernel on no chunk: compiled now, or read from the cache, and not in the middle of a round."""
        tensors, nothing = np.zeros(len(self._plan[1]) + 1, dtype=np.int64), np.empty(0, dtype=np.float32)
        one, packed, table = np.float32(1), np.empty(0, dtype=np.uint8), self._coefficients[0]
        listed = np.empty((0, 4), dtype=np.int64)
        own = 0, 0, thread_scratch()
        kernels.square_sums(*own, self._blocks, tensors, np.empty(0))
        momentum_kernels.vote(
            *own,
            self._plan,
            tensors,
            tensors,
            nothing,
            nothing,
            NO_MOMENTA,
            one,
            one,
            8,
            table,
            packed,
            packed[:, None],
            nothing,
        )
        momentum_kernels.put(*own, NO_MOMENTA, 8, table, packed, nothing)
        momentum_kernels.fold(*own, self._gathered, tensors, NO_MOMENTA, one, one)
        kernels.apply(*own, self._plan, tensors, listed, one, one, *self._inverse, *self._maps)

    def _share(self, work: Callable[[int, int, Scratch], object], chunks: range | None = None) -> list[object]:
        """`work(first, last, scratch)` over all chunks (or those of a range) by torch's number of threads; in no order."""
        chunks = range(self._chunks) if chunks is None else chunks
        starts = range(chunks.start, chunks.stop, RANGE_CHUNKS)
        waiting, results = iter(starts), []

        def work_off() -> None:
            scratch = thread_scratch()
            for first in waiting:  # one step of a range's iterator is atomic
                results.append(work(first, min(first + RANGE_CHUNKS, chunks.stop), scratch))

        helpers = min(torch.get_num_threads(), len(starts)) - 1
        if helpers < 1:
            work_off()
            return results
        with ThreadPoolExecutor(helpers) as pool:
            taken = [pool.submit(work_off) for _ in range(helpers)]
            work_off()
        for helper in taken:
            helper.result()
        return results


def row_of_group_votes(own: Packed) -> tuple[int, int, int, int]:
    """A ballot of group votes as kernels take it: group size, address, bytes a chunk, address of the silent votes or 0."""
    silent = 0 if own.silent is None else own.silent.data_ptr()
    return own.size, own.grouped.data_ptr(), votes.vote_bytes(1, own.size), silent


def thread_scratch() -> Scratch:
    """Memory for one thread, from a multiple of 64 bytes on, so that no vector crosses a cache line."""
    room = np.empty(kernels.SCRATCH_BYTES + CACHE_LINE, dtype=np.uint8)
    skip = -room.ctypes.data % CACHE_LINE
    return room[skip : skip + kernels.SCRATCH_BYTES]


def _coefficients(group_size: int) -> npt.NDArray[np.int16]:
    return votes.coefficients(group_size, torch.device("cpu")).numpy().astype(np.int16)


def _division(
    tensors: Addresses, gradients: Sequence[Tensor | None], second: SecondMoment | None
) -> tuple[Addresses, Values, Values]:
    """What the kernels divide gradients by: addresses of the squares, three numbers and the corrections; empty for nothing."""
    if second is None:
        return tensors[:0], NO_VALUES, NO_VALUES
    squares = np.where(tensors == 0, 0, addresses(second.squares))
    corrections = np.array([1 / value for value in second.advance(gradients)], dtype=np.float32)
    return squares, np.array([second.beta2, 1 - second.beta2, second_moment.EPSILON], dtype=np.float32), corrections


def momenta(momentum: Tensor) -> Momenta:
    """A momentum of fp32 or bf16 as the kernels take it: the one of two arrays that is not empty."""
    flat = momentum.view(-1)
    if flat.dtype == torch.bfloat16:
        return NO_VALUES, flat.view(torch.uint16).numpy()
    return flat.numpy(), NO_MOMENTA[1]


def addresses(tensors: Sequence[Tensor | None]) -> Addresses:
    return np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def _multiples(basis: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """-1, 0 and 1 times the left half of the integer basis [64, 64], even frequencies first: int16 [3, 64, 32]."""
    left = np.concatenate([basis[::2, : CHUNK_SIDE // 2], basis[1::2, : CHUNK_SIDE // 2]])
    return np.stack([-left, 0 * left, left])


def second_basis(basis: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """The integer basis [64, 64] as `inverse.turn_rows` reads it: int16 [48 vectors, 16 places, 2 frequencies].

    Two vectors (places 0 to 15 and 16 to 31) for each pair of odd frequencies, one for each pair of even ones.
    """
    pairs = basis[inverse.FREQUENCIES].reshape(CHUNK_SIDE // 2, 2, CHUNK_SIDE).transpose(0, 2, 1)
    odd = pairs[:16, :32].reshape(32, 16, 2)
    return np.ascontiguousarray(np.concatenate([odd, pairs[16:, :16]]))
