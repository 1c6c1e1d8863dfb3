"""The budget bounds the bytes of votes that wait for the training thread. Entries take a share in order, and give it back."""

from __future__ import annotations

import asyncio
from typing import Final

WAITING_BYTES_MAX: Final = 512 << 20
"""The network side of a peer that replays the log is ahead of the training thread by at most so many bytes of entries."""


class Budget:
    """One following's. The first entry always has room, whatever its size."""

    def __init__(self, bytes_max: int = WAITING_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held: dict[int, int] = {}
        self._changed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Bytes of all entries that wait."""
        return sum(self._held.values())

    async def reserve(self, step: int, size: int) -> None:
        """Wait for room for the entry of `step`. For one caller at a time, in order of the steps."""
        while self._held and self.held_bytes + size > self._bytes_max:
            self._changed.clear()
            await self._changed.wait()
        self._held[step] = size

    def release(self, step: int) -> None:
        """The entry of `step` waits no more."""
        self._held.pop(step, None)
        self._changed.set()

    def clear(self) -> None:
        """Nothing waits any more."""
        self._held.clear()
        self._changed.set()
