"""Gradients of whole parameters cut into one rank's share of the chunks, and chunks put together to whole parameters.

Every function is local: the caller has put the tensors together over the ranks. `checked` refuses other ways to shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from node.optim.dtensor import is_dtensor
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout, ParameterPlace

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(source: Iterable[Tensor]) -> bool:
    """Whether any of the tensors is a DTensor, as `fully_shard` makes them."""
    return any(is_dtensor(tensor) for tensor in source)


def checked(name: str, tensor: Tensor) -> DTensor:
    """The parameter itself. Raises `ValueError` unless it is sharded as `fully_shard` does it, along the first dimension."""
    if not is_dtensor(tensor) or tensor.device_mesh.ndim != 1:
        raise ValueError(f"parameter {name} is not sharded by `fully_shard` over a mesh of one dimension")
    from torch.distributed.tensor import Shard  # a DTensor has loaded it

    placement = tensor.placements[0]
    if isinstance(placement, Shard) and placement.dim != 0:
        raise ValueError(f"parameter {name} is sharded along dimension {placement.dim}, not 0")
    if tensor.dtype != torch.float32 or not tensor.to_local().is_contiguous():
        raise ValueError(f"parameter {name} is not contiguous fp32")
    return tensor


def matrix_of(place: ParameterPlace, core: Tensor, pool: Tensor) -> Tensor:
    """A parameter's part of a buffer as a matrix [height, width], from its `core` chunks and the whole flat `pool`."""
    matrix = torch.empty(place.height, place.width, dtype=core.dtype, device=core.device)
    if place.core_chunks:
        down, across = place.core_height // CHUNK_SIDE, place.core_width // CHUNK_SIDE
        inner = matrix[: place.core_height, : place.core_width].view(down, CHUNK_SIDE, across, CHUNK_SIDE)
        inner.transpose(1, 2).copy_(core.view(down, across, CHUNK_SIDE, CHUNK_SIDE))
    for part, strip in Layout((place,), place.core_chunks, place.pool_elements).pool_pairs([matrix], pool):
        assert part is not None
        part.copy_(strip)
    return matrix


def fill_share(layout: Layout, share: range, gradients: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """The gradients of the chunks in `share`, fp32 [share, 64, 64]; None counts as zeros.

    `gradients` are whole tensors in the layout's order. One is in memory at a time if the caller makes them so.
    """
    out = torch.zeros(len(share), CHUNK_SIDE, CHUNK_SIDE, dtype=torch.float32, device=device)
    flat = out.view(-1)
    base = (share.start - layout.core_chunks) * CHUNK_ELEMENTS  # of the pool's element at out[0]
    for gradient, place in zip(gradients, layout.places, strict=True):
        if gradient is None:
            continue
        matrix = gradient.to(torch.float32).reshape(place.height, place.width)
        _fill_core(matrix, place, share, out)
        offset = place.pool_offset
        for strip in (matrix[: place.core_height, place.core_width :], matrix[place.core_height :]):
            low, high = max(offset - base, 0), min(offset + strip.numel() - base, flat.numel())
            if low < high:
                flat[low:high] = strip.reshape(-1)[low + base - offset : high + base - offset]
            offset += strip.numel()
    return out


def _fill_core(matrix: Tensor, place: ParameterPlace, share: range, out: Tensor) -> None:
    own = range(max(share.start, place.first_chunk), min(share.stop, place.first_chunk + place.core_chunks))
    if own:
        down, across = place.core_height // CHUNK_SIDE, place.core_width // CHUNK_SIDE
        core = matrix[: place.core_height, : place.core_width].reshape(down, CHUNK_SIDE, across, CHUNK_SIDE)
        chunks = core.transpose(1, 2).reshape(-1, CHUNK_SIDE, CHUNK_SIDE)
        out[own.start - share.start : own.stop - share.start] = chunks[
            own.start - place.first_chunk : own.stop - place.first_chunk
        ]
