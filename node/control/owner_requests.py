"""What the owner wants of a running peer. The control door writes it; the training thread reads it between micro-batches.

Refuses nothing and does nothing: `node/training/loop.py` acts on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum

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
        """Why a condition of the owner's settings pauses the peer; empty: none does. `node/donor/watch.py` writes it."""
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
