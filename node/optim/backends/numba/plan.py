"""The places of a layout's chunks in the tensors themselves, as tables of integers for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout, ParameterPlace

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
        return cls(layout.chunks, np.concatenate([_NONE, *core]), table, first, np.concatenate([_NONE, *blocks]))


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
