"""The device that a peer computes on, the precision of its forward pass, and its memory. Refuses to fall back silently."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import nn

from protos.errors import OperatorError
from protos.process import GROUPS, ROOT, groups_of, usable_cores

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


# How much memory is free on a device now (of a GPU, or of this machine within its container's limit), and how busy it is.
#
# Reads what the driver and Linux say. Refuses to guess: None where neither says anything.

MEMINFO = Path("/proc/meminfo")
KIB = 1024


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of memory."""

    free: int
    total: int


def limit(device: torch.device, part: float | None) -> str:
    """Let this process take at most this part of a GPU's memory (None: all of it). ValueError for another device.

    Returns what the owner should know: memory that is in use comes back once it is freed.
    """
    if device.type != "cuda":
        if part is None:
            return ""
        raise ValueError(f"this peer computes on {device}, and only CUDA can limit the memory of a GPU; set it off")
    torch.cuda.set_per_process_memory_fraction(1.0 if part is None else part, device)
    taken, most = torch.cuda.memory_reserved(device), (1.0 if part is None else part) * room_of_gpu(device).total
    if taken <= most:
        return ""
    torch.cuda.empty_cache()
    return f"{taken / 1e9:.1f} GB are in use now; the peer takes smaller micro-batches if it cannot get on with less"


def room_of_gpu(device: torch.device) -> DeviceMemory:
    """The memory of a GPU, whoever takes it."""
    return DeviceMemory(*torch.cuda.mem_get_info(device))


def within(room: DeviceMemory, part: float | None, taken: int) -> DeviceMemory:
    """The room of a process that may take this part of a GPU's memory, and has taken so many bytes."""
    if part is None:
        return room
    most = int(part * room.total)
    return DeviceMemory(max(min(room.free, most - taken), 0), most)


def room_of(device: torch.device, part: float | None = None) -> DeviceMemory | None:
    """The memory of a device, as it is now. `part`: of a GPU's memory, as its owner limits it."""
    if device.type == "cuda":
        return within(room_of_gpu(device), part, torch.cuda.memory_reserved(device))
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return DeviceMemory(max(total - torch.mps.driver_allocated_memory(), 0), total)
    return main_memory()


def main_memory(meminfo: Path = MEMINFO, groups: Path = GROUPS, root: Path = ROOT) -> DeviceMemory | None:
    """This machine's memory, or what a container, a service or a job may have of it: what programs get without swapping."""
    limits = (_of_group(folder) for folder in groups_of("memory", groups, root))
    found = [it for it in (_of_machine(meminfo), *limits) if it is not None]
    return DeviceMemory(min(it.free for it in found), min(it.total for it in found)) if found else None


def _of_machine(meminfo: Path) -> DeviceMemory | None:
    values = _numbers(meminfo)
    if {"MemAvailable:", "MemTotal:"} <= values.keys():
        return DeviceMemory(values["MemAvailable:"] * KIB, values["MemTotal:"] * KIB)
    try:  # not Linux: all of it, as what is free of it is not said
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return DeviceMemory(total, total) if total > 0 else None


def _of_group(folder: Path) -> DeviceMemory | None:
    """The limit of a group, in both versions of cgroup; None without one. Files that were read lately count as free."""
    # above memory.high the kernel slows a process down, without an end
    limits = [it for name in ("memory.max", "memory.high", "memory.limit_in_bytes") if (it := _number(folder / name))]
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if not limits or used is None:
        return None
    stat = _numbers(folder / "memory.stat")
    # as the kernel counts MemAvailable: a text that was copied and then read is active, and goes before a process is killed
    cached = sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("active_file", "inactive_file"))
    return DeviceMemory(max(min(limits) - used + cached, 0), min(limits))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _numbers(file: Path) -> dict[str, int]:
    """The first word of each line, and the number behind it."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


MEASURED_SECONDS_MIN = 0.5


@dataclass(frozen=True)
class Load:
    """`busy`: the device's busy part, between 0 and 1. `own`: bytes of memory that this peer has, of `total` on the device."""

    busy: float | None
    own: int | None
    used: int | None
    """By all programs."""
    total: int | None


class Meter:
    """Of one device, while this process trains on it. For a CPU: the cores that this process keeps busy, of all cores."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._at, self._cpu_seconds = time.monotonic(), _cpu_seconds(self._process)
        self._busy: float | None = None

    def read(self) -> Load:
        """The load since the reading before; for a GPU, what its driver says. From any thread."""
        room = room_of(self._device)
        used = None if room is None else room.total - room.free
        own = (
            torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else self._process.memory_info().rss
        )
        busy = _cuda_busy(self._device) if self._device.type == "cuda" else self._cpu_busy()
        return Load(busy, own, used, None if room is None else room.total)

    def _cpu_busy(self) -> float | None:
        if self._device.type != "cpu":
            return None
        with self._lock:
            now, seconds = time.monotonic(), _cpu_seconds(self._process)
            if now - self._at >= MEASURED_SECONDS_MIN:
                self._busy = min((seconds - self._cpu_seconds) / (now - self._at) / usable_cores(), 1.0)
                self._at, self._cpu_seconds = now, seconds
            return self._busy


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _cuda_busy(device: torch.device) -> float | None:
    """None without NVIDIA's library, or on a card that does not say."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (pynvml.NVMLError, RuntimeError):
        return None
