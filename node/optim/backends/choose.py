"""The backends of a step: the calls that `DeMo` makes of one, and which one serves a method on a device. ADRs 7 and 11.

All backends give the same parameters, bit for bit. The module imports numba or Triton only once one is chosen.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from node.optim.aggregate import is_narrow
from node.optim.backends.portable import Family, Mixed, Portable
from node.optim.base import Base, BaseConfig
from node.optim.exact import transforms
from node.optim.exact.transforms import VOTE_SUM_MAX, Transform
from node.optim.layout import Layout, tile_chunks
from node.optim.second_moment import SecondMoment
from node.optim.step import Decay
from node.optim.votes import bits
from node.optim.votes.payload import Format
from node.optim.votes.places import Draw
from node.optim.votes.values import SIGN
from protos.mistakes import BACKEND, PREFIX, tell_unread

if TYPE_CHECKING:
    from node.optim.backends.numba.backend import Fused


class Backend(Protocol):
    """The heavy half of a step. Gradients and parameters are contiguous, on one device, in the layout's order."""

    name: str

    def norm(self, gradients: Sequence[Tensor | None]) -> float:
        """The norm of all gradients (fp32; None counts as zeros). The norm is infinite or NaN if one of them is."""

    def fold(
        self,
        gradients: Sequence[Tensor | None],
        pool: Tensor,
        momentum: Tensor,
        beta: float,
        step: float,
        chunks: range,
    ) -> None:
        """`step.accumulate` the coefficients of some chunks in `momentum` [chunks, 64, 64]; `vote` without gradients is next.

        `gradients` are read for cores alone. What lies in the pool comes from `pool`, fp32 [pool chunks, 64, 64].
        """

    def vote(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        size: int,
        second: SecondMoment | None = None,
    ) -> Tensor:
        """`step.accumulate` the gradients' coefficients in `momentum` [chunks, 64, 64]. Returns the payload, uint8.

        `momentum` is fp32 or bf16, and votes are those of what it keeps. Without `gradients` it has them already (`fold`).
        `step` is what `accumulate` calls lr. With `second`, gradients are divided first, in place or not. Raises
        `NotANumber` once all momentum has been written.
        """

    def spend(self, momentum: Tensor, packed: Tensor, size: int) -> None:
        """Take a payload's votes out of the momentum (`step.spend`, `step.spend_ballot`)."""

    def apply(
        self, ballots: Sequence[tuple[int, bytes]], parameters: Sequence[Tensor], lr: float, weight_decay: Decay
    ) -> None:
        """Move the parameters by the direction of `ballots`, `(size, payload)` each (`step.apply_update`).

        The same bits from every backend. Raises `VotesError` before anything is changed.
        """


@runtime_checkable
class Stepping(Backend, Protocol):
    """A backend of votes whose places may follow from the step."""

    def at(self, draw: Draw) -> Backend:
        """The same backend, with the same buffers, for the votes of one step. Asked for before each call."""


@runtime_checkable
class Taking(Backend, Protocol):
    """A backend that takes votes out of the momentum in the pass that makes them: to spend them later costs another pass."""

    def take(
        self,
        gradients: Sequence[Tensor | None] | None,
        momentum: Tensor,
        beta: float,
        step: float,
        size: int,
        second: SecondMoment | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `vote` and then `spend`. Returns also the coefficients that were spent, fp32, valid until the next call.

        If it raises `NotANumber`, they are still in the momentum.
        """

    def put_back(self, momentum: Tensor, packed: Tensor, size: int, taken: Tensor) -> None:
        """The inverse of spending what `take` returned."""


BACKEND_VARIABLE = BACKEND
"""Environment variable that chooses the step's backend: `auto` (numba on a CPU if it is installed, Triton on a CUDA device
if it gives torch's bits there) or one of them."""

_log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "numba", "triton")


def wanted() -> str:
    """The backend that the environment asks for. Raises `ValueError` if there is no such backend."""
    tell_unread(os.environ, PREFIX, (), only=BACKEND)
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
    if kernels is not None and chunkwise:
        return kernels
    if (found := _triton(choice, layout, device, form, transform, base, cap)) is not None:
        return found
    if not narrow or not chunkwise:
        family = Family(layout, device, tile_chunks(device), form, transform, base, cap)
        return family if kernels is None else Mixed(kernels, family)
    return Portable(layout, device, tile_chunks(device), base)


