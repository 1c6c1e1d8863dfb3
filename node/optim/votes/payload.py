"""What one peer says about one step, as bytes: where its votes are, their signs and, if the method has them, their sizes.

    scales      one byte a chunk         only if the method's updates have a size (`values.scales`)
    sizes       1 or 7 bits a vote       only on the 2-bit and 8-bit grid
    votes       `votes.pack`             group votes: positions and signs
    signs       1 bit a vote             all others: 1 is negative
    indices     `topk.encode`            top-k
    silence     `silence.encode`         only if a vote is silent, and never on the 8-bit grid, where the size 0 says it

A silent vote stands for a coefficient of zero and adds nothing. All its codes are 0; a silent component of top-k has the
lowest index that is free. A scale is 0 where the whole chunk is silent, and nowhere else. A `Format` is the run's; the size
(g of the groups, k of top-k, n of `places`) is each peer's own. Reading refuses bytes that `encode` does not make: votes
have one encoding. If places follow from the step (`places`), decoding needs a `Draw`, and the door (`check`) needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from node.optim.layout import CHUNK_ELEMENTS
from node.optim.votes import bits, places, silence, topk, values
from node.optim.votes import groups as votes
from node.optim.votes.groups import VotesError
from node.optim.votes.places import Draw
from node.optim.votes.values import Grid


class Form(Protocol):
    """`payload.Format`, or `PaperForm`. `chunks` is the layout's; a format may have its own and not look at it."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The group sizes, or k, that a peer may choose."""

    def votes(self, chunks: int, size: int) -> int:
        """Votes in one payload. Raises `VotesError` for a size that is not offered."""

    def body_bytes(self, chunks: int, size: int) -> int:
        """The longest payload without a silent vote."""

    def bytes_max(self, chunks: int, size: int) -> int:
        """The longest payload."""

    def check(self, data: bytes, size: int, chunks: int) -> None:
        """The door: raises `VotesError` for bytes that no peer's `encode` makes."""


Selection = Literal["groups", "topk", "random", "striding", "slicing", "full", "independent"]

TILE_CHUNKS = 1024
"""Chunks that are decoded at a time to check them: at most 4 MiB of indices."""


@dataclass(frozen=True)
class Ballot:
    """One peer's decoded votes for some chunks. The coefficients of a chunk are all different."""

    where: Tensor
    """Coefficients within 0..4095: int64 [chunks, votes]."""
    values: Tensor
    """Signed sizes on the grid, 0 for a silent vote: int8 [chunks, votes]."""
    codes: Tensor | None
    """Scale codes, uint8 [chunks], if the format has them."""


@dataclass(frozen=True)
class Choice:
    """A peer's own votes for some chunks, before they are bytes; what a format does not need is None."""

    found: Tensor | None
    """Packed group votes (see `votes.pack`), or the indices of top-k: int64 [chunks, k]."""
    negative: Tensor | None
    sizes: Tensor | None
    codes: Tensor | None
    silent: Tensor | None
    """Which votes are silent, as `silence.pack` says it."""

    def cpu(self) -> Choice:
        """The same in the host's memory."""
        parts = (self.found, self.negative, self.sizes, self.codes, self.silent)
        return Choice(*(None if part is None else part.cpu() for part in parts))


