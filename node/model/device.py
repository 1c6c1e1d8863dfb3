"""Which device a peer computes on, and in which precision its forward pass runs. Refuses to fall back silently."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import nn

from protos.errors import OperatorError

PRECISIONS = ("auto", "bf16", "fp32")
SHORT: Final = torch.bfloat16


class DeviceError(OperatorError):
    """The device or precision that the operator asked for is not to be had here."""


def devices() -> list[str]:
    """Names of the devices of this machine, best first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*cuda, *mps, "cpu"]


def pick_device(name: str) -> torch.device:
    """`auto` takes cuda, then mps, then cpu; any other name must be here."""
    present = devices()
    if name == "auto":
        return torch.device(present[0])
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in present:
        raise DeviceError(f"device = {name!r}: this machine has {', '.join(present)}; choose one of them, or 'auto'")
    return torch.device(wanted)


def autocast(device: torch.device, choice: str = "auto") -> torch.autocast:
    """A context for the forward pass, to be entered again and again. Weights stay fp32.

    `auto` is bf16 on a CUDA device with bf16 units and fp32 elsewhere: on a CPU without AMX, bf16 is slower.
    """
    if choice not in PRECISIONS:
        raise DeviceError(f"precision = {choice!r}: expected one of {', '.join(PRECISIONS)}")
    native = device.type == "cuda" and computes_short(device)
    if choice == "bf16" and not computes_short(device):
        raise DeviceError(f"precision = 'bf16': {device} has no bf16 units; use 'fp32'")
    enabled = choice == "bf16" or (choice == "auto" and native)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def computes_short(device: torch.device) -> bool:
    """Whether a device computes in bf16. Without units for it, a CPU is slow, and a CUDA device is refused."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def device_name(device: torch.device, ranks: int) -> str:
    """As other peers see it: `cpu`, `cuda: NVIDIA H100`, `2 x cpu`."""
    name = f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
    return name if ranks == 1 else f"{ranks} x {name}"


@torch.no_grad()
def short_copy(model: nn.Module, device: torch.device, absent: Collection[int] = ()) -> nn.Module:
    """The model with bf16 parameters on a device, and buffers as they are. Tied parameters stay tied.

    There is no second fp32 copy meanwhile. `absent`: ids of parameters in whose place there is one number in their shape: who
    reads it gets NaN.
    """
    here: dict[int, Any] = {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
    nothing = torch.full((), torch.nan, dtype=SHORT, device=device)
    for own in model.parameters():
        numbers = nothing.expand(own.shape) if id(own) in absent else own.to(device, SHORT)
        here[id(own)] = nn.Parameter(numbers, requires_grad=own.requires_grad)
    return copy.deepcopy(model, here)
