"""The sum of many peers' votes at the same places, as bytes: as many for four thousand peers as for four.

A place has one of the sums -cap to cap, a digit of base 2 cap + 1. As many digits as 64 bits hold make a word, the first digit
lowest; a word is 8 bytes, little endian, and the digits behind the last place are 0. A sum needs 2.4 bits with cap 2, 4 with
cap 7. One set of sums has one encoding, and reading refuses all other bytes.

`ballots` turns sums back into votes: `cap` payloads at most, which add up to the same. So all that applies payloads applies
sums, to the same bits. Only for selection `random` with signs, where places of few votes are among those of many. ADR 33.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.optim.votes import silence
from node.optim.votes.groups import VotesError
from node.optim.votes.payload import Format, Packed

SUMMED = Format("random")
"""The one format whose votes can be summed in the network."""
_WORD_BITS = 64
_WORD_BYTES = 8

Sums = NDArray[np.int16]
"""[chunks, votes of a chunk]: the votes of the smallest size that took part, in the order of the step's places."""


def digits(cap: int) -> int:
    """How many sums of -cap to cap a word holds."""
    count = 1
    while (2 * cap + 1) ** (count + 1) <= 1 << _WORD_BITS:
        count += 1
    return count


def sum_bytes(places: int, cap: int) -> int:
    """Bytes of the sums at so many places."""
    return -(-places // digits(cap)) * _WORD_BYTES


def none(chunks: int) -> Sums:
    """Sums without a place."""
    return np.zeros((chunks, 0), dtype=np.int16)


def stacked(parts: Sequence[Sums], size: int) -> Sums:
    """The sums of ranges, one after the other; `size` is the smallest of theirs, and places of a larger one are among its."""
    found = np.zeros((sum(map(len, parts)), SUMMED.votes_a_chunk(size)), dtype=np.int16)
    first = 0
    for part in parts:
        found[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return found


def add_up(payloads: Iterable[Packed], chunks: int) -> tuple[int, Sums]:
    """The smallest size of the payloads (the run's `one_in`, or a peer's own), and the uncapped sum of their votes.

    All payloads are of the format SUMMED. No payload gives size 0 and no place.
    """
    totals: dict[int, Sums] = {}
    for packed in payloads:
        assert packed.form == SUMMED, packed.form
        assert packed.negative is not None
        count = SUMMED.votes_a_chunk(packed.size)
        total = totals.setdefault(packed.size, np.zeros((chunks, count), dtype=np.int16))
        negative = np.unpackbits(packed.negative.numpy(), count=chunks * count, bitorder="little")
        said = (1 - 2 * negative.view(np.int8)).reshape(chunks, count)
        if packed.silent is not None:
            said[silence.unpack(packed.silent, count).numpy()] = 0
        total += said
    if not totals:
        return 0, none(chunks)
    smallest = min(totals)
    found = totals.pop(smallest)
    for total in totals.values():  # the first places of a chunk are those of the larger sizes
        found[:, : total.shape[1]] += total
    return smallest, found


def pack(sums: Sums, cap: int) -> bytes:
    """The bytes of sums, capped."""
    base, held = 2 * cap + 1, digits(cap)
    flat = np.clip(sums, -cap, cap).reshape(-1) + cap
    padded = np.zeros(-(-len(flat) // held) * held, dtype=np.uint64)
    padded[: len(flat)] = flat
    table = padded.reshape(-1, held)
    words = np.zeros(len(table), dtype="<u8")
    for place in reversed(range(held)):
        words = words * np.uint64(base) + table[:, place]
    return words.astype("<u8").tobytes()


def unpack(data: bytes, chunks: int, size: int, cap: int) -> Sums:
    """The inverse, int16 [chunks, votes]. Raises `VotesError` for bytes that `pack` does not make."""
    count = SUMMED.votes_a_chunk(size)
    places, base, held = chunks * count, 2 * cap + 1, digits(cap)
    if len(data) != sum_bytes(places, cap):
        raise VotesError(f"{len(data)} bytes of sums, not {sum_bytes(places, cap)} ({places} places, cap {cap})")
    words = np.frombuffer(data, dtype="<u8").astype(np.uint64)
    table = np.empty((len(words), held), dtype=np.int16)
    for place in range(held):
        table[:, place] = words % np.uint64(base)
        words //= np.uint64(base)
    flat = table.reshape(-1)
    if words.any() or flat[places:].any():
        raise VotesError("a word of sums holds more than its digits")
    return (flat[:places] - cap).reshape(chunks, count).astype(np.int16)


def ballots(sums: Sums) -> Iterator[bytes]:
    """Payloads of the format SUMMED that add up to these sums: number n votes where a sum is n or more, either way. The bytes
    are those of `SUMMED.encode`."""
    magnitude = np.abs(sums)
    for level in range(1, int(magnitude.max(initial=0)) + 1):
        signs = np.packbits(sums <= -level, bitorder="little").tobytes()
        quiet = np.packbits(magnitude < level, axis=1, bitorder="little")
        yield signs + silence.encode(torch.from_numpy(quiet))


# The ranges into which a model's chunks are divided, so that each has aggregators of its own, and one peer's votes by range.
#
# A range begins at an even chunk: two chunks have whole bytes of signs in every size. So cutting moves bytes, and decodes no
# vote. Only for the format of `sums`. ADR 33.

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
