"""The owner's machine: facts that conditions ask for (battery, keyboard and mouse, programs on the GPU), and keeping it awake.

Idle time comes from the owner's own command if there is one (IDLE_COMMAND); else from GNOME or logind (Linux), or from ioreg
(macOS). A program that computes on a GPU counts always, as NVML says. A program that only draws counts from DRAWS_BYTES_MIN of
the GPU's memory on: a game counts, and a terminal does not. The desktop itself never counts. Refuses to guess: without an
answer, the idle time and the programs are None.

`systemd-inhibit` keeps Linux awake by an inhibitor of logind, and `caffeinate` macOS. Both end with this process, also after a
kill. Refuses where there is no such program: Windows, and Linux without systemd.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from calendar import month_name
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from node.donor.owner_settings import DAY, HOUR, LiveSettings, MachineFacts
from protos.mistakes import IDLE_COMMAND

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
            own, names = _own_processes(self._family), set()
            for handle in self._handles():
                computing = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
                drawing = {
                    process.pid
                    for process in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
                    if (process.usedGpuMemory or 0) >= DRAWS_BYTES_MIN
                }
                names |= {_process_name(pid) for pid in (computing | drawing) - own}
        except pynvml.NVMLError:
            self._missing = self._nvml is None  # no driver now: it does not come while this process runs
            return None
        return tuple(sorted(names - DESKTOP))

    def _handles(self) -> list[Any]:
        if self._bus_id is not None:
            return [self._nvml.nvmlDeviceGetHandleByPciBusId(self._bus_id.encode())]
        return [self._nvml.nvmlDeviceGetHandleByIndex(number) for number in range(self._nvml.nvmlDeviceGetCount())]


def _own_processes(family: int | None) -> set[int]:
    """Process ids of this peer: itself, its children, and those of its launcher."""
    here = {os.getpid()}
    for pid in (os.getpid(), family):
        if pid is not None:
            try:
                here |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
            except psutil.Error:
                continue
    return here


def _process_name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return f"process {pid}"


ANSWER_SECONDS_MAX = 2.0
GNOME = (
    "gdbus", "call", "--session", "--timeout", "2", "--dest", "org.gnome.Mutter.IdleMonitor", "--object-path",
    "/org/gnome/Mutter/IdleMonitor/Core", "--method", "org.gnome.Mutter.IdleMonitor.GetIdletime",
)  # fmt: skip
LOGIND = (
    "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager",
    "IdleHint", "IdleSinceHint",
)  # fmt: skip
ZONES = "/usr/share/zoneinfo"
UTC_NAMES = ("UTC", "UCT", "GMT", "UNIVERSAL", "ZULU", "Z")
"""In capitals, without Etc/: UTC is what these say, also without tzdata."""
POSIX_ZONE = re.compile(r"(<[^>]+>|[A-Za-z]{3,})[+-]?\d")
"""Such as CET-1CEST: a zone that says its rules itself."""
MACOS = ("ioreg", "-c", "IOHIDSystem", "-d", "4")
NOBODY_ANSWERS = f"neither GNOME nor logind answers; {IDLE_COMMAND} can name a command that prints milliseconds"
NOBODY_ANSWERS_ON_MACOS = "ioreg does not say"


class Machine:
    """This one. `gpu`: the programs on the peer's GPU."""

    def __init__(self, gpu: GpuPrograms | None = None) -> None:
        self._gpu = gpu or GpuPrograms()

    def facts(self, settings: LiveSettings) -> MachineFacts:
        """What the settings ask for, as it is now."""
        now = datetime.now().astimezone()
        idle, unknown = idle_seconds() if settings.only_when_idle is not None else (None, "")
        ahead = now.month % 12 + 1
        return MachineFacts(
            minute=now.weekday() * DAY + now.hour * HOUR + now.minute,
            on_mains=not settings.only_on_mains or on_mains(),
            idle_seconds=idle,
            idle_unknown=unknown,
            gpu_programs=self._gpu.others() if settings.not_beside_other_gpu_programs else (),
            zone_fault=zone_fault(os.environ) if settings.hours is not None else "",
            month=f"{now:%Y-%m}",
            next_month=f"1 {month_name[ahead]}",
        )


