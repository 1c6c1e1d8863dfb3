"""A peer's private second moment: the peer divides gradients by their own running root mean square before the momentum.

This is the division of Adam (arXiv 1412.6980); the votes carry the sign of such a momentum. The second moment costs each peer
4 bytes a parameter, or next to nothing if it is factored as Adafactor's (arXiv 1804.04235), and nothing on the wire. Votes,
aggregate and replicated state have the same form without it, so peers with a whole moment, a factored one and none can train
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from node.optim.laid_out import is_dtensor, zeros_like

Kind: TypeAlias = Literal["whole", "factored"]
MeanSquares: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
Scale: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]

EPSILON = 1e-16
"""The number under the root, added to a square. Adam adds 1e-8 to the root instead. Under the root, a processor's instruction
for an inverse root serves. The difference matters only for gradients of about 1e-8."""

SQUARE_MAX = 1e30
"""Of a mean of squares: a sum of larger ones may be more than fp32 has, and would stay infinite for ever."""


class Moment(Protocol):
    """What both kinds offer."""

    beta2: float
    counts: list[int]
    """How many gradients each tensor has had."""

    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        """Divide in place, fp32; None stays None. The gradients must be finite, because the moment keeps a part of each."""

    def by_tensor(self) -> list[dict[str, Tensor]]:
        """The live state of each tensor, by name."""

    def state_dict(self) -> dict[str, Any]:
        """The state, which is private to the peer."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state of either kind, by copy. Raises `ValueError` if the state belongs to other parameters."""


class SecondMoment:
    """`v = beta2 * v + (1 - beta2) * g^2`, and `g / sqrt(v / (1 - beta2^t) + 1e-16)`.

    t counts this peer's own gradients of the tensor, as torch's Adam does. So a tensor whose first gradient comes late starts
    as all tensors did.

    `compiled`: numba's kernel computes it, for CPU tensors. The kernel rounds in its own way, and may, as the state is private.
    """

    def __init__(self, parameters: Sequence[Tensor], beta2: float, *, compiled: bool = False) -> None:
        self.beta2, self._compiled = beta2, compiled
        self.counts = [0] * len(parameters)
        """How many gradients each tensor has had."""
        self.squares = [zeros_like(local_part(parameter)) for parameter in parameters]

    def advance(self, gradients: Sequence[Tensor | None]) -> list[float]:
        """Count one gradient of each tensor that has one, which the caller divides next. Returns `1 - beta2^t` of each."""
        self.counts = [count + (g is not None) for count, g in zip(self.counts, gradients, strict=True)]
        return [1 - self.beta2 ** max(count, 1) for count in self.counts]

    @torch.no_grad()
    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        corrections = self.advance(gradients)
        given = zip(gradients, self.squares, corrections, strict=True)
        there = [(local_part(g), square, correction) for g, square, correction in given if g is not None]
        if self._compiled and all(own.is_contiguous() and own.dtype == torch.float32 for own, _, _ in there):
            from node.optim.backends.numba import moment

            moment.divide(there, self.beta2, EPSILON)
        else:
            for own, square, correction in there:
                square.mul_(self.beta2).addcmul_(own, own, value=1 - self.beta2)
                own.div_((square / correction).add_(EPSILON).sqrt_())

    def by_tensor(self) -> list[dict[str, Tensor]]:
        return [{"second": square} for square in self.squares]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "squares": self.squares}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Moment.load_state_dict`. A factored state becomes a whole one: the product that it stood for."""
        if "squares" not in state:
            numbers = [rows.numel() * columns.numel() for rows, columns in _both(state)]
            _check_same(numbers, [square.numel() for square in self.squares])
        squares = whole_squares(state, [square.shape for square in self.squares])
        _check_same([tuple(square.shape) for square in squares], [tuple(square.shape) for square in self.squares])
        for mine, theirs in zip(self.squares, squares, strict=True):
            mine.copy_(theirs)
        self.counts = counts_of(state)


class FactoredMoment:
    """The same, with the means over rows and over columns of v in place of v: `v = rows * columns / mean(rows)`.

    A tensor of more than two dimensions counts as a matrix [first, all others]. A vector keeps its squares. `compiled`: as of
    `SecondMoment`.
    """

    def __init__(self, parameters: Sequence[Tensor], beta2: float, *, compiled: bool = False) -> None:
        self.beta2, self._compiled = beta2, compiled
        self.counts = [0] * len(parameters)
        flat = [_matrix(parameter) for parameter in parameters]
        self.rows = [matrix.new_zeros(matrix.shape[0]) for matrix in flat]
        self.columns = [matrix.new_zeros(matrix.shape[1]) for matrix in flat]

    @torch.no_grad()
    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient.numel():
                own = _matrix(gradient)
                self._divide(index, own, self._kernels(own)[0](own))

    @torch.no_grad()
    def divide_one(self, index: int, gradient: Tensor) -> float:
        """As `divide`, of one tensor. Returns the gradient's norm. If that is not finite, nothing has changed."""
        own = _matrix(gradient)
        if not own.numel():
            return 0.0
        means = self._kernels(own)[0](own)
        square = float(means[0].sum()) * own.shape[1]
        if math.isfinite(square):
            self._divide(index, own, means)
        return math.sqrt(square)

    def _divide(self, index: int, own: Tensor, means: tuple[Tensor, Tensor]) -> None:
        """By the moment that the `means` of squares, over rows and over columns, have joined."""
        self.counts[index] += 1
        rows, columns = self.rows[index], self.columns[index]
        for kept, mean in zip((rows, columns), means, strict=True):
            kept.mul_(self.beta2).add_(mean.clamp_(max=SQUARE_MAX), alpha=1 - self.beta2)
        part = 1 - self.beta2 ** self.counts[index]
        # the three roots apart: the product of two means of squares may be below what fp32 has
        root = (rows.mean() / part + EPSILON).sqrt_()
        scale = self._kernels(own)[1]
        scale(own, (rows / part + EPSILON).rsqrt_(), (columns / part + EPSILON).rsqrt_().mul_(root))

    def _kernels(self, own: Tensor) -> tuple[MeanSquares, Scale]:
        if self._compiled and own.is_contiguous() and own.dtype == torch.float32:
            from node.optim.backends.numba import moment

            return moment.mean_squares, moment.scale
        return _mean_squares, _scale

    def by_tensor(self) -> list[dict[str, Tensor]]:
        pairs = zip(self.rows, self.columns, strict=True)
        return [{"second_rows": rows, "second_columns": columns} for rows, columns in pairs]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "rows": self.rows, "columns": self.columns}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Moment.load_state_dict`. Of a whole state, the means stay."""
        if "squares" in state:
            flat = [_matrix(square) for square in state["squares"]]
            found = [(square.mean(1), square.mean(0)) for square in flat]
        else:
            found = _both(state)
        here = zip(self.rows, self.columns, strict=True)
        _check_same([(len(rows), len(columns)) for rows, columns in found], [(len(own), len(its)) for own, its in here])
        for index, (rows, columns) in enumerate(found):
            self.rows[index].copy_(rows)
            self.columns[index].copy_(columns)
        self.counts = counts_of(state)


def _matrix(tensor: Tensor) -> Tensor:
    """A view [first dimension, all others]; a vector is a matrix of one column, and a scalar one of one number."""
    own = local_part(tensor)
    rows = len(own) if own.ndim else 1
    return own.view(rows, own.numel() // max(rows, 1))


def _mean_squares(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The means of the squares over each row, and over each column, without a matrix of squares."""
    over_rows, over_columns = (
        torch.linalg.vector_norm(matrix, dim=over).square_() / matrix.shape[over] for over in (1, 0)
    )
    return over_rows, over_columns


