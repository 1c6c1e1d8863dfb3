"""The settings that an owner can change while the peer runs: their names, their bounds and their meaning; and whether they let
the peer work now, with the reason in words. Pure.

A setting's title is its unit, or says which values it takes (`protos.example.allowed`). `off` stands for no value, also in
files. Refuses to guess in the owner's place: a machine that does not say whether somebody uses it counts as used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from protos.accounts import name_of
from protos.example import allowed
from protos.text import amount, duration
from protos.toml_file import OFF

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOUR, DAY, WEEK = 60, 24 * 60, 7 * 24 * 60
PARTS_MAX = 50
DAYS_WORD = re.compile(r"([a-z]{3})(?:-([a-z]{3}))?")
TIMES_WORD = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
EXAMPLE = "mon-fri 18:00-08:00, sat-sun"


@dataclass(frozen=True)
class Hours:
    """A weekly schedule in local time, as people write it: `mon-fri 18:00-08:00, sat-sun`. Pure: the time is given.

    A time over midnight belongs to the day on which it begins: `fri 18:00-08:00` ends on Saturday morning. Minutes count from
    Monday 00:00. On the night of a change of the clock, the hours are those that the clock shows.

    `text` as a person wrote it; `spans`: the first minute of the week of each time, and its minutes.
    """

    text: str
    spans: tuple[tuple[int, int], ...]

    def include(self, minute: int) -> bool:
        """Whether this minute of the week is in the schedule."""
        return any((minute - begins) % WEEK < length for begins, length in self.spans)

    def begin_after(self, minute: int) -> int:
        """The minute of the week at which the schedule begins next, for a minute outside of it."""
        return min((begins for begins, _ in self.spans), key=lambda begins: (begins - minute) % WEEK)

    def end_after(self, minute: int) -> int | None:
        """The minute of the week at which the schedule ends, for a minute in it; None: never."""
        at = minute
        while (left := max((length - (at - begins) % WEEK for begins, length in self.spans), default=0)) > 0:
            at += left
            if at - minute >= WEEK:
                return None
        return at % WEEK


def parse(text: str) -> Hours:
    """ValueError says which part is wrong."""
    parts = [part.strip().lower() for part in text.split(",")]
    if len(parts) > PARTS_MAX:
        raise ValueError(f"{len(parts)} parts are more than {PARTS_MAX}")
    return Hours(
        ", ".join(" ".join(part.split()) for part in parts), tuple(span for part in parts for span in _spans(part))
    )


def _spans(part: str) -> list[tuple[int, int]]:
    words = part.split()
    if not 1 <= len(words) <= 2:
        raise ValueError(f"{part!r} is not days, times, or both, as in `{EXAMPLE}`")
    times = _times(words[-1])
    if times is None and len(words) > 1:
        raise ValueError(f"{words[-1]!r} is not a time such as 18:00-08:00")
    days = range(7) if times is not None and len(words) == 1 else _days(words[0])
    begins, length = times or (0, DAY)
    return [(day * DAY + begins, length) for day in days]


def _days(word: str) -> list[int]:
    found = DAYS_WORD.fullmatch(word)
    names = [name for name in found.groups() if name is not None] if found else [word]
    unknown = [name for name in names if name not in DAYS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a day: {', '.join(DAYS)}")
    first, last = DAYS.index(names[0]), DAYS.index(names[-1])
    return [(first + count) % 7 for count in range((last - first) % 7 + 1)]


def _times(word: str) -> tuple[int, int] | None:
    """The minute of the day, and the number of minutes."""
    found = TIMES_WORD.fullmatch(word)
    if found is None:
        return None
    hour, minute, to_hour, to_minute = map(int, found.groups())
    begins, ends = hour * HOUR + minute, to_hour * HOUR + to_minute
    if minute >= HOUR or to_minute >= HOUR or begins >= DAY or ends > DAY:
        raise ValueError(f"{word!r} is not a time of the day: hours go from 00:00 to 24:00")
    if begins == ends:
        raise ValueError(f"{word!r} begins and ends at the same time; leave the times out for whole days")
    return begins, (ends - begins) % DAY or DAY


def clock(minute: int, now: int) -> str:
    """`18:00`, or `mon 18:00` if it is not within a day of the minute `now`."""
    at = f"{minute % DAY // HOUR:02}:{minute % HOUR:02}"
    return at if (minute - now) % WEEK < DAY else f"{DAYS[minute // DAY]} {at}"


DEFAULT = "default"
"""`set KEY default` forgets what `set` kept, so that flags, environment and swarmentum.toml count again."""


class LiveSettings(BaseModel):
    """A part of the peer's settings (`node/config.py`), which flags, environment and swarmentum.toml set, too."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of the training. By default PyTorch chooses."""

    nice: int | None = Field(default=None, ge=0, le=19)
    """Process priority (Unix nice): 0 is normal, 19 the lowest."""

    hours: str | None = Field(default=None, title="days and times such as `mon-fri 18:00-08:00, sat-sun`")
    """When the peer works, in local time. A time over midnight belongs to the day on which it begins."""

    only_on_mains: bool = False
    """Pause while a battery feeds the machine."""

    only_when_idle: float | None = Field(default=None, ge=5, le=86_400, title="seconds")
    """Work only after nobody has used keyboard and mouse for so many seconds. Not known counts as used."""

    not_beside_other_gpu_programs: bool = False
    """Pause while another program computes on the GPU, or a game draws on it. Needs an NVIDIA GPU."""

    duty_cycle: float | None = Field(default=None, ge=0.05, le=1, title="a part")
    """The part of the time that the device computes. The peer rests between micro-batches."""

    gpu_memory: float | None = Field(default=None, ge=0.05, le=1, title="a part")
    """The part of the GPU's memory that the peer takes at most. Only for CUDA."""

    disk_gb: float | None = Field(default=None, gt=0, le=1_000_000, title="GB")
    """Disk limit for archive, cached votes and training shards together. Shards give way first, then the oldest votes."""

    keep_awake: bool = False
    """Keep the machine from automatic sleep while the peer works. A paused peer lets it sleep."""

    upload_mbit: float | None = Field(default=None, ge=0.5, le=100_000, title="Mbit/s")
    """The fastest upload of votes and of the model's pieces."""

    download_mbit: float | None = Field(default=None, ge=0.5, le=100_000, title="Mbit/s")
    """The fastest download of votes and of the model's pieces."""

    relay_mbit: float | None = Field(default=None, ge=0, le=100_000, title="Mbit/s")
    """Average bandwidth for relaying other peers' traffic; 0 turns relaying off."""

    upload_gb: float | None = Field(default=None, gt=0, le=1_000_000, title="GB a month")
    """Upload of a calendar month. When it is used up, the peer pauses and serves nothing until the next month."""

    download_gb: float | None = Field(default=None, gt=0, le=1_000_000, title="GB a month")
    """Download of a calendar month. When it is used up, the peer pauses and loads nothing until the next month."""

    owner: str | None = Field(default=None, title="a name of 1 to 64 printable characters")
    """Your name, as everybody sees it. Machines of one name are shown together. A name is a claim."""

    @property
    def relaying_mbit(self) -> float | None:
        """The mean of what this peer relays. An owner who caps a direction, and names no `relay_mbit`, relays nothing: circuits
        keep to no rate."""
        capped = self.upload_mbit is not None or self.download_mbit is not None
        return 0.0 if capped and self.relay_mbit is None else self.relay_mbit

    @field_validator("hours")
    @classmethod
    def _schedule(cls, value: str | None) -> str | None:
        return None if value is None else parse(value).text

    @field_validator("owner")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        return None if value is None else name_of(value)

    @field_validator("*", mode="before")
    @classmethod
    def _off(cls, value: Any, info: Any) -> Any:
        """TOML has no word for nothing."""
        if isinstance(value, str) and value.strip().lower() == OFF:
            field = cls.model_fields[info.field_name]
            return None if type(None) in get_args(field.annotation) else value
        return value