def zone_fault(environment: Mapping[str, str]) -> str:
    """Why the C library takes UTC for the local time: TZ names no file, as in an image without tzdata. It says nothing."""
    name = environment.get("TZ", "").removeprefix(":")
    if not name or name.removeprefix("Etc/").upper() in UTC_NAMES or POSIX_ZONE.match(name):
        return ""
    if Path(environment.get("TZDIR", ZONES), name).is_file():
        return ""
    return f"TZ={name} names no time zone of this machine, so its time is UTC: correct TZ, or install tzdata"


def on_mains() -> bool:
    """False while a battery feeds the machine, or may; a machine without a battery is on mains."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is None or battery.power_plugged is True


def idle_seconds() -> tuple[float | None, str]:
    """Seconds since somebody used the keyboard or the mouse, or None and why it is not known."""
    if own := os.environ.get(IDLE_COMMAND):
        found = _own(own)
        return found, "" if found is not None else f"{IDLE_COMMAND}={own} prints no number"
    if sys.platform == "darwin":
        found = _macos(_said(*MACOS))
        return found, "" if found is not None else NOBODY_ANSWERS_ON_MACOS
    found = _gnome(_said(*GNOME))
    if found is None:
        found = _logind(_said(*LOGIND), time.time())
    return found, "" if found is not None else NOBODY_ANSWERS


def _own(command: str) -> float | None:
    """Milliseconds, as xprintidle (`4711`) and the desktops on D-Bus (`(uint32 4711,)`) print them."""
    try:
        found = re.findall(r"\d+", _said(*shlex.split(command)))
    except (ValueError, IndexError):  # a quote that does not end; nothing but spaces
        return None
    return int(found[-1]) / 1000 if found else None


def _said(*command: str) -> str:
    """What a command prints; empty if it is not here, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _gnome(said: str) -> float | None:
    """`(uint64 4711,)`: milliseconds."""
    found = re.fullmatch(r"\(uint64 (\d+),\)\s*", said)
    return int(found[1]) / 1000 if found else None


def _logind(said: str, now: float) -> float | None:
    """`b true` and `t 1700000000000000`: whether every session is idle, and since which microsecond."""
    found = re.fullmatch(r"b (true|false)\s+t (\d+)\s*", said)
    if found is None:
        return None
    return max(now - int(found[2]) / 1_000_000, 0.0) if found[1] == "true" else 0.0


def _macos(said: str) -> float | None:
    """`"HIDIdleTime" = 4711000000`: nanoseconds."""
    found = re.search(r'"HIDIdleTime" = (\d+)', said)
    return int(found[1]) / 1_000_000_000 if found else None


START_SECONDS = 0.5
LINUX = (
    "systemd-inhibit", "--what=sleep:idle", "--mode=block", "--who=swarmentum", "--why=a training peer works", "cat",
)  # fmt: skip
"""`cat` reads a pipe of this process, so it ends when this process does, and the inhibitor with it."""
CAFFEINATE = ("caffeinate", "-i", "-w")


def command() -> tuple[str, ...] | None:
    """The program that keeps this machine awake; None: there is none."""
    if sys.platform == "darwin":
        found = (*CAFFEINATE, str(os.getpid()))
    elif sys.platform == "linux":
        found = LINUX
    else:
        return None
    return found if shutil.which(found[0]) else None


def check(wanted: bool) -> str:
    """ValueError where this machine cannot be kept awake. Returns nothing to tell."""
    if wanted and command() is None:
        raise ValueError(
            "this machine has neither systemd-inhibit nor caffeinate; turn automatic sleep off in its settings"
        )
    return ""


class Awake:
    """Of one peer. A single thread calls it."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = False

    def keep(self, wanted: bool) -> None:
        """Hold the inhibitor, or let the machine sleep again. A system that refuses is logged once, and asked no more."""
        if not wanted:
            self.close()
            return
        if self._process is not None and self._process.poll() is None:
            return
        program = command()
        if self._refused or program is None:
            return
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._log.info("the machine is kept awake while the peer works", by=program[0])
            return
        said = self._process.stderr.read().decode(errors="replace").strip() if self._process.stderr else ""
        self._refused = True
        self._log.warning("the system does not let this peer keep the machine awake", why=said or "it said nothing")
        self.close()

    def close(self) -> None:
        """Let the machine sleep again."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()
        process.terminate()
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
