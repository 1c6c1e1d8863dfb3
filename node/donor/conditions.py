"""Whether a peer may work now, from the settings of its owner and facts about its machine, with the reason in words. Pure.

Refuses to guess in the owner's place: a machine that does not say whether somebody uses it counts as used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from node.donor import owner_settings
from node.donor.owner_settings import LiveSettings
from protos.amounts import amount, duration

BYTES_A_GB = 10**9
PROGRAMS_SHOWN = 3


@dataclass(frozen=True)
class MachineFacts:
    """What is known about the machine. A fact that no setting asks for keeps its default."""

    minute: int
    """Of the week, in local time, from Monday 00:00."""
    on_mains: bool = True
    idle_seconds: float | None = None
    """Since somebody used the keyboard or the mouse; None: not known, and `idle_unknown` says why."""
    idle_unknown: str = ""
    gpu_programs: tuple[str, ...] | None = ()
    """Other programs on the GPU; None: the driver does not say."""
    zone_fault: str = ""
    """Why the local time is not the owner's; empty: nothing is known against it."""
    month: str = ""
    """Such as 2026-11."""
    next_month: str = ""
    """Such as 1 December."""
    uploaded: int = 0
    """Bytes of the month."""
    downloaded: int = 0


@dataclass(frozen=True)
class State:
    """One condition: the setting that makes it, whether it lets the peer work now, and why in words."""

    key: str
    works: bool
    why: str
    fault: str = ""
    """What is wrong with the setting's surroundings, whether it lets the peer work or not."""


def decide(settings: LiveSettings, facts: MachineFacts) -> State | None:
    """The first condition that pauses the peer; None: it works."""
    return next((state for state in states(settings, facts) if not state.works), None)


def states(settings: LiveSettings, facts: MachineFacts) -> Iterator[State]:
    """Every condition that the owner set."""
    if settings.hours is not None:
        yield replace(_hours(owner_settings.parse(settings.hours), facts.minute), fault=facts.zone_fault)
    if settings.only_on_mains:
        why = "on mains" if facts.on_mains else "on battery; goes on when the machine is plugged in"
        yield State("only_on_mains", facts.on_mains, why)
    if settings.only_when_idle is not None:
        yield _idle(settings.only_when_idle, facts)
    if settings.not_beside_other_gpu_programs:
        yield _gpu(facts.gpu_programs)
    if settings.upload_gb is not None:
        yield _month("upload", settings.upload_gb, facts.uploaded, facts.next_month)
    if settings.download_gb is not None:
        yield _month("download", settings.download_gb, facts.downloaded, facts.next_month)


def _hours(schedule: owner_settings.Hours, minute: int) -> State:
    if not schedule.include(minute):
        begins = owner_settings.clock(schedule.begin_after(minute), minute)
        return State("hours", False, f"outside the hours {schedule.text}; goes on at {begins}")
    ends = schedule.end_after(minute)
    until = "" if ends is None else f"; pauses at {owner_settings.clock(ends, minute)}"
    return State("hours", True, f"in the hours {schedule.text}{until}")


def _idle(seconds: float, facts: MachineFacts) -> State:
    wanted = f"goes on after {duration(seconds)} without keyboard and mouse"
    idle = facts.idle_seconds
    if idle is None:
        text = f"not known whether somebody uses this machine, which counts as used ({facts.idle_unknown})"
        return State("only_when_idle", False, text)
    if idle < seconds:
        return State("only_when_idle", False, f"somebody used this machine {duration(idle)} ago; {wanted}")
    return State("only_when_idle", True, f"nobody has used this machine for {duration(idle)}")


def _month(way: str, gb: float, used: int, next_month: str) -> State:
    of = f"{amount(used)} of {amount(gb * BYTES_A_GB)}"
    if used >= gb * BYTES_A_GB:
        return State(f"{way}_gb", False, f"the {way} of this month is used up: {of}; goes on on {next_month}")
    return State(f"{way}_gb", True, f"{of} of this month's {way} are used")


def _gpu(programs: tuple[str, ...] | None) -> State:
    key = "not_beside_other_gpu_programs"
    if programs is None:
        return State(key, True, "no effect: NVIDIA's library does not say which programs use the GPU")
    if not programs:
        return State(key, True, "no other program uses the GPU")
    names = ", ".join(programs[:PROGRAMS_SHOWN]) + (", ..." if len(programs) > PROGRAMS_SHOWN else "")
    return State(key, False, f"another program uses the GPU: {names}; goes on when it has ended")
