"""The ranges into which a model's chunks are divided, so that each has aggregators of its own, and one peer's votes by range.

A range begins at an even chunk: two chunks have whole bytes of signs in every size. So cutting moves bytes, and decodes no
vote. Only for the format of `sums`. ADR 33.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from node.optim.votes import silence
from node.optim.votes.groups import VotesError
from node.optim.votes.payload import Packed
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


def join(parts: Sequence[bytes], sizes: Sequence[int], chunks: int) -> tuple[int, bytes]:
    """The inverse of `cut`: the size and the votes, of as many ranges as parts. Raises `VotesError` for bytes that it does not
    make. Of parts with several sizes each counts as in sums: what a larger size has no place for is silent."""
    size = min(sizes)
    count = SUMMED.votes_a_chunk(size)
    signs, rows = list[bytes](), torch.zeros(chunks, silence.row_bytes(count), dtype=torch.uint8)
    for data, own, part in zip(parts, sizes, borders(chunks, len(parts)), strict=True):
        packed = SUMMED.read(data, own, len(part))
        assert packed.negative is not None
        if own != size:
            negative, quiet = _wider(packed, len(part), count)
            signs.append(negative)
            rows[part.start : part.stop] = quiet
            continue
        signs.append(packed.negative.numpy().tobytes())
        if packed.silent is not None:
            rows[part.start : part.stop] = packed.silent
    joined = b"".join(signs)
    if len(joined) != -(-chunks * count // 8):
        raise VotesError(f"{len(joined)} bytes of signs in {len(parts)} ranges of {chunks} chunks, size {size}")
    return size, joined + silence.encode(rows)


def _wider(packed: Packed, chunks: int, count: int) -> tuple[bytes, Tensor]:
    """The signs, and which votes are silent, with `count` votes a chunk: the first ones are those of a larger size."""
    assert packed.negative is not None
    said = SUMMED.votes_a_chunk(packed.size)
    negative, quiet = np.zeros((chunks, count), dtype=np.uint8), np.ones((chunks, count), dtype=np.bool_)
    found = np.unpackbits(packed.negative.numpy(), count=chunks * said, bitorder="little")
    negative[:, :said] = found.reshape(chunks, said)
    quiet[:, :said] = False if packed.silent is None else silence.unpack(packed.silent, said).numpy()
    return np.packbits(negative, bitorder="little").tobytes(), silence.pack(torch.from_numpy(quiet))
