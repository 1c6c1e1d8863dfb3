"""The ranges into which a model's chunks are divided, so that each has aggregators of its own, and one peer's votes by range.

A range begins at an even chunk: two chunks have whole bytes of signs in every size. So cutting moves bytes, and decodes no
vote. Only for the format of `sums`. ADR 33.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from node.optim.votes import silence
from node.optim.votes.groups import VotesError
from node.optim.votes.sums import SUMMED

_CHUNKS_A_UNIT = 2


def borders(chunks: int, ranges: int) -> list[range]:
    """The chunks of each range: as many as may be, all the same; some have none where ranges are more than pairs of chunks."""
    units = -(-chunks // _CHUNKS_A_UNIT)
    edges = [min(_CHUNKS_A_UNIT * (units * at // ranges), chunks) for at in range(ranges + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def cut(votes: bytes, size: int, chunks: int, ranges: int) -> list[bytes]:
    """A payload's votes of each range, as `SUMMED.encode` would write those chunks. Raises `VotesError` for other bytes."""
    packed, count = SUMMED.read(votes, size, chunks), SUMMED.votes_a_chunk(size)
    assert packed.negative is not None
    found = []
    for part in borders(chunks, ranges):
        signs = packed.negative[part.start * count // 8 : -(-part.stop * count // 8)].numpy().tobytes()
        quiet = b"" if packed.silent is None else silence.encode(packed.silent[part.start : part.stop])
        found.append(signs + quiet)
    return found


def join(parts: Sequence[bytes], size: int, chunks: int) -> bytes:
    """The inverse of `cut`, with as many ranges as parts. Raises `VotesError` for bytes that it does not make."""
    count, rows = (
        SUMMED.votes_a_chunk(size),
        torch.zeros(chunks, silence.row_bytes(SUMMED.votes_a_chunk(size)), dtype=torch.uint8),
    )
    signs = []
    for data, part in zip(parts, borders(chunks, len(parts)), strict=True):
        packed = SUMMED.read(data, size, len(part))
        assert packed.negative is not None
        signs.append(packed.negative.numpy().tobytes())
        if packed.silent is not None:
            rows[part.start : part.stop] = packed.silent
    joined = b"".join(signs)
    if len(joined) != -(-chunks * count // 8):
        raise VotesError(f"{len(joined)} bytes of signs in {len(parts)} ranges of {chunks} chunks, size {size}")
    return joined + silence.encode(rows)
