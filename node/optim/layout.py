"""The layout: the place of every parameter in the 64x64 chunks that the DCT transforms.

The layout is part of the contract of a run: two peers exchange votes only if their layouts have the same digest. The layout is
computed from names and shapes, and from what modules say of them (`kinds_of`). The layout refuses to look at values, and holds
no tensor. ADR 3.

Work goes by tiles: a range of chunks beside the parts of the tensors that they are cut from, so that no buffer needs the
model's size. `core_pairs` and `Layout.pool_pairs` find the parts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from node.optim.laid_out import fault_of

CHUNK_SIDE = 64
"""Side of a chunk; DeMo's default (arXiv 2411.19870, section 4). The wire format and the exactness proof assume it."""

CHUNK_ELEMENTS = CHUNK_SIDE * CHUNK_SIDE
LAYOUT_VERSION = 2
"""The version counts changes of the rule below, of the votes' bytes and of their effect. The digest holds it, so peers of
different versions refuse each other. 2: votes may be silent (ADR 3), and peers that have a size of a chunk agree on it
(ADR 11)."""

TILE_CHUNKS_CPU = 256
"""Chunks handled at a time on a CPU: 4 MiB of fp32, so that a tile and its scratch stay in the last cache level. On 2 cores of
an EPYC with 32 MiB of level 3, with 50M parameters, 192 to 512 were equal within noise, and faster than 32 to 128."""

TILE_CHUNKS_DEVICE = 2048
"""Chunks handled at a time elsewhere: 32 MiB of fp32, enough work for a launch, little memory beside the model."""

Source: TypeAlias = nn.Module | Iterable[tuple[str, Tensor]]
"""The source of a layout: a module, or named tensors."""


def named_tensors(source: Source) -> list[tuple[str, Tensor]]:
    """The trained parameters of `source` in order of definition; tied weights once, under their first name."""
    named = source.named_parameters() if isinstance(source, nn.Module) else source
    seen: set[int] = set()
    unique = []
    for name, tensor in named:
        if tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            unique.append((name, tensor))
    return unique


def trainable_tensors(source: Source) -> list[tuple[str, Tensor]]:
    """`named_tensors`, of which there is one: all contiguous fp32, on one device. Raises ValueError."""
    named = named_tensors(source)
    if not any(tensor.numel() for _, tensor in named):
        raise ValueError("no parameter to train: all are frozen (requires_grad is False) or empty")
    for name, tensor in named:
        if fault := fault_of(tensor, named[0][1].device):
            raise ValueError(f"parameter {name} {fault}")
    return named


TABLE, CONVOLUTION = "table", "convolution"
KINDS = (TABLE, CONVOLUTION)
HIDDEN_SHOWN = 3
COMPILED = "._orig_mod."


def kinds_of(source: Source) -> dict[str, str]:
    """The kinds of parameters by name, from the types of a module's parts: `table` (embedding, head) or `convolution`.

    `get_output_embeddings` names a head, in the models of transformers. Named tensors have no kinds.
    """
    if not isinstance(source, nn.Module):
        return {}
    kinds: dict[int, str] = {}
    for module in source.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            kinds[id(module.weight)] = CONVOLUTION
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            kinds[id(module.weight)] = TABLE
    head = getattr(source, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        kinds |= {id(parameter): TABLE for parameter in head.parameters()}
    return {name: kinds[id(tensor)] for name, tensor in named_tensors(source) if id(tensor) in kinds}


def hidden_kinds(module: nn.Module) -> list[str]:
    """Parameters that a parametrization has put in the place of a table's or convolution's `weight`: they have no kind.

    The digests of runs hold the kinds, so it stays so. Convolutions of more dimensions are the same with and without one.
    """
    ids = set[int]()
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag | nn.Conv1d | nn.ConvTranspose1d):
            ids |= {id(it) for it in part.parameters() if "weight" not in part._parameters and it.dim() > 1}
    kinds = kinds_of(module)
    return [name for name, it in named_tensors(module) if id(it) in ids and it[0].numel() > 1 and name not in kinds]


def hidden_note(names: Sequence[str]) -> list[str]:
    """What to know of `hidden_kinds`."""
    if not names:
        return []
    return [
        f"base muon treats {', '.join(names[:HIDDEN_SHOWN])} as matrices or stacks of them: a parametrization (weight_norm, "
        "prune, ...) hides from it that they are tables or one-dimensional convolutions. Name tables in the base's `tables` "
        "(`muon_except` of a BaseConfig), or take the parametrization away"
    ]


