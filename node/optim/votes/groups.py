"""Group votes: which coefficients a peer votes for, and their bytes.

The 4096 coefficients of a chunk are split in `4096 / g` groups of g; a peer votes for the largest magnitude of each
group, with its sign. A group of zeros has no vote: its code is 0, and `silence` says so behind the votes. Here are the
numbers and their bytes only: whose votes they are, and what surrounds them on the wire, is not known here. It refuses NaN
when it selects, and bytes of the wrong length; every byte string of the right length is a valid payload.

**Where a coefficient belongs.** Row i, column j of a chunk (both frequencies); w = min(64, 4096 / g).

    slot     = 64 * i + w * (j div w) + (i + j) mod w
    group    = slot mod (4096 / g)
    position = slot div (4096 / g)

For g = 128 and g = 64 this is group `(i + j) mod (4096 / g)`. For smaller g there are more groups than diagonals, and
a diagonal is dealt out to `64 / g` groups by row. Each group spans all frequencies; positions follow the row.

**The bytes.** Chunk after chunk, group after group, one vote of b = log2(g) + 1 bits: `position + g * negative`. A
chunk's votes are one little-endian bit string: vote q takes bits q*b to q*b + b - 1, bit k being bit `k mod 8` (1 << k)
of byte `k div 8`. A chunk always fills whole bytes. At g = 128 a vote is one byte, at g = 8 two votes are, low half
first. ADR 3.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from node.optim.layout import CHUNK_ELEMENTS, CHUNK_SIDE
from node.optim.votes import bits as coding

GROUP_SIZES = (8, 16, 32, 64, 128)
"""What a peer may choose by its uplink: from 4 bits for each of 512 votes a chunk to 8 bits for each of 32."""


class VotesError(ValueError):
    """Bytes that are no votes: the wrong length, or a group size that does not exist."""


class NotANumber(ArithmeticError):  # noqa: N818
    """The momentum holds NaN, so that no vote can be taken. The peer's own fault."""


def groups(group_size: int) -> int:
    """Groups, and so votes, in a chunk. Raises `VotesError` for a group size that is not offered."""
    if group_size not in GROUP_SIZES:
        raise VotesError(f"group size {group_size} is none of {GROUP_SIZES}")
    return CHUNK_ELEMENTS // group_size


def bits(group_size: int) -> int:
    """Bits a vote: log2(g) of position and one of sign."""
    return group_size.bit_length()


def vote_bytes(chunks: int, group_size: int) -> int:
    """The length in bytes of the votes of `chunks` chunks."""
    return chunks * groups(group_size) * bits(group_size) // 8


