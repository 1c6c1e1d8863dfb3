"""This machine's clocks, read here so that a test can set either; whether the wall clock is wrong, against a coordinator's and
against the date of this software; and the waits between tries of what failed.

No decision of a run depends on a peer's wall clock: deadlines are monotonic. `hours`, the month's traffic, logs, QUIC and the
relays of libp2p depend on it. Nothing sleeps here: the caller waits.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from protos.text import duration

APART_SECONDS_MAX: Final = 300.0
"""Clocks that nobody sets drift by some seconds a day."""
MADE: Final = datetime(2026, 11, 1, tzinfo=UTC)
"""This software is not older: a machine without a battery for its clock starts in 1970 or 2000."""
SET_IT: Final = "Set this machine's clock (for example `timedatectl set-ntp true`)."

_LAST_MS: Final = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp() * 1000)


def monotonic_ms() -> int:
    """A clock in ms that never goes back. Its readings never cross the wire."""
    return time.monotonic_ns() // 1_000_000


def unix_ms() -> int:
    """The wall clock in ms since 1970. Of a coordinator, only the end times of tickets depend on this clock."""
    return time.time_ns() // 1_000_000


def wrong(now: datetime, coordinator_unix_ms: int = 0) -> str:
    """What is wrong with a clock that says `now`; empty if nothing is known against it.

    `coordinator_unix_ms`: the coordinator's clock at the same moment; 0: not known.
    """
    return too_early(now) or apart(now, coordinator_unix_ms)


def too_early(now: datetime) -> str:
    """What is wrong with a clock from before this software was made; else empty."""
    return f"{_said(now)}, and this software is younger" if now < MADE else ""


def apart(now: datetime, coordinator_unix_ms: int) -> str:
    """How a clock differs from the coordinator's; empty if it does not, if that is not known, or if it is `too_early`."""
    if now < MADE or not 0 < coordinator_unix_ms <= _LAST_MS:
        return ""
    there = datetime.fromtimestamp(coordinator_unix_ms / 1000, UTC)
    seconds = abs((now - there).total_seconds())
    if seconds <= APART_SECONDS_MAX:
        return ""
    return f"{_said(now)}, and the coordinator's says {there:%Y-%m-%d %H:%M} UTC: they are {duration(seconds)} apart"


def _said(now: datetime) -> str:
    return f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"


# The waits between tries: each about twice as long as the one before, up to a bound, with jitter. After the death of a
# coordinator all of its peers try again, and without jitter they would come back in step. All retries with a growing wait use
# `Waits`; tests/house/test_house.py keeps it so.

DOUBLINGS_MAX: Final = 30
RETRY_SECONDS_MIN = 0.2
RETRY_SECONDS_MAX = 5.0
TOLD_AGAIN_SECONDS = 600.0
"""A call that fails for hours says so again after so long, so that the log of an unattended peer stays short."""


class Waits:
    """`first`: the longest first wait; `most`: the longest of all, in the same unit. `drawn`: a number from 0 to 1 for each.

    Without them: the waits of one call to others, in seconds.
    """

    def __init__(
        self,
        first: float = RETRY_SECONDS_MIN,
        most: float = RETRY_SECONDS_MAX,
        drawn: Callable[[], float] = random.random,
    ) -> None:
        self._first, self._most, self._drawn, self._tries = first, most, drawn, 0

    def next(self, most: float | None = None) -> float:
        """The next wait: from half of the doubled time to the whole. `most`: a bound for this wait alone."""
        whole = min(math.ldexp(self._first, self._tries), self._most if most is None else most)
        self._tries = min(self._tries + 1, DOUBLINGS_MAX)
        return whole * (1 + self._drawn()) / 2

    def reset(self) -> None:
        """Something worked: the next wait is a first one."""
        self._tries = 0


class Again:
    """Whether a line of the log is worth writing again. Pure: the time comes with each question, in seconds."""

    def __init__(self) -> None:
        self._last, self._at = "", 0.0

    def worth(self, text: str, now: float) -> bool:
        """True for a text that differs from the last one, and TOLD_AGAIN_SECONDS after the last one that was worth it."""
        if text == self._last and now < self._at + TOLD_AGAIN_SECONDS:
            return False
        self._last, self._at = text, now
        return True
