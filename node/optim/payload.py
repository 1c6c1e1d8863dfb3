"""What one peer says about one step, as bytes: where its votes are, their signs and, if the method has them, their sizes.

    scales      one byte a chunk         only if the method's updates have a size (`values.scales`)
    sizes       1 or 7 bits a vote       only on the 2-bit and 8-bit grid
    votes       `votes.pack`             group votes: positions and signs
    signs       1 bit a component        top-k: 1 is negative
    indices     `topk.encode`            top-k

A `Format` is the run's; the size (g of the groups, k of top-k) is each peer's own. Reading refuses bytes of any
other length, and indices that are out of range or out of order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from node.optim import bits, topk, values, votes
from node.optim.layout import CHUNK_ELEMENTS
from node.optim.values import Grid
from node.optim.votes import VotesError

Selection = Literal["groups", "topk"]


@dataclass(frozen=True)
class Ballot:
    """One peer's decoded votes. The coefficients of a chunk are all different."""

    where: Tensor
    """Coefficients within 0..4095: int64 [chunks, votes]."""
    values: Tensor
    """Signed sizes on the grid: int8 [chunks, votes]."""
    codes: Tensor | None
    """Scale codes, uint8 [chunks], if the format has them."""


@dataclass(frozen=True)
class Choice:
    """A peer's own votes for some chunks, before they are bytes; what a format does not need is None."""

    found: Tensor
    """Packed group votes (see `votes.pack`), or the indices of top-k: int64 [chunks, k]."""
    negative: Tensor | None
    sizes: Tensor | None
    codes: Tensor | None

    def cpu(self) -> Choice:
        """The same in the host's memory."""
        found, *rest = self.found, self.negative, self.sizes, self.codes
        return Choice(found.cpu(), *(None if part is None else part.cpu() for part in rest))


@dataclass(frozen=True)
class Format:
    """How the peers of a run write their votes."""

    selection: Selection = "groups"
    grid: Grid = values.SIGN
    scaled: bool = False
    """Whether each chunk's scale travels, too."""

    def __post_init__(self) -> None:
        if self.selection not in get_args(Selection):
            raise ValueError(f"selection {self.selection!r} is none of {', '.join(get_args(Selection))}")

    @property
    def plain(self) -> bool:
        """Group votes with signs alone: the default, for which there are faster ways than through a `Ballot`."""
        return self == PLAIN

    @property
    def sizes(self) -> tuple[int, ...]:
        """What a peer may choose from."""
        return votes.GROUP_SIZES if self.selection == "groups" else topk.SIZES

    def votes_a_chunk(self, size: int) -> int:
        """Raises `VotesError` for a size that is not offered."""
        if self.selection == "groups":
            return votes.groups(size)
        topk.code(size)
        return size

    def bytes_max(self, chunks: int, size: int) -> int:
        """The longest payload; group votes always have exactly this length."""
        return self._front_bytes(chunks, size) + (
            votes.vote_bytes(chunks, size) if self.selection == "groups" else topk.bytes_max(chunks, size)
        )

    def _front_bytes(self, chunks: int, size: int) -> int:
        """Bytes before the votes or indices."""
        count = chunks * self.votes_a_chunk(size)
        signs = bits.packed_bytes(count, 1) if self.selection == "topk" else 0
        return chunks * self.scaled + bits.packed_bytes(count, self.grid.size_bits) + signs

    def choose(self, momentum: Tensor, size: int, scratch: Tensor | None = None) -> Choice:
        """A peer's votes from fp32 momentum [chunks, 64, 64]. Raises `votes.NotANumber` if a coefficient is NaN."""
        flat = momentum.reshape(-1, CHUNK_ELEMENTS)
        if self.selection == "groups":
            positions, negative = votes.select(momentum, size, scratch)
            packed = votes.pack(positions, negative, size)
            if self.plain:
                return Choice(packed, None, None, None)
            where = votes.indices(packed, size)[0]
        else:
            packed, where = None, topk.select(momentum, size)
        selected = flat.gather(1, where)
        sizes, codes = values.quantise(selected, self.grid)
        negative = (selected < 0).to(torch.uint8)
        return Choice(where if packed is None else packed, negative, sizes, codes)

    def encode(self, tiles: Sequence[Choice], size: int) -> bytes:
        """The bytes of a model's votes, chosen tile after tile."""

        def whole(planes: Iterable[Tensor | None]) -> Tensor:
            return torch.cat([plane for plane in planes if plane is not None])

        parts: list[Tensor] = []
        if self.scaled:
            parts.append(whole(tile.codes for tile in tiles))
        if self.grid.size_bits:
            sizes = whole(tile.sizes for tile in tiles)
            parts.append(bits.pack(sizes & 1 if self.grid is values.TWO_BIT else sizes, self.grid.size_bits))
        found = whole(tile.found for tile in tiles)
        if self.selection == "groups":
            return votes.to_bytes(torch.cat([*parts, found]))
        parts.append(bits.pack(whole(tile.negative for tile in tiles), 1))
        return votes.to_bytes(torch.cat(parts)) + topk.encode(found, size)

    def check(self, data: bytes, size: int, chunks: int) -> None:
        """The door: raises `VotesError` for bytes that no peer's `encode` makes."""
        if size not in self.sizes:
            raise VotesError(f"{'group size' if self.selection == 'groups' else 'k'} {size} is none of {self.sizes}")
        if self.selection == "groups":
            expected = self.bytes_max(chunks, size)
            if len(data) != expected:
                raise VotesError(f"{len(data)} bytes of votes, not {expected} ({chunks} chunks, group size {size})")
        else:
            self.decode(data, size, chunks, torch.device("cpu"))

    def decode(self, data: bytes, size: int, chunks: int, device: torch.device) -> Ballot:
        """The inverse of `encode`. Raises `VotesError` if the bytes are not a payload of this format and size."""
        count = chunks * self.votes_a_chunk(size)
        front = self._front_bytes(chunks, size)
        if not front <= len(data) <= self.bytes_max(chunks, size):
            raise VotesError(f"{len(data)} bytes of votes, not {front} to {self.bytes_max(chunks, size)}")
        raw, offset = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8), 0

        def take(length: int) -> Tensor:
            nonlocal offset
            offset += length
            return raw[offset - length : offset]

        codes = take(chunks).to(device) if self.scaled else None
        sizes: Tensor | None = None
        if self.grid.size_bits:
            plain = bits.unpack(take(bits.packed_bytes(count, self.grid.size_bits)), self.grid.size_bits, count)
            whole = plain | 2 if self.grid is values.TWO_BIT else plain
            sizes = whole.view(chunks, -1).to(device, torch.int8)
        if self.selection == "groups":
            packed = votes.from_bytes(data[offset:], size, chunks, device)
            where, signs = votes.indices(packed, size)
        else:
            negative = bits.unpack(take(bits.packed_bytes(count, 1)), 1, count)
            where = torch.from_numpy(topk.decode(data[offset:], size, chunks)).to(device, torch.int64)
            signs = 1 - 2 * negative.view(chunks, -1).to(device, torch.int8)
        return Ballot(where, signs if sizes is None else signs * sizes, codes)


PLAIN = Format()
"""Group votes with signs alone."""
