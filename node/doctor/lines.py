"""Lines about this machine: a fact becomes ok, a warning or a problem, with what to do. Pure.

Refuses to measure anything. `ok` means that the peer can take part, a warning that it takes part with less, a problem that it
cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from node.doctor.doctor_facts import Devices, Fault, Here, OwnText
from node.donor.owner_settings import LiveSettings, State
from protos.clocks import SET_IT
from protos.text import amount, things

DISK_BYTES_MIN = 2 * 10**9
"""Room for a small run: its snapshots, and other peers' votes since the last one."""
MEMORY_BYTES_MIN = 2 * 10**9
"""Room for torch, p2pd and a small model."""
TORCH_PAGE = "https://pytorch.org/get-started/locally"


class Severity(Enum):
    """How good a fact is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "not measured"


@dataclass(frozen=True)
class Line:
    """One fact for people and programs."""

    name: str
    verdict: Severity
    text: str
    todo: str = ""
    """What to do; empty: nothing."""

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"verdict": self.verdict.value}


def worst(lines: Sequence[Line]) -> Severity:
    """A problem before a warning before the rest."""
    found = {line.verdict for line in lines}
    for verdict in (Severity.PROBLEM, Severity.WARNING):
        if verdict in found:
            return verdict
    return Severity.OK


def unknown(name: str, fault: Fault, todo: str = "") -> Line:
    """A fact that was not found."""
    return Line(name, Severity.UNKNOWN, fault.why, todo)


def device(found: Devices | Fault) -> Line:
    """The device that `join` takes, and whether a graphics card lies idle beside it."""
    if isinstance(found, Fault):
        return unknown("device", found)
    if found.fault:
        return Line("device", Severity.PROBLEM, found.fault, "Leave --device out, or name a device of this machine.")
    if found.chosen != "cpu":
        return Line("device", Severity.OK, f"{found.chosen}, {found.name}" if found.name else found.chosen)
    idle = [card for card in found.cards if card in ("NVIDIA", "AMD")]
    text = f"the processor, {things(found.threads, 'thread')}"
    if not idle or len(found.present) > 1:  # the person chose the processor
        return Line("device", Severity.OK, text)
    return _idle_card(idle[0], found, text)


def _idle_card(card: str, found: Devices, text: str) -> Line:
    """A graphics card that torch does not use."""
    wanted = "cuda" if card == "NVIDIA" else "hip"
    kind = "CUDA" if card == "NVIDIA" else "ROCm"
    if not found.build.startswith(wanted):
        return Line(
            "device",
            Severity.WARNING,
            f"{text}; there is an {card} graphics card, but torch {found.torch} is a {found.build.upper()} build",
            f"Install a {kind} build of torch into this environment: {TORCH_PAGE} shows the command.",
        )
    if card == "NVIDIA" and not found.driver:
        todo = "Install the NVIDIA driver of your system, and start the machine again."
        return Line("device", Severity.WARNING, f"{text}; there is an NVIDIA graphics card without a driver", todo)
    return Line(
        "device",
        Severity.WARNING,
        f"{text}; torch {found.torch} ({found.build}) cannot use the {card} graphics card",
        f"Upgrade the driver (now {found.driver or 'unknown'}), or install a build of torch for it: {TORCH_PAGE}",
    )


def driver(found: Devices | Fault) -> Line | None:
    """The NVIDIA driver; None on a machine that needs none."""
    if isinstance(found, Fault) or "NVIDIA" not in found.cards:
        return None
    if found.driver:
        return Line("driver", Severity.OK, f"NVIDIA driver {found.driver}")
    return Line("driver", Severity.WARNING, "no NVIDIA driver is loaded", "Install the NVIDIA driver of your system.")


def memory(found: Devices | Fault) -> Line:
    """The memory of the device, before a run is known."""
    if isinstance(found, Fault):
        return unknown("memory", found)
    if found.room is None:
        return unknown("memory", Fault("the system does not say"))
    text = f"{amount(found.room.free)} free of {amount(found.room.total)} ({found.chosen or 'cpu'})"
    if found.room.free < MEMORY_BYTES_MIN:
        return Line("memory", Severity.WARNING, text, "Close other programs: small runs need about 2 GB.")
    return Line("memory", Severity.OK, text)


def disk(found: Here | Fault) -> Line:
    """The disk of the peer's home, before a run is known."""
    if isinstance(found, Fault):
        return unknown("disk", found)
    if found.home_fault:
        return Line(
            "disk", Severity.PROBLEM, found.home_fault, "Make it this user's own, or take another folder (--home)."
        )
    text = f"{amount(found.disk_free)} free at {found.home}"
    if found.disk_free < DISK_BYTES_MIN:
        return Line("disk", Severity.WARNING, text, "Delete files, or take a folder on another disk (--home).")
    return Line("disk", Severity.OK, text)


