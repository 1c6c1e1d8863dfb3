"""The private second moment in one pass over gradients and squares, compiled by numba, by as many threads as torch's."""

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


def _compiled() -> Any:
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
    }  # no branch for a division by zero: epsilon is there
    try:
        return njit(cache=True, **options)(_divide)
    except RuntimeError:  # no folder to cache in
        return njit(**options)(_divide)


_kernel = _compiled()


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
    helpers = min(torch.get_num_threads(), len(ranges)) - 1
    if helpers < 1:
        for part in ranges:
            _kernel(*part)
        return
    with ThreadPoolExecutor(helpers + 1) as pool:
        for done in [pool.submit(_kernel, *part) for part in ranges]:
            done.result()
