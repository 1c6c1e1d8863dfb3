"""How the paper's method cuts parameters into chunks: each tensor by itself, each side by its largest divisor that fits.

Source: arXiv 2411.19870v1, section 4 (chunks of 64 x 64), and the published code's rule for other sides. Unlike in `layout`,
nothing is pooled: a side of 97 has chunks of 1, and a vector is transformed in one dimension. Holds no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

CHUNK_SIDES = (8, 16, 32, 64, 128)
"""Sides that a run may ask for: the exact inverse is proven for these (`mean.py`), and an index fits 16 bits."""


def largest_divisor(side: int, most: int) -> int:
    """The largest divisor of `side` that is at most `most`; 1 for an empty side."""
    return next((divisor for divisor in range(min(side, most), 0, -1) if side % divisor == 0), 1)


@dataclass(frozen=True)
class Cut:
    """One tensor: a matrix of `rows` x `columns`, in chunks of `high` x `wide`. A vector is a matrix of one row."""

    name: str
    shape: tuple[int, ...]
    high: int
    wide: int

    @classmethod
    def of(cls, name: str, shape: Sequence[int], side: int) -> Cut:
        """A tensor of more than two dimensions is a matrix of its first dimension and the rest."""
        rows, columns = _matrix(tuple(shape))
        return cls(name, tuple(shape), largest_divisor(rows, side), largest_divisor(columns, side))

    @property
    def elements(self) -> int:
        """Coefficients of one chunk."""
        return self.high * self.wide

    @cached_property
    def chunks(self) -> int:
        """How many there are."""
        rows, columns = _matrix(self.shape)
        return rows // self.high * (columns // self.wide)

    def sent(self, k: int) -> int:
        """Components of a chunk that travel: `k`, or all if there are fewer."""
        return min(k, self.elements)

    def split(self, tensor: Tensor) -> Tensor:
        """[chunks, high, wide] of a contiguous tensor; a copy where there is more than one chunk across."""
        rows, columns = _matrix(self.shape)
        grid = tensor.reshape(rows // self.high, self.high, columns // self.wide, self.wide)
        return grid.transpose(1, 2).reshape(self.chunks, self.high, self.wide)

    def merge(self, chunks: Tensor) -> Tensor:
        """The inverse of `split`: a new tensor of the parameter's shape."""
        rows, columns = _matrix(self.shape)
        grid = chunks.reshape(rows // self.high, columns // self.wide, self.high, self.wide)
        return grid.transpose(1, 2).reshape(self.shape)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) < 2:
        return 1, prod(shape)
    return shape[0], prod(shape[1:])
