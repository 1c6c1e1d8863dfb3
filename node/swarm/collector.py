"""From an entry of the log to what the training thread applies: the entry with the votes of all its payloads.

A payload that does not pass the door counts as nothing, on every replica alike. Where one is held by nobody any more, there
is no part of an entry: a re-sync is asked for.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from node.blobs.payloads import Payloads
from node.swarm.events import Committed, Resync
from node.swarm.pulls import Pulls
from node.swarm.runtime import Runtime
from node.swarm.snapshots import AgreedSnapshots
from node.wire.codec import Update
from protos.errors import Refusal
from protos.identity import short
from protos.log import Contribution, SignedEntry


class Door(Protocol):
    """What decides whether payload bytes are valid votes of a step."""

    @property
    def bytes_max(self) -> int: ...

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Update: ...


class Collector:
    """One peer's; entries may be collected side by side. `whole`: payloads are handed on as they travelled, too: a second copy
    of the votes, for an archive."""

    def __init__(
        self,
        pulls: Pulls,
        payloads: Payloads,
        door: Door,
        snapshots: AgreedSnapshots,
        runtime: Runtime,
        *,
        whole: bool = False,
    ) -> None:
        self._pulls, self._payloads, self._door = pulls, payloads, door
        self._snapshots, self._runtime, self._whole = snapshots, runtime, whole

    def bytes_of(self, signed: SignedEntry) -> int:
        """What the votes of an entry take while they wait for the training thread."""
        sizes = (
            min(it.payload_bytes, self._door.bytes_max) for it in (*signed.entry.contributions, *signed.entry.trials)
        )
        return (1 + self._whole) * sum(sizes)

    async def collect(self, signed: SignedEntry, said: dict[bytes, bytes]) -> Committed | None:
        """All payloads of an entry; None if a re-sync was asked for instead. `said`: announcements of them, by author."""
        step, updates, payloads = signed.entry.step, [], []
        by_author = self._tried(signed)
        votes = [self._votes(c, step) for c in signed.entry.contributions]
        for contribution, found in zip(signed.entry.contributions, await asyncio.gather(*votes), strict=True):
            if found is None:
                reason = f"the votes of step {step} are no longer held by anyone who answers"
                await self._runtime.emit(Resync(self._snapshots.newest, reason, lost=True))
                return None
            data, update = found
            if self._whole:
                payloads.append(data)
            if update is not None:
                updates.append(update)
                by_author[contribution.public_key] = update
        return Committed(signed, tuple(updates), tuple(payloads), said, by_author)

    async def _votes(self, contribution: Contribution, step: int) -> tuple[bytes, Update | None] | None:
        """A payload, if it is wanted whole, and its votes, unless they count as nothing; None if it cannot be had."""
        data = await self._payload(contribution, step)
        if data is None:
            return None
        try:
            update = self._door.open(data, step, contribution.payload_bytes)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            author = short(contribution.public_key)
            self._runtime.log.warning(
                "an accepted payload is not valid and counts as nothing", step=step, author=author
            )
            update = None
        return data if self._whole else b"", update

    def _tried(self, signed: SignedEntry) -> dict[bytes, Update]:
        """Votes of peers on probation, as far as they are here: nobody needs them."""
        found = {}
        for trial in signed.entry.trials:
            data = self._payloads.get(trial.payload_sha256)
            if data is not None:
                try:
                    found[trial.public_key] = self._door.open(data, signed.entry.step, trial.payload_bytes)
                except Refusal as refusal:
                    self._runtime.refused(refusal)
        return found

    async def _payload(self, contribution: Contribution, step: int) -> bytes | None:
        """b"" if it cannot be valid: nobody is asked for it. None if a snapshot has to do instead."""
        if contribution.payload_bytes > self._door.bytes_max:
            return b""
        return await self._pulls.accepted(contribution, step, self._door.bytes_max)
