"""Other programs on NVIDIA GPUs, as the driver counts them (NVML). Reads, and changes nothing.

A program that computes counts always. A program that only draws counts from DRAWS_BYTES_MIN of the GPU's memory on: a game
counts, and a terminal does not. The desktop itself never counts. Refuses to guess: None without NVIDIA's library.
"""

from __future__ import annotations

import os
from typing import Any

import psutil

DRAWS_BYTES_MIN = 500_000_000
DESKTOP = frozenset(
    {
        "Xorg", "Xwayland", "gnome-shell", "mutter", "kwin_x11", "kwin_wayland", "plasmashell", "cinnamon", "xfwm4", "sway",
        "Hyprland", "gdm-x-session", "sddm", "nvidia-persistenced",
    }
)  # fmt: skip


class GpuPrograms:
    """On the GPU with this PCI bus id, or on all of the machine's. `family`: a process whose children are this peer, too."""

    def __init__(self, bus_id: str | None = None, family: int | None = None) -> None:
        self._bus_id, self._family = bus_id, family
        self._nvml: Any = None
        self._missing = False

    def others(self) -> tuple[str, ...] | None:
        """Names of the programs beside this peer; None: the driver does not say."""
        try:
            import pynvml
        except ModuleNotFoundError:
            return None
        if self._missing:
            return None
        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            own, names = _own(self._family), set()
            for handle in self._handles():
                computing = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
                drawing = {
                    process.pid
                    for process in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
                    if (process.usedGpuMemory or 0) >= DRAWS_BYTES_MIN
                }
                names |= {_name(pid) for pid in (computing | drawing) - own}
        except pynvml.NVMLError:
            self._missing = self._nvml is None  # no driver now: it does not come while this process runs
            return None
        return tuple(sorted(names - DESKTOP))

    def _handles(self) -> list[Any]:
        if self._bus_id is not None:
            return [self._nvml.nvmlDeviceGetHandleByPciBusId(self._bus_id.encode())]
        return [self._nvml.nvmlDeviceGetHandleByIndex(number) for number in range(self._nvml.nvmlDeviceGetCount())]


def _own(family: int | None) -> set[int]:
    """Process ids of this peer: itself, its children, and those of its launcher."""
    here = {os.getpid()}
    for pid in (os.getpid(), family):
        if pid is not None:
            try:
                here |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
            except psutil.Error:
                continue
    return here


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return f"process {pid}"
