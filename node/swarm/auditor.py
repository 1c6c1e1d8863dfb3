"""This peer as an auditor: adds the votes of a range up again, after the entry, and says so if the entry's sum is another one.

Three things make it look: the draw (`protos.checks.audited`), a sum that this peer made itself and that is not the entry's, and
the word of another peer, by the coordinator. Only where no anchor adds up. Votes that nobody shows count as any votes: so who
withholds its own votes gains no more than it may vote. Refuses to believe another's word. ADR 33.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from node.swarm.addends import Addends
from node.swarm.collector import PayloadDecoder, sources_of
from node.swarm.outbox import Outbox
from node.swarm.publication import Aside
from node.swarm.pulls import Pulls
from node.swarm.runtime import Runtime
from node.swarm.view import ByRange, View, aggregators_in
from protos.checks import AUDIT_STEPS, audited
from protos.identity import short
from protos.limits import HASH_BYTES
from protos.log import Contribution, SignedEntry
from protos.slices import Aggregate, Slice

AUDIT_SECONDS_MAX = 10.0
"""For each of the list of payloads, the payloads' slices, and the sum."""


class Auditor:
    """One peer's."""

    def __init__(
        self,
        public_key: bytes,
        pulls: Pulls,
        door: PayloadDecoder,
        addends: Addends,
        outbox: Outbox,
        view: View,
        runtime: Runtime,
        aside: Aside = asyncio.to_thread,
    ) -> None:
        self._public_key, self._pulls, self._door, self._addends = public_key, pulls, door, addends
        self._outbox, self._view, self._runtime, self._aside = outbox, view, runtime, aside
        self._kept: dict[int, tuple[SignedEntry, ByRange]] = {}
        self._own: dict[int, tuple[bytes, dict[int, Slice]]] = {}
        self._begun: set[tuple[int, int]] = set()

    def saw(self, signed: SignedEntry, by_range: ByRange) -> None:
        """An entry has come. `by_range`: who added its votes up."""
        step, aggregate = signed.entry.step, signed.entry.aggregate
        if aggregate is None or not by_range or not self._view.is_unanchored:
            return
        self._kept[step] = signed, by_range
        self._kept = {at: it for at, it in self._kept.items() if at > step - AUDIT_STEPS}
        self._begun = {(at, number) for at, number in self._begun if at in self._kept}
        for number in audited(signed, self._public_key):
            self.doubted(step, number)
        self._compare(step)

    def made(self, step: int, payloads: bytes, sums: Mapping[int, Slice]) -> None:
        """This peer itself has added up ranges of a step, before its entry has come or after. `payloads`: over their hashes."""
        self._own = {at: it for at, it in self._own.items() if at > step - AUDIT_STEPS} | {step: (payloads, dict(sums))}
        self._compare(step)

    def doubted(self, step: int, number: int) -> None:
        """Somebody doubts the sum of this range."""
        signed, by_range = self._kept.get(step, (None, ()))
        if signed is None or signed.entry.aggregate is None or not number < len(by_range) == self._view.ranges:
            return
        if number < len(signed.entry.aggregate.parts) and (step, number) not in self._begun:
            self._begun.add((step, number))
            self._runtime.spawn(self._audit(signed, signed.entry.aggregate, by_range, number))

    def _compare(self, step: int) -> None:
        """Look at the ranges of which this peer made another sum of the same votes: whose sum came first says nothing."""
        signed, _ = self._kept.get(step, (None, ()))
        payloads, sums = self._own.get(step, (b"", dict[int, Slice]()))
        aggregate = None if signed is None else signed.entry.aggregate
        if aggregate is None or payloads != aggregate.payloads_sha256:
            return
        for number, part in sums.items():
            if number < len(aggregate.parts) and aggregate.parts[number] != part:
                self.doubted(step, number)

    async def _audit(self, signed: SignedEntry, aggregate: Aggregate, by_range: ByRange, number: int) -> None:
        step, log = signed.entry.step, self._runtime.log
        contributions = await self._named(signed, aggregate, by_range)
        sources = sources_of(signed, self._public_key, by_range[number], self._view.roster, number)
        data = await self._sum(aggregate.parts[number], step, number, sources)
        if contributions is None or data is None:
            log.info("a sum cannot be added up again: what it was made of is not here", step=step, range=number)
            return
        cuts = await self._addends.cuts(contributions, step, (number,), by_range, AUDIT_SECONDS_MAX)
        valid = self._addends.valid(cuts, 0, number, contributions, step)
        hidden = sum(cut is None for cut in cuts)
        if await self._aside(self._door.part(number).is_sum, data, valid, step, hidden):
            log.debug("added up again: the sum is right", step=step, range=number, hidden=hidden)
            return
        names = [short(key) for key in by_range[number]]
        log.error("a sum in the log is not that of its votes", step=step, range=number, aggregators=names)
        self._outbox.doubt(step, number)

    async def _named(
        self, signed: SignedEntry, aggregate: Aggregate, by_range: ByRange
    ) -> tuple[Contribution, ...] | None:
        """The entry's contributions with the hashes of their payloads; None if nobody has the list."""
        contributions, step = signed.entry.contributions, signed.entry.step
        size, listed = HASH_BYTES * len(contributions), None
        try:
            async with asyncio.timeout(AUDIT_SECONDS_MAX):
                listed = await self._pulls.hashes(aggregate.payloads_sha256, size, step, aggregators_in(by_range))
        except TimeoutError:
            return None
        if listed is None or len(listed) != size:
            return None
        starts = range(0, size, HASH_BYTES)
        return tuple(
            replace(c, payload_sha256=listed[at : at + HASH_BYTES]) for c, at in zip(contributions, starts, strict=True)
        )

    async def _sum(self, part: Slice, step: int, number: int, sources: list[bytes]) -> bytes | None:
        """The entry's sum of this range; b"" if it is too long to be one."""
        if part.total_bytes > self._door.part(number).aggregate_bytes_max:
            return b""
        try:
            async with asyncio.timeout(AUDIT_SECONDS_MAX):
                return await self._pulls.aggregate(part, step, sources)
        except TimeoutError:
            return None