@dataclass(frozen=True)
class ParameterPlace:
    """The place of one parameter: its core in whole chunks, and the rest in the pool.

    Seen as a matrix [height, width] the core is its first `core_height` rows and `core_width` columns (multiples of
    64), in chunks `first_chunk` and on. The right strip, then the bottom strip, start at `pool_offset` of the pool.
    """

    name: str
    shape: tuple[int, ...]
    height: int
    width: int
    core_height: int
    core_width: int
    first_chunk: int
    pool_offset: int
    kind: str = ""
    """One of KINDS, or nothing: what its module says of it."""

    @property
    def core_chunks(self) -> int:
        return self.core_height * self.core_width // CHUNK_ELEMENTS

    @property
    def elements(self) -> int:
        return self.height * self.width

    @property
    def pool_elements(self) -> int:
        return self.elements - self.core_height * self.core_width


@dataclass(frozen=True)
class Layout:
    """All parameters of a model as one `[chunks, 64, 64]` buffer.

    The 64-aligned core of every parameter with two or more dimensions, seen as `[shape[0], product of the rest]`, is cut in
    chunks. One pool behind the cores holds the rest of each parameter (right strip, then bottom strip), and every 1-D and 0-D
    parameter. Zeros pad the pool once to whole chunks. So a model of any shapes has less than 4096 elements of padding, which
    keeps a payload within 2 % of 8 bits a vote.
    """

    places: tuple[ParameterPlace, ...]
    core_chunks: int
    pool_elements: int

    @classmethod
    def of(cls, source: Source) -> Layout:
        """The layout of a module, or of `(name, tensor)` pairs (names, shapes and kinds are read; tied tensors once).

        Raises `ValueError` when two tensors share a name: the digest would not tell them apart.
        """
        return cls.of_shapes(((name, tuple(tensor.shape)) for name, tensor in named_tensors(source)), kinds_of(source))

    @classmethod
    def of_shapes(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], kinds: Mapping[str, str] | None = None) -> Layout:
        """The layout of named shapes, in the order given, and their `kinds` (see `kinds_of`).

        Raises `ValueError` for a name that appears twice.
        """
        places: list[ParameterPlace] = []
        chunk = pool = 0
        for name, shape in shapes:
            place = _place(name, shape, chunk, pool, (kinds or {}).get(name, ""))
            places.append(place)
            chunk += place.core_chunks
            pool += place.pool_elements
        if len({place.name for place in places}) < len(places):
            raise ValueError("two parameters share a name")
        return cls(tuple(places), chunk, pool)

    @property
    def chunks(self) -> int:
        """Chunks in the buffer, pool included."""
        return self.core_chunks + math.ceil(self.pool_elements / CHUNK_ELEMENTS)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, padding excluded."""
        return self.core_chunks * CHUNK_ELEMENTS + self.pool_elements

    def digest(self) -> bytes:
        """32 bytes: SHA-256 over the version, the chunk side, and every name, shape and kind in order, as compact JSON."""
        shapes = [[place.name, list(place.shape), *([place.kind] if place.kind else [])] for place in self.places]
        text = json.dumps(["swarmentum-layout", LAYOUT_VERSION, CHUNK_SIDE, shapes], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    @property
    def kinds(self) -> dict[str, str]:
        return {place.name: place.kind for place in self.places if place.kind}

    def empty(self, device: torch.device | str) -> Tensor:
        """An uninitialised fp32 buffer `[chunks, 64, 64]`."""
        return torch.empty(self.chunks, CHUNK_SIDE, CHUNK_SIDE, dtype=torch.float32, device=device)

    def pairs(self, tensors: Sequence[Tensor | None], buffer: Tensor) -> Iterator[tuple[Tensor | None, Tensor]]:
        """Views of the same shape, a parameter's part beside its place in `buffer` [chunks, 64, 64].

        At most three pairs a tensor; a tensor that is None gives None beside each of its places. Tensors must be
        viewable as a matrix (contiguous ones are); writing into a view writes into the tensor.
        """
        assert len(tensors) == len(self.places), f"{len(tensors)} tensors for {len(self.places)} places"
        assert buffer.shape == (self.chunks, CHUNK_SIDE, CHUNK_SIDE), f"buffer {tuple(buffer.shape)}"
        pool = buffer[self.core_chunks :].view(-1)
        for tensor, place in zip(tensors, self.places, strict=True):
            assert tensor is None or tuple(tensor.shape) == place.shape, f"{place.name} has another shape"
            matrix = None if tensor is None else tensor.view(place.height, place.width)
            yield from _pairs_of(place, matrix, buffer, pool)

    def pool_pairs(self, tensors: Sequence[Tensor | None], pool: Tensor) -> Iterator[tuple[Tensor | None, Tensor]]:
        """As `pairs`, of what lies in the pool alone: fp32 `pool`, flat, at least `pool_elements`."""
        for tensor, place in zip(tensors, self.places, strict=True):
            yield from _strips_of(place, None if tensor is None else tensor.view(place.height, place.width), pool)

    def strips(self, index: int, tensor: Tensor, pool: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """As `pool_pairs`, of one tensor."""
        place = self.places[index]
        for part, strip in _strips_of(place, tensor.view(place.height, place.width), pool):
            assert part is not None
            yield part, strip

    def gather(self, tensors: Sequence[Tensor | None], out: Tensor) -> Tensor:
        """Copy tensors (any float dtype; None counts as zeros) into `out` [chunks, 64, 64] and zero the padding."""
        whole = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        for part, chunk in self.pairs(whole, out):
            if part is None:
                chunk.zero_()
            else:
                chunk.copy_(part)
        out[self.core_chunks :].view(-1)[self.pool_elements :].zero_()
        return out

    def scatter(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy `buffer` [chunks, 64, 64] into the tensors (contiguous); the padding is not read."""
        for part, chunk in self.pairs(tensors, buffer):
            assert part is not None
            part.copy_(chunk)


