"""A payload of the paper's method: for every chunk a power of two, and its k largest coefficients as 16-bit whole numbers.

    exponents   uint8  [chunks]          0: a silent chunk; otherwise e + 128, and every value is below 2^e.
    indices     uint16 [components]      ascending within a chunk, little-endian.
    values      int16  [components]      in units of 2^(e - 15), within +-32767, little-endian.

All tensors one after another, in the layout's order. The largest value of a chunk that speaks is at least 2^14, so that votes
have one encoding. A silent chunk (all zeros, or below 2^-100) has the indices 0, 1, ... and values of 0. Refuses other bytes.
The published code sends 12 bytes a component (int64 and fp32); this is 4, and a chunk's exponent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.layout import Source, named_tensors
from node.optim.votes.groups import VotesError
from node.optim.votes.topk import SIZES

# How the paper's method cuts parameters into chunks: each tensor by itself, each side by its largest divisor that fits.
#
# Source: arXiv 2411.19870v1, section 4 (chunks of 64 x 64), and the published code's rule for other sides. Unlike in `layout`,
# nothing is pooled: a side of 97 has chunks of 1, and a vector is transformed in one dimension. Holds no tensor.

"""Sides that a run may ask for: the exact inverse is proven for these (`paper_demo.py`), and an index fits 16 bits."""


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


EXPONENT_ZERO = 128
EXPONENT_MAX = 100
VALUE_BITS = 15
VALUE_MAX = 2**VALUE_BITS - 1
_COMPONENT_BYTES = 4


@dataclass(frozen=True)
class Spoken:
    """One peer's votes for one tensor, decoded."""

    exponents: npt.NDArray[np.int16]
    """[chunks]; meaningless where the chunk is silent."""
    speaks: npt.NDArray[np.bool_]
    """[chunks]"""
    where: npt.NDArray[np.int64]
    """[chunks, k] coefficients of the chunk, ascending."""
    values: npt.NDArray[np.int16]
    """[chunks, k]"""


@dataclass(frozen=True)
class PaperForm:
    """The format of a run's votes; `cuts` are in the order of the layout. The cuts decide, not `chunks` in a call."""

    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, source: Source, chunk: int) -> PaperForm:
        """Of a module, or of named tensors (names and shapes are read); `chunk` is the longest side of a chunk."""
        return cls(tuple(Cut.of(name, tensor.shape, chunk) for name, tensor in named_tensors(source)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The k that a peer may choose."""
        return SIZES

    @property
    def chunks(self) -> int:
        """Of all tensors."""
        return sum(cut.chunks for cut in self.cuts)

    def votes(self, chunks: int, size: int) -> int:
        """Components of one payload. Raises `VotesError` for a k that is not offered."""
        if size not in self.sizes:
            raise VotesError(f"k {size} is none of {self.sizes}")
        return sum(cut.chunks * cut.sent(size) for cut in self.cuts)

    def body_bytes(self, chunks: int, size: int) -> int:
        """Every payload of this k has this length."""
        return self.chunks + _COMPONENT_BYTES * self.votes(chunks, size)

    bytes_max = body_bytes

    def encode(self, tensors: Sequence[tuple[Tensor, Tensor]], size: int) -> bytes:
        """The bytes of a model's components: int64 indices [chunks, k], ascending, and fp32 coefficients of each tensor."""
        exponents, indices, values = [], [], []
        for cut, (where, coefficients) in zip(self.cuts, tensors, strict=True):
            assert where.shape == (cut.chunks, cut.sent(size)), cut.name
            largest = coefficients.abs().amax(1, keepdim=True)
            exponent = torch.frexp(largest).exponent.clamp_(-EXPONENT_MAX, EXPONENT_MAX)
            scaled = torch.ldexp(coefficients.double(), VALUE_BITS - exponent).round_().clamp_(-VALUE_MAX, VALUE_MAX)
            speaks = largest >= 2.0**-EXPONENT_MAX
            quiet = torch.arange(where.shape[1], device=where.device).expand_as(where)
            exponents.append(torch.where(speaks, exponent + EXPONENT_ZERO, 0).view(-1).cpu().numpy().astype(np.uint8))
            indices.append(torch.where(speaks, where, quiet).reshape(-1).cpu().numpy().astype("<u2"))
            values.append(torch.where(speaks, scaled, 0.0).reshape(-1).cpu().numpy().astype("<i2"))
        return b"".join(part.tobytes() for part in (*exponents, *indices, *values))

    def check(self, data: bytes, size: int, chunks: int) -> None:
        """The door: raises `VotesError` for bytes that no peer's `encode` makes."""
        for _ in self.decode(data, size):
            pass

    def decode(self, data: bytes, size: int) -> Iterator[Spoken]:
        """One tensor after another. Raises `VotesError`."""
        if size not in self.sizes:
            raise VotesError(f"k {size} is none of {self.sizes}")
        if len(data) != self.body_bytes(0, size):
            raise VotesError(f"{len(data)} bytes of votes, not {self.body_bytes(0, size)} (k {size})")
        total, components = self.chunks, self.votes(0, size)
        exponents = np.frombuffer(data, np.uint8, total)
        indices = np.frombuffer(data, "<u2", components, total)
        values = np.frombuffer(data, "<i2", components, total + 2 * components)
        chunk = at = 0
        for cut in self.cuts:
            k = cut.sent(size)
            here = slice(at, at + cut.chunks * k)
            codes = exponents[chunk : chunk + cut.chunks]
            yield _spoken(cut, codes, indices[here].reshape(-1, k), values[here].reshape(-1, k))
            chunk, at = chunk + cut.chunks, here.stop


def _spoken(
    cut: Cut, codes: npt.NDArray[np.uint8], indices: npt.NDArray[np.uint16], values: npt.NDArray[np.int16]
) -> Spoken:
    speaks = codes != 0
    exponents = codes.astype(np.int16) - EXPONENT_ZERO
    if bool((np.abs(exponents[speaks]) > EXPONENT_MAX).any()):
        raise VotesError(f"{cut.name}: an exponent is beyond +-{EXPONENT_MAX}")
    where = indices.astype(np.int64)
    if where.size:
        if int(where.max()) >= cut.elements or bool((np.diff(where, axis=1) <= 0).any()):
            raise VotesError(f"{cut.name}: indices are not ascending below {cut.elements}")
        largest = np.abs(values.astype(np.int32)).max(axis=1)
        if bool((largest[speaks] <= VALUE_MAX // 2).any()) or bool((largest > VALUE_MAX).any()):
            raise VotesError(
                f"{cut.name}: the largest value of a chunk is not within {VALUE_MAX // 2 + 1} and {VALUE_MAX}"
            )
        if bool(largest[~speaks].any()) or bool((where[~speaks] != np.arange(where.shape[1])).any()):
            raise VotesError(f"{cut.name}: a silent chunk has values, or other indices than the first")
    return Spoken(exponents, speaks, where, values)
