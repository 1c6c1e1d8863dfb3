"""Places that no peer chooses: which coefficients have a vote in a step follows from the run's seed and the number of the step.

The replication schemes of DeToNATION (arXiv 2502.06728) for our chunks. A size n means one coefficient in n, 4096 / n votes a
chunk. All peers of a step have the same places. Those of a larger n are among those of a smaller n, so peers of unlike sizes
add up. Chunk c has the step's places, moved by c, so that one step has votes at all frequencies:

    random      the first 4096 / n of a permutation that a step draws, each XOR 12 bits that the chunk draws
    striding    those whose index, modulo n, is (step + c) mod n, ascending
    slicing     a run of 4096 / n neighbours, number r(step + c) of n; r reverses the log2(n) lowest bits
    full        all 4096, ascending; n is 1

The places of `independent` are those of `random`, but for the permutation, which each peer draws from its own public key. So no
two peers have the same places, and a decoder has to know the author. Masks of chunks are the step's, as for `random`. ADR 33.

Draws are SHAKE-256 of the seed and the step, whole numbers alone: the same on every device and version. Striding and slicing
visit each coefficient once in n steps. Here are places only: values and bytes are `payload`'s. ADR 33.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from node.optim.layout import CHUNK_ELEMENTS
from node.optim.votes.groups import VotesError

Scheme = Literal["random", "striding", "slicing", "full"]
SCHEMES = get_args(Scheme)
INDEPENDENT = "independent"
DRAWN = (*SCHEMES, INDEPENDENT)
"""Selections whose places are in no payload."""

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""n that may be chosen: at 1,024 a chunk has 4 votes, and the signs of two chunks share a byte."""

FULL_SIZES = (1,)
_DOMAIN = b"swarmentum/v1/places\0"
_STEP_BYTES = 8


@dataclass(frozen=True)
class Draw:
    """What the places of a step follow from."""

    seed: bytes
    """The run's own: its id."""
    step: int
    """The step of the log whose votes these are."""
    authors: tuple[bytes, ...] = ()
    """With `independent`: the public key of each payload's author, in the order of the payloads; or of the one payload."""

    def of(self, number: int) -> Draw:
        """The draw of payload `number` of the step alone."""
        return Draw(self.seed, self.step, self.authors[number : number + 1]) if self.authors else self


def sizes(scheme: str) -> tuple[int, ...]:
    """The n that a scheme offers."""
    return FULL_SIZES if scheme == "full" else SIZES


def votes_a_chunk(scheme: str, size: int) -> int:
    """Raises `VotesError` for a size that is not offered."""
    if size not in sizes(scheme):
        raise VotesError(f"one in {size} is none of {sizes(scheme)} (selection {scheme})")
    return CHUNK_ELEMENTS // size


def places(scheme: str, draw: Draw, size: int, first: int, last: int, device: torch.device) -> Tensor:
    """The coefficients with a vote of chunks `first` to `last - 1`: int64 [chunks, votes], all different within a chunk.

    Raises `VotesError` for a size that is not offered.
    """
    order, moved = pattern(scheme, draw, size, first, last, device)
    return order ^ moved[:, None]


def pattern(scheme: str, draw: Draw, size: int, first: int, last: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same, as what a step has and what moves a chunk: int64 [votes] and [chunks], whose XOR is a place.

    Sizes are powers of two, so to XOR an offset is to add it. Raises `VotesError` for a size that is not offered.
    """
    count = votes_a_chunk(scheme, size)
    if scheme in ("random", INDEPENDENT):
        common = Draw(draw.seed, draw.step)
        if scheme == INDEPENDENT and len(draw.authors) != 1:
            raise ValueError(
                f"selection independent: {len(draw.authors)} authors of one payload; places follow from one"
            )
        order = permutation(draw if scheme == INDEPENDENT else common, device)[:count]
        return order, masks(common, 1 << last.bit_length(), device)[first:last]
    steps, turn = torch.arange(count, device=device), (torch.arange(first, last, device=device) + draw.step) % size
    if scheme == "striding":
        return size * steps, turn
    return steps, count * _reversed(turn, size)


@functools.lru_cache(maxsize=256)
def permutation(draw: Draw, device: torch.device) -> Tensor:
    """A step's order of the coefficients, or that of a step and an author: int64 [4096]. 256 take 8 MiB."""
    scores = np.frombuffer(_stream(draw, b"order", 8 * CHUNK_ELEMENTS), dtype="<u8")
    return torch.from_numpy(np.argsort(scores, kind="stable")).to(device)


@functools.lru_cache(maxsize=32)
def masks(draw: Draw, chunks: int, device: torch.device) -> Tensor:
    """12 bits for each of the first `chunks` chunks, int64: XOR with them permutes 0..4095. A larger `chunks` appends."""
    drawn = np.frombuffer(_stream(draw, b"chunks", 2 * chunks), dtype="<u2")
    return torch.from_numpy(drawn.astype(np.int64) % CHUNK_ELEMENTS).to(device)


def _stream(draw: Draw, what: bytes, count: int) -> bytes:
    named = _DOMAIN + what + len(draw.seed).to_bytes(_STEP_BYTES, "big") + draw.seed
    return hashlib.shake_256(named + draw.step.to_bytes(_STEP_BYTES, "big") + b"".join(draw.authors)).digest(count)


def _reversed(turn: Tensor, size: int) -> Tensor:
    """The log2(size) lowest bits of int64 `turn` in the opposite order: a run of a larger n is in one of a smaller n."""
    found = torch.zeros_like(turn)
    for bit in range(size.bit_length() - 1):
        found = found << 1 | turn >> bit & 1
    return found
