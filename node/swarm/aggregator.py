"""This peer as an aggregator: adds up the votes that the coordinator names, and keeps the sum for all that ask for it by hash.

The votes are whole payloads, or slices of its ranges, which this peer holds already or pulls from their authors and the other
aggregators. Refuses to choose votes: it adds up exactly those of the request, or says nothing. ADR 33.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from node.swarm.addends import Addends
from node.swarm.collector import PayloadDecoder
from node.swarm.outbox import Outbox
from node.swarm.publication import Aside
from node.swarm.pulls import Pulls
from node.swarm.runtime import Runtime
from node.swarm.view import View
from node.wire.codec import payload_hash
from protos.log import Contribution, open_contributions
from protos.slices import Aggregate, Slice, slice_of, sum_in
from protos.v1 import coordinator_pb2 as pb

Made: TypeAlias = Callable[[int, bytes, Mapping[int, Slice]], None]
"""Is told of the sums that this peer made: of which step, of which payloads (over their hashes), by range."""


class Aggregator:
    """One peer's. A later request ends the work on an earlier one."""

    def __init__(
        self,
        public_key: bytes,
        pulls: Pulls,
        door: PayloadDecoder,
        addends: Addends,
        outbox: Outbox,
        made: Made,
        view: View,
        runtime: Runtime,
        aside: Aside = asyncio.to_thread,
    ) -> None:
        self._public_key = public_key
        self._pulls, self._door, self._addends = pulls, door, addends
        self._outbox, self._made = outbox, made
        self._view, self._runtime, self._aside = view, runtime, aside
        self._working: asyncio.Task[None] | None = None

    def asked(self, request: pb.SumRequest) -> None:
        """The coordinator asks for a sum of the open step, or for that of the newest entry, which nobody has. Raises `Refusal`
        for a request that is no such."""
        contributions = open_contributions(request.contributions)
        if self._working is not None:
            self._working.cancel()
        if request.step >= self._view.step:
            self._working = self._runtime.spawn(self._add_up(request.step, request.attempt, contributions))

    async def _add_up(self, step: int, attempt: int, contributions: Sequence[Contribution]) -> None:
        ranges, decided = self._view.ranges, not attempt
        by_range = self._view.by_range(step)
        mine = tuple(range(ranges)) if decided else self._view.ranges_of(step, self._public_key)
        if not mine or not (decided or by_range):
            return  # the step is open with other aggregators meanwhile
        cuts = await self._addends.cuts(contributions, step, mine, by_range)
        if missing := sum(cut is None for cut in cuts):
            text = "this peer lacks votes of a step that it should add up: the other aggregators decide"
            self._runtime.log.warning(text, step=step, payloads=missing)
            return
        sums = []
        for at, number in enumerate(mine):
            valid = self._addends.valid(cuts, at, number, contributions, step)
            sums.append(await self._aside(self._door.part(number).aggregate, valid, step))
        hashes = b"".join(c.payload_sha256 for c in contributions)
        named, digest = [slice_of(data) for data in sums], payload_hash(hashes)
        for sha256, made in (*zip((it.sha256 for it in named), sums, strict=True), (digest, hashes)):
            self._pulls.keep_own(step, sha256, made)
        if decided:
            self._runtime.log.warning("made a sum of the log again, which nobody had", step=step)
            return
        self._made(step, digest, dict(zip(mine, named, strict=True)))
        aggregate = Aggregate(named[0].sha256, named[0].total_bytes) if ranges == 1 else sum_in(named)
        self._outbox.add_sum(step, attempt, digest, aggregate)
