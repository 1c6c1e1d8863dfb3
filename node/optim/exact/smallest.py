"""The smallest magnitude of replicated numbers. Below it they are zeros.

Otherwise a processor that flushes the smallest numbers (below 2^-126) to zero would differ from one that does not. ADR 25.
"""

from __future__ import annotations

from torch import Tensor

SMALLEST = 2.0**-100


def flush(state: Tensor) -> Tensor:
    """Set state below SMALLEST to zero, in place."""
    return state.masked_fill_(state.abs() < SMALLEST, 0.0)


def cut_off(parameter: Tensor) -> Tensor:
    """Set parameters below SMALLEST to zero in place. Their sign stays, as that of a parameter that is -0 does."""
    return parameter.mul_(parameter.abs() >= SMALLEST)
