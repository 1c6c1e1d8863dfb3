"""The waits between tries of what failed: each about twice as long as the one before, up to a bound, with jitter.

After the death of a coordinator all of its peers try again. Without jitter they would come back in step. All retries with a
growing wait use this class; tests/house/test_house.py keeps it so. Refuses nothing, and sleeps nowhere: the caller waits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

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
