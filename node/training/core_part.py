"""The part of a core that writing a state may take while the training goes on. Pure: times come with each call.

A swarm's peers all wait for the slowest one, so a step after a snapshot must not be longer than others. The writing is spread
over half of the time until the next state comes. ADR 30.
"""

from __future__ import annotations

from typing import Final

CORE_PART_A_CORE: Final = 0.05
"""At most, and while nothing is known yet, for each core of the machine: with many cores some are idle. A low priority instead
would not do: on a busy machine a thread that the system has paused keeps Python's lock."""
CORE_PART_MAX: Final = 0.5
CORE_PART_MIN: Final = 0.01
CORE_PART_BEHIND: Final = 0.25
"""At least, while a later state waits already: a swarm with short steps makes its states faster than they are written."""
SPREAD: Final = 0.5
"""The part of the time to the next state in which a state should be on the disk: joiners wait for it."""


class CorePart:
    """Of one thread that writes states. It learns how often states come, and what a byte costs."""

    def __init__(self, cores: int) -> None:
        self._most = min(CORE_PART_A_CORE * cores, CORE_PART_MAX)
        self._came: float | None = None
        self._between: float | None = None
        self._seconds = 0.0
        self._bytes = 0

    def comes(self, now: float) -> None:
        """A state is there to be written, at `now` seconds."""
        if self._came is not None:
            self._between = now - self._came
        self._came = now

    def used(self, seconds: float, size: int) -> None:
        """`size` bytes were written with `seconds` of CPU time."""
        self._seconds += seconds
        self._bytes += size

    def of(self, size: int, *, behind: bool) -> float:
        """The part of a core for a state of `size` bytes; `behind`: a later one waits already."""
        if behind:
            return max(CORE_PART_BEHIND, self._most)
        if not self._between or not self._bytes:
            return self._most
        needed = self._seconds / self._bytes * size
        return min(max(needed / (SPREAD * self._between), CORE_PART_MIN), self._most)
