"""A range of chunks beside the parts of the tensors that they are cut from, so that no buffer needs the model's size.

`Layout.pool_pairs` finds the parts in the pool. This module holds no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from node.optim.exact.transforms import Transform
from node.optim.layout import CHUNK_SIDE, Layout

TILE_CHUNKS_CPU = 256
"""Chunks handled at a time on a CPU: 4 MiB of fp32, so that a tile and its scratch stay in the last cache level. On 2 cores of
an EPYC with 32 MiB of level 3, with 50M parameters, 192 to 512 were equal within noise, and faster than 32 to 128."""

TILE_CHUNKS_DEVICE = 2048
"""Chunks handled at a time elsewhere: 32 MiB of fp32, enough work for a launch, little memory beside the model."""


def tile_chunks(device: torch.device) -> int:
    """Chunks to handle at a time on a device."""
    return TILE_CHUNKS_CPU if device.type == "cpu" else TILE_CHUNKS_DEVICE


def core_pairs(
    layout: Layout, tensors: Sequence[Tensor | None], tile: slice, buffer: Tensor
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """As `Layout.pairs`, of those of the chunks `tile` that are in cores: views into `buffer` fp32 [chunks, 64, 64].

    At most three pairs a tensor; none for chunks of the pool.
    """
    for tensor, place in zip(tensors, layout.places, strict=True):
        first = max(tile.start, place.first_chunk)
        last = min(tile.stop, place.first_chunk + place.core_chunks)
        if first < last:
            matrix = None if tensor is None else tensor.view(place.height, place.width)
            chunks = buffer[first - tile.start : last - tile.start]
            yield from _blocks(matrix, place.core_width // CHUNK_SIDE, first - place.first_chunk, chunks)


def _blocks(matrix: Tensor | None, across: int, first: int, chunks: Tensor) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Chunks `first` and on of a core with `across` in a row: the end of a row, whole rows at once, a row's start."""
    while len(chunks):
        down, right = divmod(first, across)
        wide = min(across - right, len(chunks))
        high = len(chunks) // wide if wide == across else 1
        block = chunks[: high * wide].view(high, wide, CHUNK_SIDE, CHUNK_SIDE)
        yield None if matrix is None else _cut(matrix, down, right, block), block
        first, chunks = first + high * wide, chunks[high * wide :]


def _cut(matrix: Tensor, down: int, right: int, block: Tensor) -> Tensor:
    """The part of a matrix in `block`'s shape [high, wide, 64, 64] that starts `down` and `right` chunks from its corner."""
    high, wide = block.shape[:2]
    rows = slice(CHUNK_SIDE * down, CHUNK_SIDE * (down + high))
    part = matrix[rows, CHUNK_SIDE * right : CHUNK_SIDE * (right + wide)]
    return part.view(high, CHUNK_SIDE, wide, CHUNK_SIDE).transpose(1, 2)


def look_ahead(layout: Layout, parameters: Sequence[Tensor], expected: Tensor, transform: Transform, lr: float) -> None:
    """`p -= lr * sign(inverse(expected))` in place, with `expected` [chunks, 64, 64], a tile of chunks at a time."""
    own, size = [parameter.detach() for parameter in parameters], tile_chunks(expected.device)
    for first in range(0, layout.core_chunks, size):
        tile = slice(first, min(first + size, layout.core_chunks))
        _move(core_pairs(layout, own, tile, transform.inverse(expected[tile].float()).sign_()), lr)
    if layout.chunks > layout.core_chunks:
        pool = transform.inverse(expected[layout.core_chunks :].float()).sign_()
        _move(layout.pool_pairs(own, pool.view(-1)), lr)


def _move(pairs: Iterable[tuple[Tensor | None, Tensor]], lr: float) -> None:
    for part, direction in pairs:
        assert part is not None
        part.sub_(direction, alpha=lr)
