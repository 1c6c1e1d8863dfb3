"""Sums of votes: this peer as an aggregator, which adds them up, and as an auditor, which adds a range up again. ADR 33.

The aggregator adds up exactly the votes of the coordinator's request, or says nothing; it keeps the sum for all that ask for
it by hash. The votes are whole payloads, or slices of its ranges, which this peer holds already or pulls from their authors and
the other aggregators. Each is judged as every replica judges it. Refuses to choose votes.

Three things make the auditor look, after the entry: the draw (`protos.checks.audited`), a sum that this peer made itself and
that is not the entry's, and the word of another peer, by the coordinator. Only where no anchor adds up. Votes that nobody shows
count as any votes: so who withholds its own votes gains no more than it may vote. Refuses to believe another's word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from node.swarm.collector import PayloadDecoder, sources_of
from node.swarm.outbox import Outbox
from node.swarm.publication import Aside
from node.swarm.pulls import Pulls
from node.swarm.runtime import ByRange, Runtime, View, aggregators_in
from protos.checks import AUDIT_STEPS, audited
from protos.errors import Refusal
from protos.identity import short
from protos.limits import HASH_BYTES
from protos.log import Contribution, SignedEntry, open_contributions
from protos.slices import Aggregate, Slice, Update, hash_of, slice_of, split, sum_in
from protos.v1 import coordinator_pb2 as pb

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
            self._runtime.log.warning(
                "this peer lacks votes of a step that it should add up: the other aggregators decide",
                step=step,
                payloads=missing,
            )
            return
        sums = []
        for at, number in enumerate(mine):
            valid = self._addends.valid(cuts, at, number, contributions, step)
            sums.append(await self._aside(self._door.part(number).aggregate, valid, step))
        hashes = b"".join(c.payload_sha256 for c in contributions)
        named, digest = [slice_of(data) for data in sums], hash_of(hashes)
        blobs = dict([*zip((it.sha256 for it in named), sums, strict=True), (digest, hashes)])
        for sha256, made in blobs.items():
            self._pulls.keep_own(step, sha256, made)
        await self._aside(self._pulls.sync, blobs)
        if decided:
            self._runtime.log.warning("made a sum of the log again, which nobody had", step=step)
            return
        self._made(step, digest, dict(zip(mine, named, strict=True)))
        aggregate = Aggregate(named[0].sha256, named[0].total_bytes) if ranges == 1 else sum_in(named)
        self._outbox.add_sum(step, attempt, digest, aggregate)


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
