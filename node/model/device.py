"""Which device a peer computes on, and in which precision its forward pass runs. Refuses to fall back silently."""

from __future__ import annotations

import torch

from protos.errors import OperatorError

PRECISIONS = ("auto", "bf16", "fp32")


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
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "bf16" and device.type == "cuda" and not native:
        raise DeviceError(f"precision = 'bf16': {device} has no bf16 units; use 'fp32'")
    enabled = choice == "bf16" or (choice == "auto" and native)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def device_name(device: torch.device, ranks: int) -> str:
    """As other peers see it: `cpu`, `cuda: NVIDIA H100`, `2 x cpu`."""
    name = f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
    return name if ranks == 1 else f"{ranks} x {name}"
