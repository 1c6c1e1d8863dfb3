"""A tensor that lies spread over the ranks of a peer, read and written piece by piece: no rank ever holds it whole.

A digest, a snapshot and a saved momentum of a sharded model need this. All calls are collective over the group. Refuses to
know the tensor's meaning.

Also the gradients of whole parameters cut into one rank's share of the chunks, and chunks put together to whole parameters.
These functions are local: the caller has put the tensors together over the ranks. `checked` refuses other ways to shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from node.optim.laid_out import is_dealt, is_dtensor
from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE, Layout, ParameterPlace
from node.optim.second_moment import local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PIECE_ELEMENTS = 2**24
"""Elements that travel at a time: 64 MiB of fp32."""


class Pieces(Protocol):
    """A tensor whose pieces are put together on request."""

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""

    def numel(self) -> int:
        """Elements in all."""

    def pieces(self, first: int, last: int) -> Iterator[Tensor]:
        """The elements `first` to `last - 1` of the flat tensor, in order, as flat tensors."""

    def copy_(self, source: Tensor) -> object:
        """Copy a whole tensor of the same shape into this one."""


def whole(tensor: Tensor | Pieces) -> Tensor:
    """The whole tensor, on the CPU unless it was a tensor already."""
    if isinstance(tensor, Tensor):
        return tensor
    out = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
    flat, offset = out.view(-1), 0
    for piece in tensor.pieces(0, tensor.numel()):
        flat[offset : offset + piece.numel()] = piece.cpu()
        offset += piece.numel()
    return out


class Spread:
    """A tensor of which each rank of a group has some rows (first dimension), dealt out as `torch.chunk` deals them.

    `local` is this rank's part, contiguous. If not `dealt` every rank has all of it.
    """

    def __init__(self, local: Tensor, shape: Sequence[int], group: dist.ProcessGroup, *, dealt: bool = True) -> None:
        self.shape, self.dtype = tuple(shape), local.dtype
        self._local, self._group = local, group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        rows = math.ceil(self.shape[0] / self._ranks) if dealt else 0
        self._each = rows * math.prod(self.shape[1:]) if dealt else self.numel()
        self._kept = self.held(self._rank) if dealt else range(self.numel())
        assert local.numel() == len(self._kept), f"{local.numel()} elements, not {len(self._kept)} of {self.shape}"

    @classmethod
    def of(cls, parameter: DTensor) -> Spread:
        """A parameter as `fully_shard` leaves it."""
        dealt = is_dealt(parameter)
        return cls(local_part(parameter).detach(), parameter.shape, parameter.device_mesh.get_group(), dealt=dealt)

    def numel(self) -> int:
        """Elements on all ranks."""
        return math.prod(self.shape)

    def held(self, rank: int) -> range:
        """The elements, of the flat tensor, that a rank tells the others."""
        return range(self.numel())[rank * self._each : (rank + 1) * self._each]

    def pieces(self, first: int, last: int) -> Iterator[Tensor]:
        """As `Pieces` says, on every rank; all must ask for the same, and for all of it."""
        mine = self._local.view(-1)
        for rank in range(self._ranks):
            held = self.held(rank)
            stop = min(last, held.stop)
            for low in range(max(first, held.start), stop, PIECE_ELEMENTS):
                high = min(low + PIECE_ELEMENTS, stop)
                if rank == self._rank:
                    piece = mine[low - held.start : high - held.start]
                else:
                    piece = torch.empty(high - low, dtype=self.dtype, device=self._local.device)
                dist.broadcast(piece, group=self._group, group_src=rank)
                yield piece

    def rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last - 1`, on every rank."""
        width = math.prod(self.shape[1:])
        out = torch.empty(last - first, *self.shape[1:], dtype=self.dtype, device=self._local.device)
        flat, offset = out.view(-1), 0
        for piece in self.pieces(first * width, last * width):
            flat[offset : offset + piece.numel()] = piece
            offset += piece.numel()
        return out

    @torch.no_grad()
    def fill(self, source: Tensor | None) -> None:
        """Take over a whole tensor that rank 0 has; the others give None."""
        assert (source is None) == (self._rank != 0), "the whole tensor comes from rank 0"
        flat = None if source is None else source.contiguous().view(-1)
        mine, kept = self._local.view(-1), self._kept
        for low in range(0, self.numel(), PIECE_ELEMENTS):
            high = min(low + PIECE_ELEMENTS, self.numel())
            if flat is not None:
                piece = flat[low:high].to(self._local.device, self.dtype)
            else:
                piece = torch.empty(high - low, dtype=self.dtype, device=self._local.device)
            dist.broadcast(piece, group=self._group, group_src=0)
            begin, end = max(low, kept.start), min(high, kept.stop)
            if begin < end:
                mine[begin - kept.start : end - kept.start] = piece[begin - low : end - low]

    def copy_(self, source: Tensor) -> None:
        """As `Pieces` says, where every rank has the whole tensor: no communication."""
        kept = self._kept
        self._local.view(-1).copy_(source.reshape(-1)[kept.start : kept.stop])


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