def clock(found: Here | Fault) -> Line:
    """Whether the clock is kept right. No decision of a run depends on it."""
    if isinstance(found, Fault):
        return unknown("clock", found)
    if found.clock_wrong:
        return wrong_clock(found.clock_wrong)
    if found.clock_kept is None:
        return unknown("clock", Fault("the system does not say whether it keeps the clock right"))
    if found.clock_kept:
        return Line("clock", Severity.OK, "the system keeps the clock right")
    return Line(
        "clock",
        Severity.WARNING,
        "nothing keeps the clock right; times in logs may be wrong, a run does not depend on them",
        "Turn on automatic time in the system settings.",
    )


def wrong_clock(why: str) -> Line:
    """A clock that says another time than it is. The peer trains with it, and keeps its hours by it."""
    text = f"{why}; `hours`, the month's traffic, logs, QUIC and relays need the right time"
    return Line("clock", Severity.WARNING, text, SET_IT)


def ports(found: Here | Fault) -> Line:
    """Whether the peer can listen."""
    if isinstance(found, Fault):
        return unknown("ports", found)
    if found.port_fault:
        return Line("ports", Severity.PROBLEM, found.port_fault, "Take another port: --listen 0.0.0.0:PORT.")
    free = " (any free port)" if found.listen.endswith(":0") else ""
    return Line("ports", Severity.OK, f"TCP{' and UDP' if found.quic else ''} at {found.listen}{free}")


def power(found: Here | Fault) -> Line | None:
    """A laptop on its battery; None where there is no battery."""
    if isinstance(found, Fault) or found.on_battery is None:
        return None
    if found.on_battery:
        return Line("power", Severity.WARNING, "on battery", "Plug the machine in, and turn automatic sleep off.")
    return Line("power", Severity.OK, "plugged in; turn automatic sleep off while the peer runs")


def limits(device: str, found: Here | Fault, values: LiveSettings | Fault) -> list[Line]:
    """What the owner set about the GPU's memory, the disk and sleep: one line for each setting. `device`: that `join` takes."""
    if isinstance(values, Fault) or isinstance(found, Fault):
        return []
    told = []
    if values.gpu_memory is not None:
        text = f"at most {values.gpu_memory:.0%} of the GPU's memory"
        todo = "" if device.startswith("cuda") else "Only CUDA can limit it: `join` refuses. Set gpu_memory off."
        told.append(
            Line("gpu_memory", Severity.PROBLEM if todo else Severity.OK, f"{text} ({device or 'no device'})", todo)
        )
    if values.disk_gb is not None:
        text = f"at most {values.disk_gb:g} GB for archive, others' votes and text; {amount(found.disk_free)} are free"
        short = values.disk_gb * 10**9 > found.disk_free
        todo = "Not all of it is free now: set disk_gb lower, or delete files." if short else ""
        told.append(Line("disk_gb", Severity.WARNING if short else Severity.OK, text, todo))
    if not values.keep_awake:
        todo = "" if found.keeps_awake else "Turn automatic sleep off in the system settings while the peer runs."
        told.append(Line("keep_awake", Severity.OK, "off: the machine may fall asleep while the peer works", todo))
    elif found.keeps_awake:
        told.append(Line("keep_awake", Severity.OK, "on: the peer keeps the machine awake while it works"))
    else:
        todo = "`join` refuses. Set keep_awake off, and turn automatic sleep off in the system settings."
        told.append(
            Line("keep_awake", Severity.PROBLEM, "on, but there is no systemd-inhibit or caffeinate here", todo)
        )
    return told


def versions(found: Here | Fault) -> Line:
    """What is installed."""
    if isinstance(found, Fault):
        return unknown("versions", found)
    return Line("versions", Severity.OK, ", ".join(f"{name} {number}" for name, number in found.versions.items()))


def conditions(found: Sequence[State] | Fault) -> list[Line]:
    """When the peer may work, as its owner set; one line for each condition."""
    if isinstance(found, Fault):
        return [unknown("conditions", found)]
    if not found:
        return [Line("conditions", Severity.OK, "none: the peer works at any time")]
    todo = "The peer would be paused now. `swarmentum set` changes the condition while the peer runs."
    told = [
        Line(it.key, Severity.OK, it.why) if it.works else Line(it.key, Severity.WARNING, it.why, todo) for it in found
    ]
    return told + [Line(it.key, Severity.WARNING, it.fault) for it in found if it.fault]


def texts(found: Sequence[OwnText] | Fault) -> list[Line]:
    """Training text on this machine: what is read, and what is left out."""
    if isinstance(found, Fault):
        return [
            Line("training text", Severity.PROBLEM, found.why) if found.refused else unknown("training text", found)
        ]
    return [_text(each) for each in found]


def _text(found: OwnText) -> Line:
    text = "; ".join((f"{found.place}: {found.read}", *found.left))
    if found.enough:
        return Line("training text", Severity.OK, text)
    todo = "`join` refuses: mend what is left out, or join with --set allow=left_out."
    return Line("training text", Severity.PROBLEM, text, todo)


def of_devices(found: Devices | Fault) -> list[Line]:
    """What computes."""
    return _there(device(found), driver(found), memory(found))


def of_here(found: Here | Fault) -> list[Line]:
    """The rest of the machine."""
    return _there(disk(found), clock(found), ports(found), power(found), versions(found))


def _there(*lines: Line | None) -> list[Line]:
    return [line for line in lines if line is not None]
