"""From an entry of the log to what the training thread applies: the entry with the votes of all its payloads.

A payload that does not pass the door counts as nothing, on every replica alike. Where one is held by nobody any more, there
is no part of an entry: a re-sync is asked for.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from node.swarm.events import Committed, Resync
from node.swarm.payloads import Payloads
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
    """One peer's; entries may be collected side by side."""

    def __init__(
        self, pulls: Pulls, payloads: Payloads, door: Door, snapshots: AgreedSnapshots, runtime: Runtime
    ) -> None:
        self._pulls, self._payloads, self._door = pulls, payloads, door
        self._snapshots, self._runtime = snapshots, runtime

    async def collect(self, signed: SignedEntry, said: dict[bytes, bytes]) -> Committed | None:
        """All payloads of an entry; None if a re-sync was asked for instead. `said`: announcements of them, by author."""
        step, updates, payloads = signed.entry.step, [], []
        by_author = self._tried(signed)
        pulls = [self._payload(c, step) for c in signed.entry.contributions]
        for contribution, data in zip(signed.entry.contributions, await asyncio.gather(*pulls), strict=True):
            if data is None:
                reason = f"the votes of step {step} are no longer held by anyone who answers"
                await self._runtime.emit(Resync(self._snapshots.newest, reason, lost=True))
                return None
            payloads.append(data)
            try:
                updates.append(self._door.open(data, step, contribution.payload_bytes))
                by_author[contribution.public_key] = updates[-1]
            except Refusal as refusal:
                self._runtime.refused(refusal)
                author = short(contribution.public_key)
                self._runtime.log.warning(
                    "an accepted payload is not valid and counts as nothing", step=step, author=author
                )
        return Committed(signed, tuple(updates), tuple(payloads), said, by_author)

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
