"""The collector makes of a log entry the value that the training thread applies: the entry with the votes of all its payloads.

An entry with an aggregate comes with the sum of the votes instead. A payload, or a sum, that does not pass the door counts as
nothing, on every replica alike. If no peer holds a payload any more, the collector delivers no part of the entry. The collector
asks for a re-sync instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from node.blobs.payloads import Payloads
from node.swarm.facts import AgreedSnapshots, Committed, Resync
from node.swarm.pulls import Pulls
from node.swarm.runtime import ByRange, Runtime, View, aggregators_in
from protos.checks import AUDIT_STEPS, VERDICT_STEPS, drawn
from protos.errors import Refusal
from protos.identity import short
from protos.limits import HASH_BYTES, PAYLOAD_BYTES_MAX
from protos.log import Contribution, SignedEntry, with_payloads
from protos.slices import Aggregate, Update, fitting

# A sum of log2(2 cap + 1) bits a place becomes two bits for each unit of the cap: votes, and which of them are silent.
BALLOTS_OF_A_SUM = 8
COPIES_EACH = 4
# A check of votes is worth no longer wait: the step's update waits, too.
CHECKED_SECONDS_MAX = 5.0


class PayloadDecoder(Protocol):
    """The door of payloads: it decides whether bytes are valid votes of a step."""

    @property
    def bytes_max(self) -> int: ...

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Update: ...

    def part(self, number: int) -> PayloadDecoder: ...

    @property
    def aggregate_bytes_max(self) -> int: ...

    def aggregate(self, updates: Sequence[Update], step: int) -> bytes: ...

    def is_sum(self, data: bytes, updates: Sequence[Update], step: int, hidden: int = 0) -> bool: ...

    def open_aggregate(
        self, data: bytes, step: int, named_bytes: int, refused: Callable[[Refusal], None] | None = None
    ) -> tuple[Update, ...]: ...


class Collector:
    """One peer's; it may collect several entries at once. `whole`: it also delivers the payloads as they travelled, which is a
    second copy of the votes, for an archive."""

    def __init__(
        self,
        public_key: bytes,
        pulls: Pulls,
        payloads: Payloads,
        door: PayloadDecoder,
        snapshots: AgreedSnapshots,
        view: View,
        runtime: Runtime,
        *,
        whole: bool = False,
    ) -> None:
        self._public_key, self._view = public_key, view
        self._sums: dict[int, frozenset[bytes]] = {}  # of the last steps, whose votes may still be looked at
        self._pulls, self._payloads, self._door = pulls, payloads, door
        self._snapshots, self._runtime, self._whole = snapshots, runtime, whole

    def bytes_of(self, signed: SignedEntry) -> int:
        """The bytes that the votes of an entry take while they wait for the training thread."""
        if signed.entry.aggregate is not None:
            return BALLOTS_OF_A_SUM * min(signed.entry.aggregate.total_bytes, PAYLOAD_BYTES_MAX)
        sizes = (
            min(it.payload_bytes, self._door.bytes_max) for it in (*signed.entry.contributions, *signed.entry.trials)
        )
        return (1 + self._whole) * sum(sizes)

    async def collect(self, signed: SignedEntry, said: dict[bytes, bytes], by_range: ByRange = ()) -> Committed | None:
        """An entry with all its payloads, or their sum; None if this peer asks for a re-sync. `said`: the announcements, by
        author. `by_range`: the aggregators, who have the sum first, if this peer knows."""
        if signed.entry.aggregate is not None:
            return await self._summed(signed, signed.entry.aggregate, said, by_range)
        step, updates, payloads = signed.entry.step, [], []
        clock = asyncio.get_running_loop().time
        came = clock()
        by_author = self._tried(signed)
        votes = [self._votes(c, step) for c in signed.entry.contributions]
        for contribution, found in zip(signed.entry.contributions, await asyncio.gather(*votes), strict=True):
            if found is None:
                await self._lost(step)
                return None
            data, update = found
            if contribution.public_key == self._public_key:
                self._payloads.keep_mine(contribution.payload_sha256, self._view.ranges)
            if self._whole:
                payloads.append(data)
            if update is not None:
                updates.append(update)
                by_author[contribution.public_key] = update
        return Committed(signed, tuple(updates), tuple(payloads), said, by_author, came, clock())

    async def _summed(
        self,
        signed: SignedEntry,
        aggregate: Aggregate,
        said: dict[bytes, bytes],
        by_range: ByRange,
    ) -> Committed | None:
        """An entry with the sum of its votes, and the payloads that this peer is to check."""
        step, clock = signed.entry.step, asyncio.get_running_loop().time
        came, by_author = clock(), self._tried(signed)
        data, signed = await asyncio.gather(
            self._sum(aggregate, signed, by_range), self._to_check(signed, aggregate, by_range, by_author)
        )
        if data is None:
            await self._lost(step)
            return None

        def refused(refusal: Refusal) -> None:
            self._runtime.refused(refusal)
            self._runtime.log.error(
                "the sum of a step is no sum of votes, and counts as no votes", step=step, why=str(refusal)
            )

        try:
            updates = self._door.open_aggregate(data, step, aggregate.total_bytes, refused)
        except Refusal as refusal:
            refused(refusal)
            updates = ()
        self._sums[step] = frozenset(part.sha256 for part in aggregate.parts)
        kept = AUDIT_STEPS if self._view.is_unanchored else VERDICT_STEPS
        for old in [at for at in self._sums if at <= step - kept]:
            self._payloads.keep_only(old, self._sums.pop(old))
        return Committed(signed, updates, (data,) if self._whole else (), said, by_author, came, clock())

    async def _sum(self, aggregate: Aggregate, signed: SignedEntry, by_range: ByRange) -> bytes | None:
        """A sum's bytes; this peer asks nobody for a slice that is too long to be valid. None: a snapshot is needed."""
        parts, ranges = aggregate.parts, self._view.ranges
        if len(parts) != ranges:
            return b""
        pulled = []
        for number in fitting(parts, [self._door.part(number).aggregate_bytes_max for number in range(ranges)]):
            part = parts[number]
            keys = by_range[number] if number < len(by_range) else ()
            sources = sources_of(signed, self._public_key, keys, self._view.roster, number)
            pulled.append(self._pulls.aggregate(part, signed.entry.step, sources))
        found = await asyncio.gather(*pulled)
        return None if None in found else aggregate.slices + b"".join(part or b"" for part in found)

    async def _to_check(
        self,
        signed: SignedEntry,
        aggregate: Aggregate,
        by_range: ByRange,
        by_author: dict[bytes, Update],
    ) -> SignedEntry:
        """Get the payloads of the peers that the entry draws this peer to check, from the aggregators or their authors.

        Returns the entry with their hashes, if it has to ask for them.
        """
        step, subjects = signed.entry.step, set[bytes]()
        if self._view.checkers:
            found = drawn(signed.hash, signed.entry, self._view.checkers)
            subjects = {
                subject for subject, checkers in found.items() if self._public_key in checkers
            } - by_author.keys()
        if not subjects:
            return signed
        try:
            async with asyncio.timeout(CHECKED_SECONDS_MAX):
                signed = await self._named(signed, aggregate, aggregators_in(by_range), subjects)
                due = [
                    c
                    for c in (*signed.entry.contributions, *signed.entry.trials)
                    if c.public_key in subjects and c.payload_sha256
                ]
                votes = await asyncio.gather(*(self._votes(c, step, by_range) for c in due))
        except TimeoutError:
            return signed  # this peer says nothing about votes that it could not see
        for contribution, one in zip(due, votes, strict=True):
            if one is not None and one[1] is not None:
                by_author[contribution.public_key] = one[1]
        return signed

    async def _named(
        self, signed: SignedEntry, aggregate: Aggregate, aggregators: Sequence[bytes], subjects: set[bytes]
    ) -> SignedEntry:
        """A summed entry with its payloads' hashes, if some of the subjects' are missing and an aggregator has them."""
        contributions = signed.entry.contributions
        if not any(c.public_key in subjects and not c.payload_sha256 for c in contributions):
            return signed
        list_bytes = HASH_BYTES * len(contributions)
        hashes = await self._pulls.hashes(aggregate.payloads_sha256, list_bytes, signed.entry.step, aggregators)
        if hashes is None or len(hashes) != list_bytes:
            return signed
        starts = range(0, list_bytes, HASH_BYTES)
        by_key = {c.public_key: hashes[at : at + HASH_BYTES] for c, at in zip(contributions, starts, strict=True)}
        return with_payloads(signed, by_key)

    async def _lost(self, step: int) -> None:
        """Ask for a re-sync: the votes of a step are nowhere."""
        reason = f"no peer that answers holds the votes of step {step} any more"
        await self._runtime.emit(Resync(self._snapshots.newest, reason, lost=True))

    async def _votes(
        self, contribution: Contribution, step: int, by_range: ByRange = ()
    ) -> tuple[bytes, Update | None] | None:
        """A payload's bytes (for an archive) and its votes (None: they count as nothing); None if no peer gives it. The step's
        aggregators `by_range` are asked first."""
        data = await self._payload(contribution, step, by_range)
        if data is None:
            return None
        try:
            update = self._door.open(data, step, contribution.payload_bytes)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            author = short(contribution.public_key)
            self._runtime.log.warning("an accepted payload is invalid and counts as nothing", step=step, author=author)
            update = None
        return data if self._whole else b"", update

    def _tried(self, signed: SignedEntry) -> dict[bytes, Update]:
        """Votes of peers on probation, as far as this peer holds them. No update needs them, so this peer pulls none."""
        found = {}
        for trial in signed.entry.trials:
            data = self._payloads.whole(trial.payload_sha256, self._view.ranges)
            if data is not None:
                try:
                    found[trial.public_key] = self._door.open(data, signed.entry.step, trial.payload_bytes)
                except Refusal as refusal:
                    self._runtime.refused(refusal)
        return found

    async def _payload(self, contribution: Contribution, step: int, by_range: ByRange) -> bytes | None:
        """A payload's bytes. b"" if it is too long to be valid: this peer asks nobody for it. None: a snapshot is needed."""
        if contribution.payload_bytes > self._door.bytes_max:
            return b""
        return await self._pulls.accepted(contribution, step, self._door.bytes_max, by_range)


def sources_of(
    signed: SignedEntry, public_key: bytes, aggregators: tuple[bytes, ...], roster: Sequence[bytes], number: int = 0
) -> list[bytes]:
    """Whom to ask for the sum of an entry, or of its range `number`, in order. The aggregators serve some peers of the roster,
    and each of these serves COPIES_EACH others: so no uplink carries more than a few sums, however large the swarm is.

    The order of the peers follows from the entry's hash, so another peer is first in each step, and for each range.
    """
    turn = int.from_bytes(signed.hash[:8], "big") + number
    others = [key for key in roster if key not in aggregators]
    place = (others.index(public_key) - turn) % len(others) if public_key in others else 0
    turned = [aggregators[(place + at) % len(aggregators)] for at in range(len(aggregators))]
    first, served = list[bytes](), COPIES_EACH * len(aggregators)
    if aggregators and place >= served:
        first = [others[((place - served) // COPIES_EACH + turn) % len(others)]]
    return [key for key in dict.fromkeys([*first, *turned, *roster]) if key != public_key]
