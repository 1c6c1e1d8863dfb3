"""The votes that make a sum: slices of an entry's payloads, as bytes and as votes, each judged as every replica judges it.

Used by who adds up and by who adds up again. Refuses to choose votes. ADR 33.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from node.swarm.collector import PayloadDecoder
from node.swarm.pulls import Pulls
from node.swarm.runtime import Runtime
from node.swarm.view import ByRange, View
from node.wire.codec import Update
from protos.errors import Refusal
from protos.log import Contribution
from protos.slices import split

Cuts: TypeAlias = list[list[bytes] | None]
"""Of each payload its slices of some ranges: none of one that is no payload. None: nobody gave it."""


class Addends:
    """One peer's."""

    def __init__(self, pulls: Pulls, door: PayloadDecoder, view: View, runtime: Runtime) -> None:
        self._pulls, self._door, self._view, self._runtime = pulls, door, view, runtime

    async def cuts(
        self,
        contributions: Sequence[Contribution],
        step: int,
        which: Sequence[int],
        by_range: ByRange,
        seconds_max: float | None = None,
    ) -> Cuts:
        """The slices of these ranges, which this peer holds or pulls until the step is decided, or for so long."""
        found = await asyncio.gather(*(self._pulled(c, step, which, by_range, seconds_max) for c in contributions))
        return [None if data is None else self._cut(data, which) for data in found]

    async def _pulled(
        self, c: Contribution, step: int, which: Sequence[int], by_range: ByRange, seconds_max: float | None
    ) -> bytes | None:
        """Of one payload; b"" if it is too long to count."""
        if c.payload_bytes > self._door.bytes_max:
            return b""
        try:
            async with asyncio.timeout(seconds_max):
                return await self._pulls.accepted(c, step, self._door.bytes_max, by_range, which)
        except TimeoutError:
            return None

    def _cut(self, data: bytes, which: Sequence[int]) -> list[bytes]:
        try:
            return split(data, self._view.ranges, which)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            return []

    def valid(self, cuts: Cuts, at: int, number: int, contributions: Sequence[Contribution], step: int) -> list[Update]:
        """The valid votes of range `number`, which is the slice `at` of each cut."""
        door, alone, found = self._door.part(number), self._view.ranges == 1, list[Update]()
        for cut, c in zip(cuts, contributions, strict=True):
            for part in (cut or [])[at : at + 1]:
                try:
                    found.append(door.open(part, step, c.payload_bytes if alone else None))
                except Refusal as refusal:
                    self._runtime.refused(refusal)
        return found
