"""Probes of this machine: device, driver, memory, disk, clock, ports, power, versions. They read, and change nothing."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from node.admission.consent import STANDARD_LIBRARY
from node.admission.fit import free_at
from node.config import PeerSettings
from node.data.corpus import look_at
from node.data.sources import Source
from node.data.tally import SHARE_MAX
from node.doctor.doctor_facts import Devices, Here, OwnText
from node.donor import awake
from node.earlier_settings import TCP_ALONE
from node.model.device import DeviceError, devices, pick_device, room_of
from node.overlay.settings import check_port_free
from protos import wall_clock
from protos.address import is_web
from protos.cores import usable_cores
from protos.errors import OperatorError
from protos.mistakes import OWN_TEXT
from protos.run_config import RunConfig
from protos.version import versions

SYSFS = Path("/sys")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
DISPLAY_CLASS = "0x03"
TIME_ERROR = 5
"""What adjtimex(2) returns for a clock that nothing keeps right."""
TIMEX_BYTES = 512
"""More than `struct timex` has on any Linux."""


def devices_of(settings: PeerSettings) -> Devices:
    """Devices, graphics cards and the driver."""
    build = (
        f"cuda {torch.version.cuda}" if torch.version.cuda else f"hip {hip}" if (hip := torch.version.hip) else "cpu"
    )
    found = Devices(
        torch=torch.__version__,
        build=build,
        present=tuple(devices()),
        chosen="",
        cards=cards_of(SYSFS),
        driver=driver_of(NVIDIA_DRIVER),
        threads=settings.threads or min(torch.get_num_threads(), usable_cores()),
    )
    try:
        device = pick_device(settings.device)
    except DeviceError as error:
        return replace(found, fault=str(error))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return replace(found, chosen=str(device), name=name, room=room_of(device, settings.gpu_memory))


def here(settings: PeerSettings) -> Here:
    """Disk, clock, ports, power and versions."""
    return Here(
        home=str(settings.home),
        disk_free=free_at(settings.home),
        home_fault=home_fault(settings.home),
        clock_kept=clock_kept(),
        clock_wrong=wall_clock.too_early(datetime.now(UTC)),
        listen=settings.listen.removesuffix(TCP_ALONE),
        quic=settings.overlay().quic,
        port_fault=port_fault(settings),
        on_battery=on_battery(SYSFS),
        keeps_awake=awake.command() is not None,
        versions=versions(),
    )


def home_fault(home: Path) -> str:
    """Why a peer could not live in this folder: it is no folder, read-only, or another user's."""
    there = next((place for place in (home, *home.absolute().parents) if os.path.lexists(place)), home)
    if not there.is_dir():
        return f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"this user cannot write to {there}"
    for name, mode, what in (
        ("identity.key", os.R_OK, "read"),
        ("lock", os.W_OK, "write"),
        ("runs", os.W_OK, "write to"),
    ):
        if (path := home / name).exists() and not os.access(path, mode):
            return f"this user cannot {what} {path}"
    return ""


def cards_of(sysfs: Path) -> tuple[str, ...]:
    """Makers of the graphics cards on the PCI bus, whether they have a driver or not."""
    found = set()
    for card in (sysfs / "bus" / "pci" / "devices").glob("*"):
        try:
            kind, maker = (card / "class").read_text(), (card / "vendor").read_text().strip()
        except OSError:
            continue
        if kind.startswith(DISPLAY_CLASS) and maker in MAKERS:
            found.add(MAKERS[maker])
    return tuple(sorted(found, reverse=True))


def driver_of(file: Path) -> str:
    """The version of the loaded NVIDIA driver; empty without one."""
    try:
        first = file.read_text().partition("\n")[0]
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", first)
    return found.group() if found else "of an unknown version"


def clock_kept() -> bool | None:
    """Whether the kernel's clock is kept right by somebody; None where the kernel does not say."""
    if sys.platform != "linux":
        return None
    status: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))  # zeros: asks, and sets nothing
    return None if status < 0 else status != TIME_ERROR


def port_fault(settings: PeerSettings) -> str:
    """Why this machine cannot listen as the settings say; empty: it can."""
    wanted = settings.overlay()
    try:
        check_port_free(wanted.listen_host, wanted.listen_port, quic=wanted.quic)
    except OperatorError as error:
        return f"the peer cannot listen at {settings.listen}: {error}"
    return ""


def on_battery(sysfs: Path) -> bool | None:
    """Whether a battery runs down; None without a battery."""
    states = []
    for supply in (sysfs / "class" / "power_supply").glob("*"):
        try:
            if (supply / "type").read_text().strip() == "Battery":
                states.append((supply / "status").read_text().strip())
        except OSError:
            continue
    return "Discharging" in states if states else None


# The probe of training text on this machine: that of the person (`--data`), and that which a run names and may use.


def of_person(settings: PeerSettings) -> tuple[OwnText, ...]:
    """The text of `--data`. Raises DataError."""
    return () if settings.data is None or is_web(settings.data) else (_look(settings.data, settings),)


def of_run(config: RunConfig, settings: PeerSettings) -> tuple[OwnText, ...]:
    """The text on this machine that the run names, if `join` would read it. Raises DataError."""
    if settings.data is not None or "data" not in settings.allow:
        return ()
    named = [source for source, _, _ in config.data.sources()]
    return tuple(
        _look(source, settings) for source in named if source not in (STANDARD_LIBRARY, OWN_TEXT) and not is_web(source)
    )


def _look(place: str, settings: PeerSettings) -> OwnText:
    found = look_at(Source(place))
    read, *left = found.lines()
    return OwnText(place, read, tuple(left), "left_out" in settings.allow or found.share <= SHARE_MAX)