def _place(name: str, shape: tuple[int, ...], first_chunk: int, pool_offset: int, kind: str) -> ParameterPlace:
    height = shape[0] if shape else 1
    width = math.prod(shape[1:])
    core_height, core_width = (height // CHUNK_SIDE * CHUNK_SIDE, width // CHUNK_SIDE * CHUNK_SIDE)
    if core_height * core_width == 0:  # no whole chunk: everything goes to the pool, as one bottom strip
        core_height = core_width = 0
    return ParameterPlace(name, shape, height, width, core_height, core_width, first_chunk, pool_offset, kind)


def _pairs_of(
    place: ParameterPlace, matrix: Tensor | None, buffer: Tensor, pool: Tensor
) -> Iterator[tuple[Tensor | None, Tensor]]:
    high, wide = place.core_height, place.core_width
    if place.core_chunks:
        down, across = high // CHUNK_SIDE, wide // CHUNK_SIDE
        chunks = buffer[place.first_chunk : place.first_chunk + place.core_chunks]
        core = None
        if matrix is not None:
            core = matrix[:high, :wide].view(down, CHUNK_SIDE, across, CHUNK_SIDE).transpose(1, 2)
        yield core, chunks.view(down, across, CHUNK_SIDE, CHUNK_SIDE)
    yield from _strips_of(place, matrix, pool)


def _strips_of(place: ParameterPlace, matrix: Tensor | None, pool: Tensor) -> Iterator[tuple[Tensor | None, Tensor]]:
    high, wide = place.core_height, place.core_width
    offset = place.pool_offset
    strips = ((slice(0, high), slice(wide, None), place.width - wide), (slice(high, None), slice(None), place.width))
    for rows, columns, width in strips:
        height = len(range(*rows.indices(place.height)))
        if height * width:
            strip = pool[offset : offset + height * width].view(height, width)
            yield None if matrix is None else matrix[rows, columns], strip
            offset += height * width


def difference(mine: Layout, theirs: Layout | None) -> str:
    """The first parameter that differs, in words."""
    if theirs is None:
        return ""
    ours = [(place.name, place.shape, place.kind) for place in mine.places]
    runs = [(place.name, place.shape, place.kind) for place in theirs.places]
    for own, run in zip(ours, runs, strict=False):
        if own != run:
            inner = " (give the model inside of its wrapper)" if own[0].endswith(f".{run[0]}") else ""
            inner = inner or (
                " (module.compile() keeps names that torch.compile changes)" if COMPILED in own[0] else ""
            )
            words, theirs_words = (" ".join(map(str, filter(None, place))) for place in (own, run))
            return f": {words} stands where the run has {theirs_words}{inner}"
    return f": it has {len(ours)} parameters, the run has {len(runs)}"


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
