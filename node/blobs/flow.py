"""The pace of a peer's bytes in one direction: at most so many a second, and none at all while the direction is shut.

Bytes of members of the open step go before a stranger's. Bytes of each kind go in the order in which they came. Refuses to hold
bytes: a sender waits before it writes, and a puller before it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BURST_SECONDS = 0.25
"""A direction that was quiet may send so much at once, beside the bytes that it is asked for."""
RELAYED_SECONDS_MAX = 5.0
LOOK_SECONDS = 1.0
"""A direction that is shut, or whose limit is lifted, is looked at so often."""


class FlowDirection:
    """One direction. `rate` gives the limit as it is now, in bytes a second; None: no limit."""

    def __init__(self, rate: Callable[[], float | None] = lambda: None) -> None:
        self.shut = False
        """Whether the month's bytes are used up. `ResourceLimits` writes it, from another thread."""
        self._rate = rate
        self._free_at = 0.0
        self._relayed = 0
        self._urgent = 0
        self._lock, self._urgent_lock = asyncio.Lock(), asyncio.Lock()

    @property
    def limited(self) -> bool:
        """Whether the owner gives this direction a limit."""
        return self._rate() is not None

    async def take(self, size: int, *, urgent: bool = False) -> None:
        """Wait until so many bytes may go. `urgent`: before those that are not."""
        if self._rate() is None:
            return
        self._urgent += urgent
        try:
            async with self._urgent_lock if urgent else self._lock:
                while (rate := self._rate()) is not None:
                    now = _now()
                    wait = self._free_at - now
                    if wait <= 0 and (urgent or not self._urgent):
                        self._free_at = max(self._free_at, now - BURST_SECONDS) + size / rate
                        return
                    await asyncio.sleep(min(max(wait, 0.001), LOOK_SECONDS))
        finally:
            self._urgent -= urgent

    def relayed(self, total: int) -> None:
        """So many bytes in all went in this direction for others, past this lane. What is new comes off the rate, at most
        RELAYED_SECONDS_MAX of it: own votes wait no longer for them."""
        new, self._relayed = total - self._relayed, total
        if new > 0 and (rate := self._rate()) is not None:
            now = _now()
            due = max(self._free_at, now - BURST_SECONDS) + new / rate
            self._free_at = max(self._free_at, min(due, now + RELAYED_SECONDS_MAX))

    def give_back(self, size: int) -> None:
        """So many bytes did not go after all."""
        if (rate := self._rate()) is not None:
            self._free_at -= size / rate

    async def opened(self) -> None:
        """Wait while the direction is shut."""
        while self.shut:  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(LOOK_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
