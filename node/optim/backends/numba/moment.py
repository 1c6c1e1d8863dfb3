"""The private second moment, compiled by numba: a whole one in one pass, a factored one in two. As many threads as torch's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

RANGE_ELEMENTS = 1 << 18
"""Elements that a thread takes at a time."""


def _divide(gradient: Any, square: Any, beta2: Any, rest: Any, correction: Any, epsilon: Any) -> None:
    for place in range(gradient.shape[0]):
        own = gradient[place]
        moment = beta2 * square[place] + rest * own * own
        square[place] = moment
        gradient[place] = own / np.sqrt(moment * correction + epsilon)


def _add_squares(matrix: Any, rows: Any, columns: Any) -> None:
    """Sums of squares: of each row into `rows`, of each column onto `columns`."""
    for row in range(matrix.shape[0]):
        total = np.float32(0)
        for column in range(matrix.shape[1]):
            square = matrix[row, column] * matrix[row, column]
            total += square
            columns[column] += square
        rows[row] = total


def _scale(matrix: Any, rows: Any, columns: Any) -> None:
    for row in range(matrix.shape[0]):
        own = rows[row]
        for column in range(matrix.shape[1]):
            matrix[row, column] *= own * columns[column]


def _compiled(function: Any, **more: Any) -> Any:
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        **more,
    }  # no branch for a division by zero: epsilon is there
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to cache in
        return njit(**options)(function)


_kernel, _scaler = _compiled(_divide), _compiled(_scale)
_adder = _compiled(_add_squares, fastmath={"reassoc"})  # sums by vectors


def divide(there: Sequence[tuple[Tensor, Tensor, float]], beta2: float, epsilon: float) -> None:
    """`v = beta2 * v + (1 - beta2) * g^2`, `g = g / sqrt(v / correction + epsilon)` in place, of `(g, v, correction)` each.

    Contiguous fp32 on the CPU. Each element is computed alone: the number of threads changes no bit.
    """
    ranges: list[tuple[Any, ...]] = []
    for gradient, square, correction in there:
        numbers = tuple(np.float32(value) for value in (beta2, 1 - beta2, 1 / correction, epsilon))
        own, theirs = gradient.view(-1).numpy(), square.view(-1).numpy()
        ranges += [
            (own[first : first + RANGE_ELEMENTS], theirs[first : first + RANGE_ELEMENTS], *numbers)
            for first in range(0, len(own), RANGE_ELEMENTS)
        ]
    _run(_kernel, ranges)


def mean_squares(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The means of the squares over each row, and over each column. `matrix`: contiguous fp32 on the CPU, [rows, columns]."""
    own, ranges = matrix.numpy(), _ranges(matrix)
    rows = np.empty(len(own), dtype=np.float32)
    columns = np.zeros((len(ranges), own.shape[1]), dtype=np.float32)
    _run(_adder, [(own[part], rows[part], columns[index]) for index, part in enumerate(ranges)])
    return torch.from_numpy(rows / own.shape[1]), torch.from_numpy(columns.sum(0) / len(own))


def scale(matrix: Tensor, rows: Tensor, columns: Tensor) -> None:
    """`matrix *= rows[:, None] * columns` in place. Each element is computed alone."""
    own, first, second = matrix.numpy(), rows.numpy(), columns.numpy()
    _run(_scaler, [(own[part], first[part], second) for part in _ranges(matrix)])


def _ranges(matrix: Tensor) -> list[slice]:
    """Rows that a thread takes at a time. They depend on the shape alone, so the number of threads changes no bit."""
    rows = max(RANGE_ELEMENTS // max(matrix.shape[1], 1), 1)
    return [slice(first, first + rows) for first in range(0, len(matrix), rows)]


def _run(kernel: Any, ranges: Sequence[tuple[Any, ...]]) -> None:
    helpers = min(torch.get_num_threads(), len(ranges)) - 1
    if helpers < 1:
        for part in ranges:
            kernel(*part)
        return
    with ThreadPoolExecutor(helpers + 1) as pool:
        for done in [pool.submit(kernel, *part) for part in ranges]:
            done.result()
