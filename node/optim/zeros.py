"""Zeros that take memory only where somebody writes: an anchor, an export and a replay have a momentum that nobody writes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNED_BYTES = 64
"""As torch's own memory is."""
BYTES_MIN = 1 << 20
"""Less comes from the C library's heap, which writes the zeros."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`, which writes them all. On a CPU, the system gives a page when it is written."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < BYTES_MIN:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = np.zeros(size + ALIGNED_BYTES, dtype=np.uint8)
    skip = -memory.ctypes.data % ALIGNED_BYTES
    return torch.from_numpy(memory[skip : skip + size]).view(dtype).view(tuple(shape))


def zeros_like(tensor: Tensor) -> Tensor:
    """The same, in the shape of a tensor, and on its device."""
    plain = type(tensor) is Tensor and tensor.is_contiguous()
    return zeros(tensor.shape, tensor.dtype, tensor.device) if plain else torch.zeros_like(tensor)
