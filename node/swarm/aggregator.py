"""This peer as an aggregator: adds up the votes that the coordinator names, and keeps the sum for all that ask for it by hash.

The votes are whole payloads, or slices of its ranges, which this peer holds already or pulls from their authors and the other
aggregators. Refuses to choose votes: it adds up exactly those of the request, or says nothing. ADR 33.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node.swarm.collector import PayloadDecoder
from node.swarm.outbox import Outbox
from node.swarm.publication import Aside
from node.swarm.pulls import Pulls
from node.swarm.runtime import Runtime
from node.swarm.view import View
from node.wire.codec import Update, payload_hash
from protos.errors import Refusal
from protos.log import Contribution, open_contributions
from protos.slices import Aggregate, slice_of, split, sum_in
from protos.v1 import coordinator_pb2 as pb


class Aggregator:
    """One peer's. A later request ends the work on an earlier one."""

    def __init__(
        self,
        public_key: bytes,
        pulls: Pulls,
        door: PayloadDecoder,
        outbox: Outbox,
        view: View,
        runtime: Runtime,
        aside: Aside = asyncio.to_thread,
    ) -> None:
        self._public_key = public_key
        self._pulls, self._door, self._outbox = pulls, door, outbox
        self._view, self._runtime, self._aside = view, runtime, aside
        self._working: asyncio.Task[None] | None = None

    def asked(self, request: pb.SumRequest) -> None:
        """The coordinator asks for a sum of the open step. Raises `Refusal` for a request that is no such."""
        contributions = open_contributions(request.contributions)
        if self._working is not None:
            self._working.cancel()
        if request.step > self._view.step:
            self._working = self._runtime.spawn(self._add_up(request.step, request.attempt, contributions))

    async def _add_up(self, step: int, attempt: int, contributions: Sequence[Contribution]) -> None:
        mine, ranges = self._view.ranges_of(step, self._public_key), self._view.ranges
        if not mine:
            return  # the step is open with other aggregators meanwhile
        found = await asyncio.gather(*(self._votes(c, step, mine) for c in contributions))
        missing = [c for c, data in zip(contributions, found, strict=True) if data is None]
        if missing:
            text = "this peer lacks votes of a step that it should add up: the other aggregators decide"
            self._runtime.log.warning(text, step=step, payloads=len(missing))
            return
        cuts = [self._cut(data, mine) for data in found]
        sums = []
        for at, number in enumerate(mine):
            door = self._door.part(number)
            valid = [
                update
                for cut, c in zip(cuts, contributions, strict=True)
                for update in self._opened(door, cut[at : at + 1], step, c.payload_bytes if ranges == 1 else None)
            ]
            sums.append(await self._aside(door.aggregate, valid, step))
        hashes = b"".join(c.payload_sha256 for c in contributions)
        named, digest = [slice_of(data) for data in sums], payload_hash(hashes)
        for sha256, made in (*zip((it.sha256 for it in named), sums, strict=True), (digest, hashes)):
            self._pulls.keep_own(step, sha256, made)
        aggregate = Aggregate(named[0].sha256, named[0].total_bytes) if ranges == 1 else sum_in(named)
        self._outbox.add_sum(step, attempt, digest, aggregate)

    async def _votes(self, contribution: Contribution, step: int, mine: Sequence[int]) -> bytes | None:
        """A payload's slices of these ranges; b"" if it is too long to count; None if nobody gives them before the step is
        decided."""
        if contribution.payload_bytes > self._door.bytes_max:
            return b""
        by_range = self._view.by_range(step)
        return await self._pulls.accepted(contribution, step, self._door.bytes_max, by_range, mine)

    def _cut(self, data: bytes | None, mine: Sequence[int]) -> list[bytes]:
        """The slices of these ranges; none if the payload is no payload."""
        try:
            return split(data or b"", self._view.ranges, mine)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            return []

    def _opened(self, door: PayloadDecoder, parts: Sequence[bytes], step: int, named_bytes: int | None) -> list[Update]:
        """The votes, as every replica would have opened them: none if they are invalid."""
        try:
            return [door.open(part, step, named_bytes) for part in parts]
        except Refusal as refusal:
            self._runtime.refused(refusal)
            return []
