"""What the owner wants of a running peer, and how long a pause is. The control door writes it; the training thread reads it.

Refuses nothing else than a length that is none, and does nothing: `node/training/loop.py` acts on it, between micro-batches.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import Enum
from typing import Final

from protos.errors import OperatorError

UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SECONDS_MAX: Final = 30 * 86400


def seconds_of(length: str | None, until: str | None, now: datetime) -> float | None:
    """Seconds from `now` (local time) on; None if neither is given. Raises OperatorError."""
    if length is not None and until is not None:
        raise OperatorError("--for and --until are two ways to say one thing: give one of them")
    if until is not None:
        return _until(until, now)
    return None if length is None else _length(length)


def _length(text: str) -> float:
    found = re.fullmatch(r"(\d{1,7})([smhd])", text.strip())
    seconds = int(found[1]) * UNIT_SECONDS[found[2]] if found else 0
    if not 0 < seconds <= SECONDS_MAX:
        raise OperatorError(f"--for {text}: expected a number and s, m, h or d, such as 90m or 2h; at most 30d")
    return float(seconds)


def _until(text: str, now: datetime) -> float:
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip())
    if found is None or int(found[1]) > 23 or int(found[2]) > 59:
        raise OperatorError(f"--until {text}: expected a time of the day such as 18:00")
    then = now.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
    if then <= now:
        then += timedelta(days=1)
    return then.timestamp() - now.timestamp()  # on a day with a change of the clock, too


BY_OWNER = "paused by its owner"


def awake_or_asleep() -> float:
    """Seconds that nobody sets back, and that go on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS counts its sleep in both


class Ending(Enum):
    """How the owner wants the peer to end."""

    FINISH = "finish"
    """After the open step, when this peer's votes of it are decided."""
    LEAVE = "leave"
    """Now, as after Ctrl-C."""


class OwnerRequests:
    """One peer's. Each is a single value, and each change sets it whole: no lock is needed. The last command wins."""

    def __init__(self, clock: Callable[[], float] = awake_or_asleep) -> None:
        self._clock, self._until, self._why = clock, -math.inf, BY_OWNER
        self.held = ""
        """Why a condition of the owner's settings pauses the peer; empty: none does. `ConditionWatch` writes it."""
        self.ending: Ending | None = None

    def pause(self, why: str = BY_OWNER, seconds: float = math.inf) -> None:
        """Apply the log, and train in no step, for so many seconds. `why`: for the log."""
        self._until, self._why = self._clock() + seconds, why

    def resume(self) -> None:
        """Train again, as far as the conditions let the peer."""
        self._until = -math.inf

    @property
    def by_owner(self) -> bool:
        """Whether the owner's own pause goes on."""
        return self.pause_seconds_left > 0

    @property
    def pause_seconds_left(self) -> float:
        """Of the owner's own pause; infinite for one without an end, 0 without a pause."""
        return max(self._until - self._clock(), 0.0)

    def hold(self, why: str) -> None:
        """A condition pauses the peer, or (with an empty text) none does. The owner's own pause stays."""
        self.held = why

    @property
    def paused(self) -> bool:
        """Whether the peer trains in no step now."""
        return self.by_owner or bool(self.held)

    def words(self) -> str:
        """Whether the peer works, and why not, for the log."""
        if self.by_owner:
            return self._why
        return f"paused: {self.held}" if self.held else "goes on"

    def ends(self, *, awaits_entry: bool) -> bool:
        """Whether the peer ends now. `awaits_entry`: the log has not decided about votes that the peer announced."""
        return self.ending is Ending.LEAVE or (self.ending is Ending.FINISH and not awaits_entry)

    def end(self, how: Ending) -> None:
        """End the peer. A paused peer has no step to finish: it ends at once."""
        self.ending = how