@dataclass(frozen=True)
class Packed:
    """One peer's payload as it came, in planes on a device: a few bits a vote, decoded where and when they are added up."""

    form: Format
    size: int
    chunks: int
    draw: Draw | None
    """What the places follow from, if the format has none in its bytes and they are asked for."""
    found: Tensor | None
    """Packed group votes, uint8 [chunks, bytes], or the indices of top-k: int16 [chunks, k]."""
    negative: Tensor | None
    """Packed, of all but group votes: 1 bit a vote."""
    sizes: Tensor | None
    """Packed: `grid.size_bits` a vote."""
    codes: Tensor | None
    """uint8 [chunks]."""
    silent: Tensor | None
    """As `silence.pack`: uint8 [chunks, bytes]; None if no vote is silent, and on the 8-bit grid."""

    def to(self, device: torch.device) -> Packed:
        """The same in the memory of a device."""
        planes = (self.found, self.negative, self.sizes, self.codes, self.silent)
        moved = (None if plane is None else plane.to(device) for plane in planes)
        return Packed(self.form, self.size, self.chunks, self.draw, *moved)

    @property
    def grouped(self) -> Tensor:
        """Packed group votes, uint8 [chunks, bytes]: of a format that has them."""
        assert self.found is not None
        return self.found

    def ballot(self, first: int, last: int) -> Ballot:
        """The votes of chunks `first` to `last - 1`."""
        if self.negative is None:
            where, signed = votes.indices(self.grouped[first:last].reshape(-1), self.size)
        else:
            where, signed = self._where(first, last, self.negative.device), self._signs(self.negative, first, last)
        sizes = self._sizes(first, last)
        signed = signed if sizes is None else signed * sizes
        silence.hush(signed, None if self.silent is None else self.silent[first:last])
        return Ballot(where, signed, None if self.codes is None else self.codes[first:last])

    def _where(self, first: int, last: int, device: torch.device) -> Tensor:
        """Coefficients of top-k, or of drawn places: int64 [chunks, votes]."""
        if self.found is not None:
            return self.found[first:last].to(torch.int64)
        assert self.draw is not None, (
            f"selection {self.form.selection}: places follow from the step, and no step is given"
        )
        return places.places(self.form.selection, self.draw, self.size, first, last, device)

    def _signs(self, negative: Tensor, first: int, last: int) -> Tensor:
        """1 and -1, int8 [chunks, votes]."""
        count = self.form.votes_a_chunk(self.size)
        found = bits.unpack_range(negative, 1, first * count, last * count)
        return 1 - 2 * found.view(-1, count).to(torch.int8)

    def _sizes(self, first: int, last: int) -> Tensor | None:
        """int8 [chunks, votes], or None if the format has none."""
        if self.sizes is None:
            return None
        count, grid = self.form.votes_a_chunk(self.size), self.form.grid
        plain = bits.unpack_range(self.sizes, grid.size_bits, first * count, last * count).view(-1, count)
        return (plain | 2 if grid is values.TWO_BIT else plain).to(torch.int8)

    def checked(self) -> Packed:
        """The same. Raises `VotesError` if silent votes, or scales, are not as `encode` writes them."""
        if self.silent is None and self.form.grid is not values.EIGHT_BIT and self.codes is None:
            return self
        for first in range(0, self.chunks, TILE_CHUNKS):
            last = min(first + TILE_CHUNKS, self.chunks)
            said, sizes = self._said(first, last), self._sizes(first, last)
            silent = torch.zeros_like(said) if sizes is None else sizes == 0
            if self.silent is not None:
                silent = silent | silence.unpack(self.silent[first:last], said.shape[1])
            if self.codes is not None and not torch.equal(self.codes[first:last] == 0, silent.all(1)):
                raise VotesError("a chunk's scale is 0 and a vote of it is not, or the other way round")
            if sizes is not None and self.form.grid is values.TWO_BIT:
                said |= sizes != values.TWO_BIT_SMALL
            if bool((said & silent).any()):
                raise VotesError("a silent vote has a code that is not 0")
        return self

    def _said(self, first: int, last: int) -> Tensor:
        """Whether a vote's sign or place is another than that of a silent one: bool [chunks, votes]."""
        if self.negative is None:
            where, signs = votes.indices(self.grouped[first:last].reshape(-1), self.size)
            return (where != _first_of_groups(self.size, where)) | (signs < 0)
        said = self._signs(self.negative, first, last) < 0
        if self.found is not None:
            said |= self.found[first:last] != torch.arange(self.size, dtype=self.found.dtype)
        return said


def _first_of_groups(size: int, like: Tensor) -> Tensor:
    """The coefficient at position 0 of each group: int64 [groups]."""
    return votes.coefficients(size, like.device)[: votes.groups(size)]