def _triton(
    choice: str, layout: Layout, device: torch.device, form: Format, transform: Transform, base: Base, cap: int
) -> Backend | None:
    """Triton's kernels, if they are asked for or serve here, and there are any for the method. Raises `ValueError`."""
    signs = form.grid is SIGN and not form.scaled and form.selection != "topk"
    if not signs or transform.name != "dct" or not base.config.chunkwise:
        return None
    if choice == "triton":
        if find_spec("triton") is None:
            raise ValueError(f"{BACKEND_VARIABLE} is triton, which is not installed: it comes with torch for CUDA")
        return made_of_triton(layout, device, form, base, cap)
    if choice != "auto" or device.type != "cuda" or torch.version.hip or find_spec("triton") is None:
        return None
    return made_of_triton(layout, device, form, base, cap) if triton_serves(device, form, base.config, cap) else None


def made_of_triton(layout: Layout, device: torch.device, form: Format, base: Base, cap: int) -> Backend:
    """Raises `ValueError` for a GPU that is too old."""
    if form.plain and cap == VOTE_SUM_MAX:
        from node.optim.backends.triton import Triton

        return Triton(layout, device, base)
    from node.optim.backends.triton_wide import TritonWide

    return TritonWide(layout, device, base, form, cap)


@functools.cache
def triton_serves(device: torch.device, form: Format, config: BaseConfig, cap: int) -> bool:
    """Whether Triton's kernels run on this device and move the parameters of a small layout as torch does.

    They need a C compiler, and a driver that fits. Tells the log why they do not serve.
    """
    layout = Layout.of_shapes([(f"p{number}", shape) for number, shape in enumerate(TRIED)])
    base = Base(config, layout, device)
    start = [torch.linspace(-1, 1, shape.numel(), device=device).view(shape) for shape in map(torch.Size, TRIED)]
    size, draw = form.sizes[len(form.sizes) // 2], Draw(b"", 1, (b"one",) if form.independent else ())
    ballot = size, (bytes(range(256)) * layout.chunks * 4)[: form.body_bytes(layout.chunks, size)]
    found = []
    try:
        tiles, dct = tile_chunks(device), transforms.named("dct")
        narrow = is_narrow(form, dct, cap)
        torch_way = (
            Portable(layout, device, tiles, base) if narrow else Family(layout, device, tiles, form, dct, base, cap)
        )
        for way in (torch_way, made_of_triton(layout, device, form, base, cap)):
            own = way.at(draw) if isinstance(way, Stepping) else way
            parameters = [tensor.clone() for tensor in start]
            own.apply([ballot], parameters, 0.5, 0.25)
            momentum = layout.empty(device).zero_()
            own.vote(start, momentum, 0.5, 1.0, size)
            found.append([*parameters, momentum])
    except Exception as error:  # noqa: BLE001 - whatever a compiler, a driver or a launch raises
        _log.warning("%s: Triton's kernels do not run (%s); torch computes the optimizer's step, slower", device, error)
        return False
    (*moved, expected), (*others, momentum) = found
    if not all(map(torch.equal, moved, others)) or not torch.allclose(momentum, expected, rtol=1e-3, atol=1e-4):
        _log.warning("%s: Triton's kernels give other numbers than torch, which computes the optimizer's step", device)
        return False
    return True


TRIED: Final = ((130, 200), (70,))
"""Shapes that `triton_serves` tries: chunks of a core, strips and a vector."""


def _kernels(layout: Layout, form: Format, cap: int, base: Base, *, narrow: bool) -> Fused | None:
    """numba's kernels for signs after a DCT, if there are any."""
    if narrow:
        from node.optim.backends.numba.backend import Fused

        return Fused(layout, base)
    if form.scaled or form.grid is not SIGN or form.selection == "topk":
        return None
    from node.optim.backends.numba.wide import Wide

    return Wide(layout, form, cap, base)