@functools.cache
def coefficients(group_size: int, device: torch.device) -> Tensor:
    """int64 [4096]: the coefficient `64 * i + j` of every slot `position * groups + group`."""
    wide = min(CHUNK_SIDE, groups(group_size))
    slot = torch.arange(CHUNK_ELEMENTS)
    row, column = slot // CHUNK_SIDE, slot % CHUNK_SIDE
    return (row * CHUNK_SIDE + column // wide * wide + (column - row) % wide).to(device)


def select(momentum: Tensor, group_size: int, scratch: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest magnitude of each group of fp32 `momentum` [chunks, 64, 64].

    Returns `(positions, signs, silent)`, all [chunks, groups]: the position inside the group (uint8), 1 for a negative
    coefficient (uint8), and whether the whole group is zero, which is no vote (bool; position and sign are 0 then). Of equal
    magnitudes the lowest position wins, on every device. Raises `NotANumber` if a coefficient is NaN. `scratch` (fp32
    [3, chunks, 64, 64]) is made if not given.
    """
    count = groups(group_size)
    if scratch is None:
        scratch = momentum.new_empty(3, *momentum.shape)
    magnitudes = _grouped_magnitudes(momentum, group_size, scratch)
    positions = _first_largest(magnitudes)
    slots = positions * count + torch.arange(count, device=momentum.device)
    voted = coefficients(group_size, momentum.device)[slots]
    values = momentum.reshape(-1, CHUNK_ELEMENTS).gather(1, voted)
    silent = values == 0
    return positions.to(torch.uint8).masked_fill_(silent, 0), (values < 0).to(torch.uint8), silent


def _grouped_magnitudes(momentum: Tensor, group_size: int, scratch: Tensor) -> Tensor:
    """|momentum| as fp32 [chunks, positions, groups], in `scratch`.

    Row i is to be rotated by i inside blocks of w columns. Each block is written twice, side by side; a view whose
    rows start one element earlier each time then reads the rotated rows without an index.
    """
    chunks, count = momentum.shape[0], groups(group_size)
    wide = min(CHUNK_SIDE, count)
    across = CHUNK_SIDE // wide
    twice = scratch[:2].view(chunks, CHUNK_SIDE, across, 2, wide)
    torch.abs(momentum.view(chunks, CHUNK_SIDE, across, wide), out=twice[:, :, :, 0])
    twice[:, :, :, 1].copy_(twice[:, :, :, 0])
    row = 2 * CHUNK_SIDE
    shape = (chunks, CHUNK_SIDE // wide, wide, across, wide)
    strides = (CHUNK_SIDE * row, wide * row, row - 1, 2 * wide, 1)
    rotated = twice.as_strided(shape, strides, twice.storage_offset() + wide)
    return scratch[2].view(shape).copy_(rotated).view(chunks, group_size, count)


def _first_largest(values: Tensor) -> Tensor:
    """The first index of the largest along dimension 1 of fp32 [chunks, size, groups]: int64 [chunks, groups].

    torch promises the first index of equals on some devices only, and its index search is slow across strides. So:
    the largest of each run of positions, the first run that holds the largest, and the first position inside it.
    """
    chunks, size, count = values.shape
    runs = 8 if size >= 64 else 4
    within = size // runs
    by_run = values.view(chunks, runs, within, count)
    best_of_run = by_run.amax(2)
    best = best_of_run.amax(1)
    if bool(best.isnan().any()):
        raise NotANumber("the momentum holds NaN")
    run = _first_equal(best_of_run, best)
    index = run[:, None, None, :].expand(chunks, 1, within, count)
    winner = by_run.gather(1, index).squeeze(1)
    return run * within + _first_equal(winner, best)


def _first_equal(values: Tensor, best: Tensor) -> Tensor:
    """The first index along dimension 1 where [chunks, size, groups] equals [chunks, groups], as int64."""
    size = values.shape[1]
    countdown = torch.arange(size, 0, -1, dtype=torch.uint8, device=values.device)
    marks = (values == best[:, None]).view(torch.uint8) * countdown[:, None]
    return size - marks.amax(1).to(torch.int64)


def encode(positions: Tensor, signs: Tensor, group_size: int) -> bytes:
    """The votes' bytes, from what `select` found; `vote_bytes(chunks, group_size)` of them. Which are silent is not in them."""
    return to_bytes(pack(positions, signs, group_size))


def pack(positions: Tensor, signs: Tensor, group_size: int) -> Tensor:
    """As `encode`, but a flat uint8 tensor on the same device."""
    return coding.join(positions, signs, bits(group_size))


def to_bytes(packed: Tensor) -> bytes:
    """A uint8 tensor of any device as bytes."""
    return packed.cpu().numpy().tobytes()


def from_bytes(payload: bytes, group_size: int, chunks: int, device: torch.device) -> Tensor:
    """Bytes as a flat uint8 tensor on `device`. Raises `VotesError` unless the length fits."""
    expected = vote_bytes(chunks, group_size)
    if len(payload) != expected:
        raise VotesError(f"{len(payload)} bytes of votes, not {expected} ({chunks} chunks, group size {group_size})")
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def decode(payload: bytes, group_size: int, chunks: int) -> tuple[Tensor, Tensor]:
    """The inverse of `encode`: `(positions, signs)`, uint8 [chunks, groups]. Raises `VotesError` for a wrong length."""
    return unpack(from_bytes(payload, group_size, chunks, torch.device("cpu")), group_size)


def unpack(packed: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """As `decode`, from a flat uint8 tensor of whole chunks, on its device."""
    width, count = bits(group_size), groups(group_size)
    positions, signs = coding.split(packed, width, packed.numel() * 8 // width)
    return positions.view(-1, count), signs.view(-1, count)


def indices(packed: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Votes as `(coefficients, values)`: int64 [chunks, groups] within 0..4095 and int8 [chunks, groups] of +-1.

    The coefficients of one peer's chunk are all different, since groups do not overlap.
    """
    positions, signs = unpack(packed, group_size)
    count = groups(group_size)
    slots = positions.to(torch.int64) * count + torch.arange(count, device=packed.device)
    return coefficients(group_size, packed.device)[slots], 1 - 2 * signs.to(torch.int8)
