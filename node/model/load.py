"""How busy a device is, and how much of its memory is in use. Reads what the system and the driver say.

Refuses to guess: None where neither says anything.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import psutil
import torch

from node.model.room import room_of
from protos.cores import usable_cores

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
