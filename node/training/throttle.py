"""What the owner lets the training thread take of the machine, applied on that thread: OpenMP counts threads for each caller.

Threads, and the part of the time that the device computes. Waiting for the network counts as rest. Refuses to decide: the
settings do. Knows no step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from node.donor.owner_settings import LiveSettings
from protos.process import usable_cores

OWED_SECONDS_MAX = 60.0
"""A peer that replayed the log for long does not rest for as long before it trains."""
OWED_SECONDS_MIN = 0.001
SLICE_SECONDS = 0.05


class Throttle:
    """Of one training thread. `wanted` gives the settings as they are now; `now` and `sleep` are in seconds."""

    def __init__(
        self,
        wanted: Callable[[], LiveSettings] = LiveSettings,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._wanted, self._now, self._sleep = wanted, now, sleep
        self._choice = min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(self._choice)
        self._threads: int | None = None
        self._at, self._owed = now(), 0.0

    def refresh(self) -> None:
        """Take the number of threads that is wanted now."""
        threads = self._wanted().threads
        if threads != self._threads:
            torch.set_num_threads(threads or self._choice)
            self._threads = threads

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Meanwhile the thread only waits. The time before counts as work."""
        self._worked()
        yield
        self._rested()

    def resting_until(self, over: Callable[[], bool]) -> Callable[[], bool]:
        """`over`, to be asked between micro-batches: it rests before it answers, unless it is over."""

        def rested() -> bool:
            self._worked()
            while not (ended := over()) and self._owed > OWED_SECONDS_MIN:
                self._sleep(min(self._owed, SLICE_SECONDS))
                self._rested()
            return ended

        return rested

    def _worked(self) -> None:
        """The time since the last call was work: so much rest is due for it."""
        part = self._wanted().duty_cycle or 1.0
        self._owed = min(self._owed + self._since() * (1 - part) / part, OWED_SECONDS_MAX)

    def _rested(self) -> None:
        part = self._wanted().duty_cycle
        since = self._since()
        self._owed = 0.0 if part is None else max(self._owed - since, 0.0)

    def _since(self) -> float:
        before, self._at = self._at, self._now()
        return self._at - before
