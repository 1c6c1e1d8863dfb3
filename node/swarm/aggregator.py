"""This peer as an aggregator: adds up the votes that the coordinator names, and keeps the sum for all that ask for it by hash.

The votes are whole payloads, which this peer holds already or pulls from their authors and the other aggregators. Refuses to
choose votes: it adds up exactly those of the request, or says nothing. ADR 33.
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
from protos.v1 import coordinator_pb2 as pb


class Aggregator:
    """One peer's. A later request ends the work on an earlier one."""

    def __init__(
        self,
        pulls: Pulls,
        door: PayloadDecoder,
        outbox: Outbox,
        view: View,
        runtime: Runtime,
        aside: Aside = asyncio.to_thread,
    ) -> None:
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
        found = await asyncio.gather(*(self._votes(c, step) for c in contributions))
        missing = [c for c, data in zip(contributions, found, strict=True) if data is None]
        if missing:
            text = "this peer lacks votes of a step that it should add up: the other aggregators decide"
            self._runtime.log.warning(text, step=step, payloads=len(missing))
            return
        valid = [update for data, c in zip(found, contributions, strict=True) for update in self._opened(data, c, step)]
        data = await self._aside(self._door.aggregate, valid, step)
        sha256, hashes = payload_hash(data), b"".join(c.payload_sha256 for c in contributions)
        digest = payload_hash(hashes)
        for name, made in ((sha256, data), (digest, hashes)):
            self._pulls.keep_own(step, name, made)
        self._outbox.add_sum(step, attempt, digest, sha256, len(data))

    async def _votes(self, contribution: Contribution, step: int) -> bytes | None:
        """A payload's bytes; b"" if it is too long to count; None if nobody gives it before the step is decided."""
        if contribution.payload_bytes > self._door.bytes_max:
            return b""
        first = self._view.aggregators(step)
        return await self._pulls.accepted(contribution, step, self._door.bytes_max, first)

    def _opened(self, data: bytes | None, contribution: Contribution, step: int) -> list[Update]:
        """The votes, as every replica would have opened them: none if they are invalid."""
        try:
            return [self._door.open(data or b"", step, contribution.payload_bytes)]
        except Refusal as refusal:
            self._runtime.refused(refusal)
            return []
