"""A range of chunks beside the parts of the tensors that they are cut from, so that no buffer needs the model's size.

It knows cores alone: what lies in the pool is found by `Layout.pool_pairs`. It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from node.optim.layout import CHUNK_SIDE, Layout


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
