"""The slow obvious version of this package: one chunk, one group, one vote at a time. The oracle of the tests.

The module shares no code with the fast version, only the names of its constants. Sums are made in float64 and int64; fp32
appears only where its rounding is part of the contract. The module refuses to be fast.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

SIDE = 64


def cut(tensors: Sequence[Floats]) -> list[Floats]:
    """All tensors as 64x64 chunks: whole blocks of each first, then one padded pool of everything else."""
    chunks: list[Floats] = []
    pool: list[float] = []
    for tensor in tensors:
        matrix, high, wide = _matrix(tensor)
        for top in range(0, high, SIDE):
            chunks.extend(matrix[top : top + SIDE, left : left + SIDE].copy() for left in range(0, wide, SIDE))
        pool.extend(matrix[:high, wide:].flatten().tolist())
        pool.extend(matrix[high:].flatten().tolist())
    while len(pool) % (SIDE * SIDE):
        pool.append(0.0)
    return chunks + list(np.array(pool, dtype=np.float32).reshape(-1, SIDE, SIDE))


def paste(chunks: Sequence[Floats], shapes: Sequence[tuple[int, ...]]) -> list[Floats]:
    """The inverse of `cut`: tensors of the given shapes."""
    blanks = [_matrix(np.zeros(shape, dtype=np.float32)) for shape in shapes]
    blocks = iter(chunks)
    for matrix, high, wide in blanks:
        for top in range(0, high, SIDE):
            for left in range(0, wide, SIDE):
                matrix[top : top + SIDE, left : left + SIDE] = next(blocks)
    pool = iter(np.array(list(blocks), dtype=np.float32).flatten().tolist())
    for matrix, high, wide in blanks:
        for row in range(matrix.shape[0]):
            for column in range(matrix.shape[1]):
                if row < high and column >= wide:
                    matrix[row, column] = next(pool)
        for row in range(high, matrix.shape[0]):
            for column in range(matrix.shape[1]):
                matrix[row, column] = next(pool)
    return [matrix.reshape(shape) for (matrix, _, _), shape in zip(blanks, shapes, strict=True)]


def _matrix(tensor: Floats) -> tuple[Floats, int, int]:
    height = tensor.shape[0] if tensor.ndim else 1
    matrix = tensor.reshape(height, -1) if tensor.size else tensor.reshape(height, math.prod(tensor.shape[1:]))
    high, wide = height - height % SIDE, matrix.shape[1] - matrix.shape[1] % SIDE
    return (matrix, 0, 0) if high == 0 or wide == 0 else (matrix, high, wide)


def basis() -> Doubles:
    """The orthonormal DCT-II, element by element, rounded to fp32 as the fast version does."""
    matrix = np.empty((SIDE, SIDE))
    for k in range(SIDE):
        for n in range(SIDE):
            scale = math.sqrt((1 if k == 0 else 2) / SIDE)
            matrix[k, n] = np.float32(scale * math.cos(math.pi * (2 * n + 1) * k / (2 * SIDE)))
    return matrix


def integer_basis() -> Integers:
    """`round(2^9 * D)`."""
    return np.rint(512 * basis()).astype(np.int64)


def members(group_size: int) -> list[list[tuple[int, int]]]:
    """The coefficients of every group, in the order of their positions: row by row."""
    count = SIDE * SIDE // group_size
    result: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for row in range(SIDE):
        for column in range(SIDE):
            diagonal = row + column
            if count <= SIDE:
                result[diagonal % count].append((row, column))
            else:  # more groups than diagonals: each diagonal is dealt out by row
                result[diagonal % SIDE + SIDE * (row % (count // SIDE))].append((row, column))
    return result


Vote: TypeAlias = tuple[int, int] | None
"""Position and whether it is negative; None for a group of zeros."""


def select(momentum: Sequence[Floats], group_size: int) -> list[list[Vote]]:
    """For each chunk and group `(position, negative)` of the largest magnitude, the first of equals."""
    result = []
    for chunk in momentum:
        chosen: list[Vote] = []
        for group in members(group_size):
            values = [float(chunk[where]) for where in group]
            position = max(range(group_size), key=lambda index: (abs(values[index]), -index))
            chosen.append((position, int(values[position] < 0)) if values[position] else None)
        result.append(chosen)
    return result


def encode(votes: Sequence[Sequence[Vote]], group_size: int) -> bytes:
    """One bit after the other: position, lowest bit first, then sign; eight bits a byte, lowest first. Then the silence."""
    width = group_size.bit_length() - 1
    stream = [
        bit
        for chunk in votes
        for vote in chunk
        for bit in (*_bits(vote[0] if vote else 0, width), vote[1] if vote else 0)
    ]
    silent = [[int(vote is None) for vote in chunk] for chunk in votes]
    if not any(map(any, silent)):
        return _bytes(stream)
    tail = _bytes([int(any(chunk)) for chunk in silent])
    return _bytes(stream) + tail + b"".join(_bytes(chunk) for chunk in silent if any(chunk))


def decode(payload: bytes, group_size: int, chunks: int) -> list[list[Vote]]:
    """The inverse of `encode`."""
    width, count = group_size.bit_length() - 1, SIDE * SIDE // group_size
    body = chunks * count * (width + 1) // 8
    stream = iter([bit for byte in payload[:body] for bit in _bits(byte, 8)])
    marks = [bit for byte in payload[body : body + -(-chunks // 8)] for bit in _bits(byte, 8)] or [0] * chunks
    rows = iter([bit for byte in payload[body + -(-chunks // 8) :] for bit in _bits(byte, 8)])
    result = []
    for index in range(chunks):
        chunk: list[Vote] = []
        for _ in range(count):
            position = sum(next(stream) << place for place in range(width))
            chunk.append((position, next(stream)))
        result.append([None if next(rows) else vote for vote in chunk] if marks[index] else chunk)
    return result


def _bytes(stream: Sequence[int]) -> bytes:
    return bytes(sum(bit << place for place, bit in enumerate(stream[at : at + 8])) for at in range(0, len(stream), 8))


def _bits(number: int, width: int) -> list[int]:
    return [number >> place & 1 for place in range(width)]


def sums(contributions: Sequence[tuple[int, bytes]], chunks: int) -> list[Integers]:
    """Votes added up and capped to +-2."""
    total = [np.zeros((SIDE, SIDE), dtype=np.int64) for _ in range(chunks)]
    for group_size, payload in contributions:
        groups = members(group_size)
        for chunk, chosen in zip(total, decode(payload, group_size, chunks), strict=True):
            for group, vote in zip(groups, chosen, strict=True):
                if vote is not None:
                    chunk[group[vote[0]]] += -1 if vote[1] else 1
    return [np.clip(chunk, -2, 2) for chunk in total]


def inverse(chunk: Integers) -> Integers:
    """The two passes in int64, halved in between, half to even."""
    matrix = integer_basis()
    first = matrix.T @ chunk
    halved = first >> 1
    halved += (first & 1) & (halved & 1)
    result: Integers = halved @ matrix
    return result


class Reference:
    """A peer: parameters and momentum as numpy arrays. Methods as those of `demo.DeMo`."""

    def __init__(self, tensors: Sequence[Floats], beta: float, weight_decay: float, clip_norm: float) -> None:
        self.tensors = [tensor.copy() for tensor in tensors]
        self.momentum: list[Floats] = [np.zeros_like(chunk) for chunk in cut(tensors)]
        self._beta, self._weight_decay, self._clip_norm = beta, weight_decay, clip_norm
        self._proposed: tuple[int, list[list[Vote]]] | None = None

    def propose(self, gradients: Sequence[Floats], lr: float, group_size: int) -> bytes:
        norm = math.sqrt(sum(float(value) ** 2 for gradient in gradients for value in gradient.flatten()))
        scale = min(1.0, self._clip_norm / (norm + 1e-6))
        matrix = basis()
        for index, chunk in enumerate(cut(gradients)):
            coefficients = matrix @ chunk.astype(np.float64) @ matrix.T
            updated = self._beta * self.momentum[index].astype(np.float64) + lr * scale * coefficients
            self.momentum[index] = updated.astype(np.float32)
        self._proposed = (group_size, select(self.momentum, group_size))
        return encode(self._proposed[1], group_size)

    def settle(self, accepted: bool) -> None:
        assert self._proposed is not None
        group_size, chosen = self._proposed
        self._proposed = None
        if accepted:
            groups = members(group_size)
            for chunk, votes in zip(self.momentum, chosen, strict=True):
                for group, vote in zip(groups, votes, strict=True):
                    if vote is not None:
                        chunk[group[vote[0]]] = 0.0

    def apply(self, contributions: Sequence[tuple[int, bytes]], lr: float) -> None:
        signs = [np.sign(inverse(chunk)).astype(np.float32) for chunk in sums(contributions, len(self.momentum))]
        directions = paste(signs, [tensor.shape for tensor in self.tensors])
        rate = np.float32(lr)
        factor = np.float32(np.float32(1) - np.float32(rate * np.float32(self._weight_decay)))
        for tensor, direction in zip(self.tensors, directions, strict=True):
            decayed = (tensor * factor).astype(np.float32)
            tensor[...] = (decayed - (rate * direction).astype(np.float32)).astype(np.float32)
