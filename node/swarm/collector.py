"""The collector makes of a log entry the value that the training thread applies: the entry with the votes of all its payloads.

A payload that does not pass the door counts as nothing, on every replica alike. If no peer holds a payload any more, the
collector delivers no part of the entry. The collector asks for a re-sync instead.
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
    """The door of payloads: it decides whether bytes are valid votes of a step."""

    @property
    def bytes_max(self) -> int: ...

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Update: ...


class Collector:
    """One peer's; it may collect several entries at once. `whole`: it also delivers the payloads as they travelled, which is a
    second copy of the votes, for an archive."""

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
        """The bytes that the votes of an entry take while they wait for the training thread."""
        sizes = (
            min(it.payload_bytes, self._door.bytes_max) for it in (*signed.entry.contributions, *signed.entry.trials)
        )
        return (1 + self._whole) * sum(sizes)

    async def collect(self, signed: SignedEntry, said: dict[bytes, bytes]) -> Committed | None:
        """An entry with all its payloads; None if this peer asks for a re-sync. `said`: the announcements, by author."""
        step, updates, payloads = signed.entry.step, [], []
        clock = asyncio.get_running_loop().time
        came = clock()
        by_author = self._tried(signed)
        votes = [self._votes(c, step) for c in signed.entry.contributions]
        for contribution, found in zip(signed.entry.contributions, await asyncio.gather(*votes), strict=True):
            if found is None:
                reason = f"no peer that answers holds the votes of step {step} any more"
                await self._runtime.emit(Resync(self._snapshots.newest, reason, lost=True))
                return None
            data, update = found
            if self._whole:
                payloads.append(data)
            if update is not None:
                updates.append(update)
                by_author[contribution.public_key] = update
        return Committed(signed, tuple(updates), tuple(payloads), said, by_author, came, clock())

    async def _votes(self, contribution: Contribution, step: int) -> tuple[bytes, Update | None] | None:
        """A payload's bytes (for an archive) and its votes (None: they count as nothing); None if no peer gives it."""
        data = await self._payload(contribution, step)
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
            data = self._payloads.get(trial.payload_sha256)
            if data is not None:
                try:
                    found[trial.public_key] = self._door.open(data, signed.entry.step, trial.payload_bytes)
                except Refusal as refusal:
                    self._runtime.refused(refusal)
        return found

    async def _payload(self, contribution: Contribution, step: int) -> bytes | None:
        """A payload's bytes. b"" if it is too long to be valid: this peer asks nobody for it. None: a snapshot is needed."""
        if contribution.payload_bytes > self._door.bytes_max:
            return b""
        return await self._pulls.accepted(contribution, step, self._door.bytes_max)
