"""Free top-k, as in DeMo's paper (arXiv 2411.19870v1): the k largest of a chunk's 4096 coefficients, wherever they are.

The bytes hold the gaps between a chunk's ascending indices in a Golomb code cut in planes, so that every plane decodes in a
few passes over whole arrays: a gap is `quotient * modulus + remainder`; two remainders are one number of `pair_bits` bits, and
the quotients are one run-length string (a 1 after as many 0 as the quotient says). The modulus is the one that costs least
when indices are uniform, which they are after the first steps: 9.5 bits a component at k = 32, of which 1 is its sign; the
entropy is 9.3.

    remainders' low 8 bits, pair after pair | their high bits | quotients

Refuses bytes that are not exactly what `encode` makes. Group votes (`votes`) cost less and need no check.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.layout import CHUNK_ELEMENTS
from node.optim.votes import bits
from node.optim.votes.groups import NotANumber, VotesError

SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
"""k that may be chosen: 32 is the paper's. All even, so that remainders pair up."""

LARGE_SIZES = (640, 1024, 1536, 2048)
"""k that may be chosen with 8-bit values: 640 and 1536 take 16 and 8 times fewer bytes than fp32 of all coefficients. So many
are too unlike each other for one or two bits (`tests/unit/optim/test_payload.py` has the error)."""

_LOW_BITS = 8
Indices = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Code:
    """The code of one k: two remainders below `modulus` in `pair_bits` bits."""

    modulus: int
    pair_bits: int


@functools.cache
def code(k: int) -> Code:
    """The cheapest code for uniform indices. Raises `VotesError` for a k that is not offered."""
    if k not in SIZES + LARGE_SIZES:
        raise VotesError(f"k {k} is none of {SIZES + LARGE_SIZES}")

    def cost(pair_bits: int) -> float:
        past = (1 - k / CHUNK_ELEMENTS) ** math.isqrt(2**pair_bits)
        return pair_bits / 2 + past / (1 - past)

    pair_bits = min(range(2, 2 * _LOW_BITS + 1), key=cost)
    return Code(math.isqrt(2**pair_bits), pair_bits)


def select(momentum: Tensor, k: int) -> Tensor:
    """The coefficients of the k largest magnitudes of fp32 [chunks, 64, 64]: int64 [chunks, k], ascending.

    Which of equal magnitudes are taken is private to the peer. Raises `NotANumber` if a coefficient is NaN.
    """
    code(k)
    magnitudes = momentum.reshape(-1, CHUNK_ELEMENTS).abs()
    largest = magnitudes.topk(k, dim=1, sorted=False)
    if bool(largest.values.isnan().any()):  # NaN is the largest of all
        raise NotANumber("the momentum holds NaN")
    return largest.indices.sort(1).values


def settled(chosen: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
    """Indices int64 [chunks, k] and their signed sizes int16 [chunks, k], those of size 0 at the lowest indices that are free.

    So that votes have one encoding: a component that says nothing could otherwise be anywhere. Both ascending by index.
    """
    rows = (signed == 0).any(1).nonzero().view(-1)
    if not len(rows):
        return chosen, signed
    loud = signed[rows].new_zeros(len(rows), CHUNK_ELEMENTS).scatter_(1, chosen[rows], signed[rows])
    order = torch.arange(CHUNK_ELEMENTS, 0, -1, dtype=torch.int32, device=chosen.device)
    # what says something first, then what is free, from the lowest index on
    wanted = order + CHUNK_ELEMENTS * (loud != 0).to(torch.int32)
    places = wanted.topk(chosen.shape[1], dim=1).indices.sort(1).values
    chosen, signed = chosen.clone(), signed.clone()
    chosen[rows], signed[rows] = places, loud.gather(1, places)
    return chosen, signed


def encode(chosen: Tensor, k: int) -> bytes:
    """The bytes of ascending indices [chunks, k]."""
    rule, kernels = code(k), bits.compiled()
    pairs, string = _gaps(chosen, rule) if kernels is None else _compiled_gaps(chosen, k, rule, kernels)
    planes = [
        bits.pack(torch.from_numpy((pairs >> shift & 0xFF).astype(np.uint8)), width).numpy().tobytes()
        for shift, width in _planes(rule)
    ]
    return b"".join((*planes, string.tobytes()))


def _gaps(chosen: Tensor, rule: Code) -> tuple[npt.NDArray[np.int64], Bytes]:
    """The remainders, pair by pair, and the quotients' string."""
    whole = chosen.cpu().numpy().astype(np.int64)
    gaps = np.diff(whole, axis=1, prepend=-1) - 1
    quotients, remainders = np.divmod(gaps.reshape(-1), rule.modulus)
    ones = np.cumsum(quotients + 1) - 1
    string = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, dtype=np.uint8)
    string[ones] = 1
    return remainders[0::2] + rule.modulus * remainders[1::2], np.packbits(string, bitorder="little")