@dataclass(frozen=True)
class Format:
    """The format in which the peers of a run write their votes."""

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
        """The sizes that a peer may choose."""
        if self.selection == "groups":
            return votes.GROUP_SIZES
        if self.selection == "topk":
            return topk.SIZES + topk.LARGE_SIZES if self.grid is values.EIGHT_BIT else topk.SIZES
        return places.sizes(self.selection)

    @property
    def drawn(self) -> bool:
        """Whether places follow from the step: payloads have none, and `choose` and `ballot` need a `Draw`."""
        return self.selection in places.DRAWN

    @property
    def independent(self) -> bool:
        """Whether a payload's places follow from its author, too, which a `Draw` then has to name."""
        return self.selection == places.INDEPENDENT

    def check_authors(self, payloads: int, authors: Sequence[bytes]) -> None:
        """Raises `ValueError` if places follow from authors, and not each of the payloads has one of its own."""
        different = len({*authors} - {b""})
        if self.independent and not payloads == len(authors) == different:
            raise ValueError(
                f"selection independent: {payloads} payloads of {different} different authors; give the author of each, "
                "because its places follow from it"
            )

    def votes_a_chunk(self, size: int) -> int:
        """Raises `VotesError` for a size that is not offered."""
        if self.selection == "groups":
            return votes.groups(size)
        if self.drawn:
            return places.votes_a_chunk(self.selection, size)
        if size not in self.sizes:
            raise VotesError(f"k {size} is none of {self.sizes} (values {self.grid.name})")
        return size

    def votes(self, chunks: int, size: int) -> int:
        """Votes in one payload. Raises `VotesError` for a size that is not offered."""
        return chunks * self.votes_a_chunk(size)

    def bytes_max(self, chunks: int, size: int) -> int:
        """The longest payload: what it says of silent votes is at most one bit a vote and one bit a chunk."""
        tail = 0 if self.grid is values.EIGHT_BIT else silence.bytes_max(chunks, self.votes_a_chunk(size))
        return self.body_bytes(chunks, size) + tail

    def body_bytes(self, chunks: int, size: int) -> int:
        """The longest payload without a silent vote; but for top-k it always has exactly this length."""
        found = {"groups": votes.vote_bytes, "topk": topk.bytes_max}.get(self.selection)
        return self._front_bytes(chunks, size) + (0 if found is None else found(chunks, size))

    def _front_bytes(self, chunks: int, size: int) -> int:
        """Bytes before the votes or indices."""
        return sum(self._lengths(chunks * self.votes_a_chunk(size), chunks))

    def choose(
        self, momentum: Tensor, size: int, scratch: Tensor | None = None, draw: Draw | None = None, first: int = 0
    ) -> Choice:
        """A peer's votes from fp32 momentum [chunks, 64, 64]. Raises `votes.NotANumber` if a coefficient is NaN.

        Drawn places need the step's `draw`, and which chunk of the model the `first` one here is.
        """
        flat = momentum.reshape(-1, CHUNK_ELEMENTS)
        if self.selection == "topk":
            where = topk.select(momentum, size)
            selected = flat.gather(1, where)
            sizes, codes = values.quantise(selected, self.grid)
            where, signed = topk.settled(where, sizes.to(torch.int16) * selected.sign().to(torch.int16))
            return self._choice(where, (signed < 0).to(torch.uint8), signed.abs().to(torch.uint8), codes)
        if self.drawn:
            return self._drawn(flat, size, draw, first)
        positions, negative, silent = votes.select(momentum, size, scratch)
        packed = votes.pack(positions, negative, size)
        if self.plain:
            return Choice(packed, None, None, None, silence.pack(silent))
        sizes, codes = values.quantise(flat.gather(1, votes.indices(packed, size)[0]), self.grid)
        quiet = sizes == 0
        packed = votes.pack(positions.masked_fill_(quiet, 0), negative.masked_fill_(quiet, 0), size)
        return self._choice(packed, None, sizes, codes)

    def _drawn(self, flat: Tensor, size: int, draw: Draw | None, first: int) -> Choice:
        assert draw is not None, f"selection {self.selection}: places follow from the step, and no step is given"
        if bool(flat.isnan().any()):
            raise votes.NotANumber("the momentum holds NaN")
        where = places.places(self.selection, draw, size, first, first + len(flat), flat.device)
        selected = flat.gather(1, where)
        sizes, codes = values.quantise(selected, self.grid)
        return self._choice(None, ((selected < 0) & (sizes != 0)).to(torch.uint8), sizes, codes)

    def _choice(self, found: Tensor | None, negative: Tensor | None, sizes: Tensor, codes: Tensor) -> Choice:
        silent = None if self.grid is values.EIGHT_BIT else silence.pack(sizes == 0)
        return Choice(found, negative, sizes if self.grid.size_bits else None, codes if self.scaled else None, silent)

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
        tail = b"" if self.grid is values.EIGHT_BIT else silence.encode(whole(tile.silent for tile in tiles))
        if self.selection == "groups":
            return votes.to_bytes(torch.cat([*parts, whole(tile.found for tile in tiles)])) + tail
        parts.append(bits.pack(whole(tile.negative for tile in tiles), 1))
        indices = b"" if self.drawn else topk.encode(whole(tile.found for tile in tiles), size)
        return votes.to_bytes(torch.cat(parts)) + indices + tail

    def check(self, data: bytes, size: int, chunks: int) -> None:
        """The door: raises `VotesError` for bytes that no peer's `encode` makes."""
        if size not in self.sizes:
            what = {"groups": "group size", "topk": "k"}.get(self.selection, "one in")
            raise VotesError(f"{what} {size} is none of {self.sizes}")
        self.read(data, size, chunks)

    def read(self, data: bytes, size: int, chunks: int, draw: Draw | None = None) -> Packed:
        """A payload in its planes, on the CPU. Raises `VotesError` if the bytes are not one of this format and size.

        `draw` is the step's, for places that follow from it; the bytes are checked without.
        """
        count = chunks * self.votes_a_chunk(size)
        front, longest = self._front_bytes(chunks, size), self.bytes_max(chunks, size)
        body = self.body_bytes(chunks, size)
        if not (front if self.selection == "topk" else body) <= len(data) <= longest:
            raise VotesError(
                f"{len(data)} bytes of votes, not {body}, or up to {longest} with silent ones ({chunks} chunks, size {size})"
            )
        raw = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        lengths = self._lengths(count, chunks)
        codes, sizes, negative, rest = torch.split(raw, [*lengths, len(data) - sum(lengths)])
        found, tail = None, data[body:]
        if self.selection == "groups":
            found = rest[: votes.vote_bytes(chunks, size)].view(chunks, -1)
        elif self.selection == "topk":
            indices, tail = topk.split(data[front:], size, chunks)
            found = torch.from_numpy(topk.decode(indices, size, chunks)).to(torch.int16)
        if not (
            bits.ends_clean(sizes, self.grid.size_bits, count) and bits.ends_clean(negative, 1, len(negative) and count)
        ):
            raise VotesError("bits behind the last size or sign are not 0")
        if tail and self.grid is values.EIGHT_BIT:
            raise VotesError(f"{len(tail)} bytes behind the votes, which on the 8-bit grid are all there is")
        return Packed(
            self,
            size,
            chunks,
            draw,
            found,
            None if self.selection == "groups" else negative,
            sizes if self.grid.size_bits else None,
            codes if self.scaled else None,
            silence.decode(tail, chunks, self.votes_a_chunk(size)),
        ).checked()

    def _lengths(self, count: int, chunks: int) -> list[int]:
        """Bytes of the scales, the sizes and the signs."""
        signs = 0 if self.selection == "groups" else bits.packed_bytes(count, 1)
        return [chunks * self.scaled, bits.packed_bytes(count, self.grid.size_bits), signs]

    def decode(self, data: bytes, size: int, chunks: int, device: torch.device, draw: Draw | None = None) -> Ballot:
        """All of a payload at once, 9 bytes a vote. Raises `VotesError` as `read` does."""
        return self.read(data, size, chunks, draw).to(device).ballot(0, chunks)


PLAIN = Format()
"""Group votes with signs alone."""