KEYS = tuple(LiveSettings.model_fields)
GONE: Final[Mapping[str, str]] = {"overlay_memory_gb": "the machine's memory decides"}
"""Settings of earlier versions that a home may have from `set`, each with what decides in its place."""
CONDITIONS = ("hours", "only_on_mains", "only_when_idle", "not_beside_other_gpu_programs")


def unchangeable(key: str) -> str:
    """Why a running peer does not change `key`, with the names that it may have meant."""
    near = get_close_matches(key, KEYS, n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{key!r} cannot be changed while the peer runs; {meant}these can: {', '.join(KEYS)}"


def with_value(values: LiveSettings, key: str, given: object) -> LiveSettings:
    """The settings with one value changed. ValueError says the key, the value and what was expected."""
    if key not in KEYS:
        raise ValueError(unchangeable(key))
    try:
        return LiveSettings.model_validate({**values.model_dump(), key: given})
    except ValidationError as error:
        words = [str(item["ctx"]["error"]) for item in error.errors() if item["type"] == "value_error"]
        why = f" ({'; '.join(words)})" if words else ""
        raise ValueError(f"{key} = {str(given)!r}: expected is {expected(key)}{why}") from error


def expected(key: str) -> str:
    """The values that a setting takes, in words."""
    return allowed(LiveSettings.model_fields[key], OFF)


def meaning(key: str) -> str:
    """What a setting does, in one line."""
    return " ".join((LiveSettings.model_fields[key].description or "").split())


def live_part(settings: BaseModel) -> LiveSettings:
    """The live part of a peer's settings."""
    return LiveSettings.model_validate({key: getattr(settings, key) for key in KEYS})


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
        yield replace(_hours(parse(settings.hours), facts.minute), fault=facts.zone_fault)
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


def _hours(schedule: Hours, minute: int) -> State:
    if not schedule.include(minute):
        begins = clock(schedule.begin_after(minute), minute)
        return State("hours", False, f"outside the hours {schedule.text}; goes on at {begins}")
    ends = schedule.end_after(minute)
    until = "" if ends is None else f"; pauses at {clock(ends, minute)}"
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
