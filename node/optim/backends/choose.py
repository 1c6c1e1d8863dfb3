"""Which backend computes the step of a method on a device. The module imports numba or Triton only once one is chosen.

ADRs 7 and 11 say why there are several.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from node.optim.aggregate import is_narrow
from node.optim.backends.family import Family, Mixed
from node.optim.backends.interface import Backend
from node.optim.backends.portable import Portable
from node.optim.base import Base
from node.optim.exact.dct import VOTE_SUM_MAX
from node.optim.exact.transforms import Transform
from node.optim.layout import Layout
from node.optim.tiles import tile_chunks
from node.optim.votes import bits
from node.optim.votes.payload import Format
from node.optim.votes.values import SIGN
from protos.variables import BACKEND, PEER, tell_unread

if TYPE_CHECKING:
    from node.optim.backends.numba.backend import Fused

BACKEND_VARIABLE = BACKEND
"""Environment variable that chooses the step's backend: `auto` (numba on a CPU, if it is installed) or one of them."""

BACKENDS = ("auto", "torch", "numba", "triton")


def wanted() -> str:
    """The backend that the environment asks for. Raises `ValueError` if there is no such backend."""
    tell_unread(os.environ, PEER, (), only=BACKEND)
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
    choice: str,
    layout: Layout,
    device: torch.device,
    form: Format,
    transform: Transform,
    base: Base,
    cap: int = VOTE_SUM_MAX,
) -> Backend:
    """The backend of a method: `form` of the votes, `transform`, `base` and `cap`. Raises `ValueError` if it cannot be had."""
    narrow, chunkwise = is_narrow(form, transform, cap), base.config.chunkwise
    kernels = None
    if compiles(choice, device) and transform.name == "dct":
        kernels = _kernels(layout, form, cap, base, narrow=narrow)
    if kernels is not None and chunkwise and (narrow or base.config.name == "sign"):
        return kernels
    if not narrow or not chunkwise:
        family = Family(layout, device, tile_chunks(device), form, transform, base, cap)
        return family if kernels is None else Mixed(kernels, family)
    if choice == "triton":
        if find_spec("triton") is None:
            raise ValueError(f"{BACKEND_VARIABLE} is triton, which is not installed: it comes with torch for CUDA")
        from node.optim.backends.triton import Triton

        return Triton(layout, device, base)
    return Portable(layout, device, tile_chunks(device), base)


def _kernels(layout: Layout, form: Format, cap: int, base: Base, *, narrow: bool) -> Fused | None:
    """numba's kernels for signs after a DCT, if there are any."""
    if narrow:
        from node.optim.backends.numba.backend import Fused

        return Fused(layout, base)
    if form.scaled or form.grid is not SIGN or form.selection == "topk":
        return None
    from node.optim.backends.numba.wide import Wide

    return Wide(layout, form, cap, base)
