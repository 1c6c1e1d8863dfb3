"""How long the data takes, beside the rest of a step: says once that a source holds a peer up. Measures nothing itself."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

SLOW: Final = "the data source is slow: this peer gets fewer samples than it could compute; a local disk is faster"
SLOW_PART: Final = 0.5
SLOW_STEPS: Final = 5
SLOW_SECONDS: Final = 1.0


class PacedSamples:
    """One peer's source of samples. A source is slow if reading took more than SLOW_PART of the time of SLOW_STEPS gradients,
    and more than SLOW_SECONDS."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._times: deque[tuple[float, float]] = deque(maxlen=SLOW_STEPS)
        self._told = False

    def noted(self, reading_seconds: float, all_seconds: float, step: int) -> None:
        """See `took`. Warns once if the source is slow."""
        percent = self.took(reading_seconds, all_seconds)
        if percent is not None:
            self._log.warning(SLOW, step=step, reading_percent=percent)

    def took(self, reading_seconds: float, all_seconds: float) -> int | None:
        """A gradient took so long, and reading its samples so much of it. The percentage, once, if the source is slow."""
        self._times.append((reading_seconds, all_seconds))
        if self._told or len(self._times) < SLOW_STEPS:
            return None
        read, whole = (math.fsum(times) for times in zip(*self._times, strict=True))
        if read <= max(SLOW_PART * whole, SLOW_SECONDS):
            return None
        self._told = True
        return round(100 * read / whole)