def _scale(matrix: Tensor, rows: Tensor, columns: Tensor) -> None:
    """`matrix *= rows[:, None] * columns` in place."""
    matrix.mul_(rows[:, None]).mul_(columns)


def _both(state: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(state["rows"], state["columns"], strict=True))


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """The second moment that two factors stand for, [rows, columns]."""
    return rows[:, None] * (columns / (rows.mean() + torch.finfo(torch.float32).tiny))


def _check_same(saved: Sequence[object], here: Sequence[object]) -> None:
    """Raises `ValueError` if the sizes of saved tensors are those of other parameters."""
    if saved != here:
        raise ValueError("the saved second moment belongs to other parameters: load a state that this model saved")


def made(parameters: Sequence[Tensor], beta2: float, kind: Kind, *, compiled: bool = False) -> Moment:
    """A second moment of zeros."""
    if kind == "factored":
        return FactoredMoment(parameters, beta2, compiled=compiled)
    return SecondMoment(parameters, beta2, compiled=compiled)


def for_kernels(moment: Moment | None, gradients: Sequence[Tensor | None]) -> SecondMoment | None:
    """What a backend divides `gradients` by in its own pass. A factored moment has divided them before, in place."""
    if isinstance(moment, FactoredMoment):
        moment.divide(gradients)
        return None
    assert moment is None or isinstance(moment, SecondMoment)
    return moment


def whole_squares(state: dict[str, Any], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The squares of a saved state of either kind, for tensors of these shapes."""
    if "squares" in state:
        return list(state["squares"])
    return [_product(*both).reshape(tuple(shape)) for both, shape in zip(_both(state), shapes, strict=True)]


def counts_of(state: dict[str, Any]) -> list[int]:
    """The counts of a saved second moment. A state that an earlier version saved has one count for all tensors."""
    if "counts" not in state:
        return [int(state["count"])] * len(state["squares"])
    return [int(count) for count in state["counts"]]


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: a DTensor's shard, or else all of it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()
