"""The fused step of signs whose places follow from the step, and of group votes whose sums have a larger cap than 2.

As `backend.Fused`, whose transform and votes it shares. The inverse is that of `Transform.inverse_exact`, bit for bit: `Family`
in torch moves parameters alike. It refuses values beside signs, and other transforms. ADR 33.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.backends.numba import wide_kernels
from node.optim.backends.numba.backend import (
    BALLOTS_MAX,
    NO_MOMENTA,
    NO_VALUES,
    Fused,
    Scratch,
    Values,
    addresses,
    momenta,
    row_of_group_votes,
    second_basis,
    thread_scratch,
)
from node.optim.backends.numba.inverse import all_basis
from node.optim.base import Base
from node.optim.exact.transforms import SHIFT, named
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout
from node.optim.step import Decay, decay_factor, decayed
from node.optim.votes import groups as votes
from node.optim.votes import places
from node.optim.votes.payload import Format, Packed
from node.optim.votes.places import Draw

CPU = torch.device("cpu")
_NO_PLACES: npt.NDArray[np.int16] = np.empty((0, 0), dtype=np.int16)


class Wide(Fused):
    """`backends.base.Backend` on a CPU, for signs in any selection but top-k, after a DCT, with a chunkwise base.

    With another base its votes serve in `portable.Mixed`. Votes whose places follow from the step need `at` before each call.
    """

    def __init__(self, layout: Layout, form: Format, cap: int, base: Base) -> None:
        self._form, self._cap = form, cap
        self._draw: Draw | None = None
        basis = np.rint(2.0**SHIFT * named("dct").matrix)
        short = basis.astype(np.int16)
        left = np.concatenate([short[::2, : CHUNK_SIDE // 2], short[1::2, : CHUNK_SIDE // 2]])
        self._wide = left, all_basis(left), second_basis(short), basis
        super().__init__(layout, base)

    def at(self, draw: Draw) -> Wide:
        found = copy.copy(self)
        found._draw = draw
        return found

    def _pattern(self, size: int, number: int = 0) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
        """Of the step's places what all chunks have, and what moves a chunk, for payload `number`: see `places.pattern`."""
        assert self._draw is not None, (
            f"selection {self._form.selection}: places follow from the step, and no step is given"
        )
        found = places.pattern(self._form.selection, self._draw.of(number), size, 0, self._chunks, CPU)
        order, moved = (part.numpy().astype(np.int16) for part in found)
        return order, moved

    def _find(self, given: tuple[object, ...], group_size: int, out: tuple[Scratch, Scratch, Values]) -> list[object]:
        if not self._form.drawn:
            return super()._find(given, group_size, out)
        pattern = self._pattern(group_size)
        return self._share(lambda *own: wide_kernels.vote_drawn(*own, *given, *pattern, *out))

    def _put(self, momentum: Tensor, packed: Tensor, group_size: int, values: Values) -> None:
        if not self._form.drawn:
            return super()._put(momentum, packed, group_size, values)
        own_momenta, pattern = momenta(momentum), self._pattern(group_size)
        self._share(lambda *own: wide_kernels.put_drawn(*own, own_momenta, *pattern, values))
        return None

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        if len(ballots) > BALLOTS_MAX:
            raise votes.VotesError(
                f"{len(ballots)} ballots in one step; their votes are counted in 16 bits: at most {BALLOTS_MAX}"
            )
        packed = [self._form.read(payload, size, self._chunks) for size, payload in ballots]
        listed, room = (self._drawn_rows if self._form.drawn else self._group_rows)(packed)
        weight_decay = decayed(parameters, lr, weight_decay)
        numbers = self._cap, np.float32(decay_factor(lr, weight_decay)), np.float32(lr)
        given = self._plan, addresses(parameters), *listed, *numbers, *self._wide, room, *self._maps
        self._share(lambda *own: wide_kernels.apply_wide(*own, *given))

    def _group_rows(self, packed: Sequence[Packed]) -> tuple[tuple[Any, ...], int]:
        """The ballots as the kernel takes them, and their votes for a chunk."""
        rows = np.array([row_of_group_votes(own) for own in packed], dtype=np.int64).reshape(-1, 4)
        return (rows, _NO_PLACES, _NO_PLACES, True, False), sum(CHUNK_ELEMENTS // own.size for own in packed)

    def _drawn_rows(self, packed: Sequence[Packed]) -> tuple[tuple[Any, ...], int]:
        """The same, and the places of each size. The smallest size has the most, and those of all others."""
        keys = [(own.size, number if self._form.independent else 0) for number, own in enumerate(packed)]
        kinds = sorted({*keys}) or [(self._form.sizes[-1], 0)]
        counts = [self._form.votes_a_chunk(size) for size, _ in kinds]
        orders = np.zeros((len(kinds), counts[0]), dtype=np.int16)
        moved = np.empty((len(kinds), self._chunks), dtype=np.int16)
        for row, (size, number) in enumerate(kinds if packed else ()):
            order, own = self._pattern(size, number)
            orders[row, : len(order)], moved[row] = _moved_bits(order), _moved_bits(own)
        rows = [
            (kinds.index(key), self._form.votes_a_chunk(own.size), *_where(own))
            for key, own in sorted(zip(keys, packed, strict=True), key=lambda pair: pair[0])
        ]
        nested = not self._form.independent
        most = min(self._cap, len(packed)) * int(np.bincount(orders[0] >> 6).max())  # XOR moves whole columns
        sure = nested and most <= wide_kernels.COLUMN_MAX
        listed = np.array(rows, dtype=np.int64).reshape(-1, 4), orders, moved, nested, sure
        return listed, counts[0] if nested else sum(counts)

    def _compile(self) -> None:
        super()._compile()
        tensors, nothing = np.zeros(len(self._plan[1]) + 1, dtype=np.int64), NO_VALUES
        one, row, bytes_ = np.float32(1), np.empty(0, dtype=np.int16), np.empty(0, dtype=np.uint8)
        listed, own = np.empty((0, 4), dtype=np.int64), (0, 0, thread_scratch())
        if self._form.drawn:
            division = tensors, nothing, nothing, NO_MOMENTA, one, one, row, row
            wide_kernels.vote_drawn(*own, self._plan, tensors, *division, bytes_, bytes_[:, None], nothing)
            wide_kernels.put_drawn(*own, NO_MOMENTA, row, row, nothing)
        numbers = self._cap, one, one
        wide_kernels.apply_wide(
            *own,
            self._plan,
            tensors,
            listed,
            _NO_PLACES,
            _NO_PLACES,
            True,
            False,
            *numbers,
            *self._wide,
            0,
            *self._maps,
        )


def _where(own: Packed) -> tuple[int, int]:
    """The addresses of the signs, and of the bits of silent votes or 0."""
    assert own.negative is not None
    return own.negative.data_ptr(), 0 if own.silent is None else own.silent.data_ptr()


def _moved_bits(coefficients: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """Coefficients `64 * row + column` as places `64 * column + 32 * (row % 2) + row // 2`, all int16."""
    row, column = coefficients >> 6, coefficients & 63
    found: npt.NDArray[np.int16] = (column << 6 | (row & 1) << 5 | row >> 1).astype(np.int16)
    return found
