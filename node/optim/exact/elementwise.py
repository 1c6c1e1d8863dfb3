"""Rounding by element, alike on every processor: the smallest magnitude of replicated numbers, and square roots.

Below that magnitude numbers are zeros. Otherwise a processor that flushes the smallest numbers (below 2^-126) to zero would
differ from one that does not. ADR 25.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SMALLEST = 2.0**-100


def flush(state: Tensor) -> Tensor:
    """Set state below SMALLEST to zero, in place."""
    return state.masked_fill_(state.abs() < SMALLEST, 0.0)


def cut_off(parameter: Tensor) -> Tensor:
    """Set parameters below SMALLEST to zero in place. Their sign stays, as that of a parameter that is -0 does."""
    return parameter.mul_(parameter.abs() >= SMALLEST)


# Square roots, correctly rounded. torch's are not on a CPU: they come from a library of Intel's, and the last bits follow the
# processor. Of four million roots of fp32, 709,000 were wrong in their last bit on an AMD EPYC, and 27,000 on an Intel Xeon; of
# fp64 one in 70. An H200 made all of them right. ADR 7.


@torch.no_grad()
def root_(value: Tensor) -> Tensor:
    """The square root of fp32 or fp64, in place. A device that is no CPU takes fp32 through fp64: with more than twice the
    digits, a root that is nearly right is rounded to the right one."""
    if value.device.type == "cpu":
        there = value.numpy()
        np.sqrt(there, out=there)
        return value
    return value.sqrt_() if value.dtype == torch.float64 else value.copy_(value.double().sqrt_())


class ExactRoots(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, torch's own `sqrt` gives these roots."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.sqrt.default:
            return root_(args[0].clone())
        if func is torch.ops.aten.sqrt_.default:
            return root_(args[0])
        if func is torch.ops.aten.sqrt.out:
            return root_((kwargs or {})["out"].copy_(args[0]))
        return func(*args, **(kwargs or {}))
