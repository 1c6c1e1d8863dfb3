"""A weekly schedule in local time, as people write it: `mon-fri 18:00-08:00, sat-sun`. Pure: the time is given.

A time over midnight belongs to the day on which it begins: `fri 18:00-08:00` ends on Saturday morning. Minutes count from
Monday 00:00. On the night of a change of the clock, the hours are those that the clock shows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOUR, DAY, WEEK = 60, 24 * 60, 7 * 24 * 60
PARTS_MAX = 50
DAYS_WORD = re.compile(r"([a-z]{3})(?:-([a-z]{3}))?")
TIMES_WORD = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
EXAMPLE = "mon-fri 18:00-08:00, sat-sun"


@dataclass(frozen=True)
class Hours:
    """`text` as a person wrote it; `spans`: the first minute of the week of each time, and its minutes."""

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
