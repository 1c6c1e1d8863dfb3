"""Votes that say nothing: which of a payload's votes stand for a coefficient of exactly zero, as bits and as bytes.

A group of zeros (a row of a table whose token nobody met, a frozen expert, padding) has no largest coefficient. Its vote keeps
its place in the payload, with the code 0, and is *silent*: it adds nothing to a sum. A payload without a silent vote has not a
byte more. Otherwise a tail follows the votes:

    marked      one bit a chunk: it has a silent vote
    rows        of each marked chunk one bit a vote, in whole bytes: the vote is silent

Bit q is bit `q mod 8` (1 << q mod 8) of byte `q div 8`; bits that stand for nothing are 0. A tail that marks no chunk, or marks
one without a silent vote, is refused: a set of votes has one encoding. Knows bits only, not whose votes they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from node.optim.votes.groups import VotesError


def row_bytes(votes: int) -> int:
    """Bytes of the bits of one chunk with so many votes."""
    return -(-votes // 8)


def bytes_max(chunks: int, votes: int) -> int:
    """The longest tail, in bytes: every chunk (of `votes` votes each) has a silent vote."""
    return row_bytes(chunks) + chunks * row_bytes(votes)


def pack(silent: Tensor) -> Tensor:
    """bool [chunks, votes], true for a silent vote, as bits in the host's memory: uint8 [chunks, row_bytes(votes)]."""
    packed = np.packbits(silent.cpu().numpy(), axis=1, bitorder="little")
    return torch.from_numpy(packed)


def unpack(rows: Tensor, votes: int) -> Tensor:
    """The inverse of `pack`, on the rows' device: bool [chunks, votes]."""
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bits = (rows[:, :, None] >> places) & 1
    return bits.view(len(rows), -1)[:, :votes].to(torch.bool)


def encode(rows: Tensor) -> bytes:
    """The tail, from bits as `pack` makes them; no byte at all where nothing is silent."""
    array = rows.numpy()
    marked = array.any(axis=1)
    if not marked.any():
        return b""
    return np.packbits(marked, bitorder="little").tobytes() + np.ascontiguousarray(array[marked]).tobytes()


def decode(tail: bytes, chunks: int, votes: int) -> Tensor | None:
    """The inverse of `encode`: uint8 [chunks, row_bytes(votes)], or None for no byte. Raises `VotesError` for other bytes."""
    if not tail:
        return None
    front, wide = row_bytes(chunks), row_bytes(votes)
    array = np.frombuffer(tail, dtype=np.uint8)
    marks = np.unpackbits(array[:front], bitorder="little")
    count = int(marks[:chunks].sum())
    if len(array) < front or marks[chunks:].any() or not count:
        raise VotesError(f"{len(tail)} bytes of silence mark {count} of {chunks} chunks, or bits behind the last chunk")
    if len(array) != front + count * wide:
        raise VotesError(
            f"{len(tail)} bytes of silence, not {front + count * wide} ({count} marked chunks, {votes} votes each)"
        )
    given = array[front:].reshape(count, wide)
    behind = 0xFF << (votes % 8) & 0xFF if votes % 8 else 0
    if not given.any(axis=1).all() or (given[:, -1] & behind).any():
        raise VotesError("a marked chunk has no silent vote, or bits behind its last vote")
    rows = np.zeros((chunks, wide), dtype=np.uint8)
    rows[np.flatnonzero(marks[:chunks])] = given
    return torch.from_numpy(rows)


def hush(values: Tensor, rows: Tensor | None) -> Tensor:
    """Zero the silent votes of `values` [chunks, votes] in place; `rows` uint8 as of `pack`, on any device, None for none."""
    if rows is None:
        return values
    marked = rows.any(1).nonzero().view(-1)
    if len(marked):
        silent = unpack(rows[marked], values.shape[1]).to(values.device)
        where = marked.to(values.device)
        values[where] = values[where].masked_fill_(silent, 0)
    return values
