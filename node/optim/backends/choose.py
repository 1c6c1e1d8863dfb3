"""Which backend computes the step of a method on a device. The module imports numba or Triton only once one is chosen.

ADR 10, ADR 11 and ADR 13 say why there are several.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from node.optim.backends.base import Backend
from node.optim.backends.family import Family, Mixed
from node.optim.backends.portable import Portable
from node.optim.base import Base
from node.optim.exact.transforms import Transform
from node.optim.layout import Layout
from node.optim.tiles import tile_chunks
from node.optim.votes import bits
from node.optim.votes.payload import Format

BACKEND_VARIABLE = "SWARMENTUM_OPTIM_BACKEND"
"""Environment variable that chooses the step's backend: `auto` (numba on a CPU, if it is installed) or one of them."""

BACKENDS = ("auto", "torch", "numba", "triton")


def wanted() -> str:
    """The backend that the environment asks for. Raises `ValueError` if there is no such backend."""
    choice = os.environ.get(BACKEND_VARIABLE, "auto")
    if choice not in BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE} is {choice!r}, not one of {', '.join(BACKENDS)}")
    return choice


def compiles(choice: str, device: torch.device) -> bool:
    """Whether numba's kernels may be used. Raises `ValueError` if they are asked for and cannot be had."""
    found = choice in {"auto", "numba"} and device.type == "cpu" and bits.can_compile()
    if choice == "numba" and not found:
        raise ValueError(
            f"{BACKEND_VARIABLE} is numba, which serves a CPU and must be installed (swarmentum[node]), without "
            f"NUMBA_DISABLE_JIT; the device is {device.type}"
        )
    return found


def choose(
    choice: str, layout: Layout, device: torch.device, form: Format, transform: Transform, base: Base
) -> Backend:
    """The backend of a method: `form` of the votes, `transform` and `base`. Raises `ValueError` if it cannot be had."""
    own_votes = form.plain and transform.name == "dct"  # such votes have kernels
    kernels = None
    if compiles(choice, device) and own_votes:
        from node.optim.backends.numba.backend import Fused

        kernels = Fused(layout, base)
    if not own_votes or not base.config.chunkwise:
        family = Family(layout, device, tile_chunks(device), form, transform, base)
        return family if kernels is None else Mixed(kernels, family)
    if choice == "triton":
        if find_spec("triton") is None:
            raise ValueError(f"{BACKEND_VARIABLE} is triton, which is not installed: it comes with torch for CUDA")
        from node.optim.backends.triton import Triton

        return Triton(layout, device, base)
    return kernels or Portable(layout, device, tile_chunks(device), base)