def _compiled_gaps(chosen: Tensor, k: int, rule: Code, kernels: Any) -> tuple[npt.NDArray[np.int64], Bytes]:
    whole = np.ascontiguousarray(chosen.cpu().numpy(), dtype=np.int64)
    pairs = np.empty(whole.size // 2, dtype=np.int64)
    string = np.zeros(bits.packed_bytes(_string_bits_max(len(whole), k), 1), dtype=np.uint8)
    written = kernels.index_gaps(whole, rule.modulus, pairs, string)
    assert written >= 0, "indices are not ascending within a chunk"
    return pairs, string[: bits.packed_bytes(written, 1)]


def _planes(rule: Code) -> list[tuple[int, int]]:
    """Shift and width of the planes of a pair of remainders: the low 8 bits, then what is above them."""
    low = (0, min(_LOW_BITS, rule.pair_bits))
    return [low] if rule.pair_bits <= _LOW_BITS else [low, (_LOW_BITS, rule.pair_bits - _LOW_BITS)]


def bytes_max(chunks: int, k: int) -> int:
    """The longest `encode` can be: a chunk's quotients sum up to at most 4095 / modulus."""
    return _plane_bytes(chunks, k) + bits.packed_bytes(_string_bits_max(chunks, k), 1)


def _string_bits_max(chunks: int, k: int) -> int:
    return chunks * (k + (CHUNK_ELEMENTS - 1) // code(k).modulus)


def _plane_bytes(chunks: int, k: int) -> int:
    return sum(bits.packed_bytes(chunks * k // 2, width) for _, width in _planes(code(k)))


def split(data: bytes, k: int, chunks: int) -> tuple[bytes, bytes]:
    """The bytes of the indices of `chunks` chunks, which end with their last quotient, and what is behind them."""
    first = _plane_bytes(chunks, k)
    string = np.frombuffer(data, dtype=np.uint8)[first:]
    ones = np.cumsum(np.bitwise_count(string), dtype=np.int64)
    end = first + min(int(np.searchsorted(ones, chunks * k)) + 1, len(string))
    return (data, b"") if not chunks else (data[:end], data[end:])


def decode(data: bytes, k: int, chunks: int) -> Indices:
    """The inverse of `encode`: int32 [chunks, k], ascending. Raises `VotesError` for bytes that `encode` cannot make."""
    rule, count = code(k), chunks * k
    first = _plane_bytes(chunks, k)
    if not first <= len(data) <= bytes_max(chunks, k):
        raise VotesError(
            f"{len(data)} bytes of indices, not {first} to {bytes_max(chunks, k)} ({chunks} chunks, k {k})"
        )
    if not count:
        return np.empty((chunks, k), np.int32)
    array = np.frombuffer(data, dtype=np.uint8)
    planes, offset = [], 0
    for _, width in _planes(rule):
        plane = array[offset : offset + bits.packed_bytes(count // 2, width)]
        whole = torch.from_numpy(plane.copy())
        if not bits.ends_clean(whole, width, count // 2):
            raise VotesError("bits behind the last remainder are not 0")
        planes.append(bits.unpack(whole, width, count // 2).numpy())
        offset += len(plane)
    kernels = bits.compiled()
    if kernels is not None:
        low, high = planes[0], planes[1] if len(planes) > 1 else planes[0][:0]
        chosen = np.empty((chunks, k), np.int32)
        string = array[first:].copy()
        if kernels.index_sums(low, high, rule.modulus, string.ctypes.data, len(string), chosen):
            return chosen
    return _sums(planes, array[first:], rule, chunks)  # which has the words for what is wrong


def _sums(planes: Sequence[Bytes], string: Bytes, rule: Code, chunks: int) -> Indices:
    """The indices, int32 [chunks, k], from the pairs' planes and the quotients' string. Raises `VotesError`."""
    pairs = np.zeros(len(planes[0]), np.int32)
    for plane, (shift, _) in zip(planes, _planes(rule), strict=True):
        pairs |= plane.astype(np.int32) << shift
    count = 2 * len(pairs)
    remainders = np.empty(count, np.int32)
    np.divmod(pairs, np.int32(rule.modulus), out=(remainders[1::2], remainders[0::2]))
    if int(remainders[1::2].max()) >= rule.modulus:
        raise VotesError(f"a remainder is not below {rule.modulus}")
    ones = np.flatnonzero(np.unpackbits(string, bitorder="little"))
    if len(ones) != count or int(ones[-1]) // 8 != len(string) - 1:
        raise VotesError(f"{len(ones)} gaps of {count}, or bytes behind the last")
    quotients = np.diff(ones, prepend=-1) - 1
    gaps = np.minimum(quotients, CHUNK_ELEMENTS).astype(np.int32) * np.int32(rule.modulus) + remainders
    chosen = np.cumsum(gaps.reshape(chunks, -1) + 1, axis=1, dtype=np.int32) - 1
    if int(chosen[:, -1].max()) >= CHUNK_ELEMENTS:
        raise VotesError(f"an index is beyond the {CHUNK_ELEMENTS} coefficients of a chunk")
    return chosen
