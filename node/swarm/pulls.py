"""A peer gets other peers' payloads from its own disk, or from any holder by hash, and keeps them for others.

A peer tries to pull an announced payload a few times while its step is open. A payload that an entry names is needed at once,
until a later snapshot replaces it. Refuses no bytes that have the hash: the caller checks whether the bytes are votes.
"""

from __future__ import annotations

import asyncio
import time

from node import patience
from node.blobs.fetcher import BlobFetcher
from node.blobs.payloads import Payloads
from node.swarm.inbox import Announced
from node.swarm.runtime import Runtime
from node.swarm.snapshots import AgreedSnapshots
from node.swarm.view import View
from protos.errors import NetworkError
from protos.log import Contribution

FETCH_ROUNDS_MAX = 6
# A peer asks for votes that the log names so often before it loads a snapshot instead.
ACCEPTED_ROUNDS_MIN = 3


class Pulls:
    """One peer's, into its `payloads`. The peer looks for an accepted payload for `patience_seconds`."""

    def __init__(
        self,
        fetcher: BlobFetcher,
        payloads: Payloads,
        view: View,
        snapshots: AgreedSnapshots,
        runtime: Runtime,
        patience_seconds: float,
    ) -> None:
        self._fetcher, self._payloads = fetcher, payloads
        self._view, self._snapshots = view, snapshots
        self._runtime, self._patience_seconds = runtime, patience_seconds

    async def announced(self, announced: Announced) -> bytes:
        """Try while the step is open, a bounded number of times. Afterwards the entry decides whether the payload counts.

        Raises NetworkError.
        """
        waits = patience.waits()
        for _ in range(FETCH_ROUNDS_MAX - 1):
            try:
                return await self._pull(
                    announced.step, announced.payload_sha256, announced.payload_bytes, announced.author
                )
            except NetworkError as error:
                if announced.step <= self._view.step:
                    raise
                self._runtime.log.debug("pulling again", step=announced.step, why=str(error))
                await asyncio.sleep(waits.next())
        return await self._pull(announced.step, announced.payload_sha256, announced.payload_bytes, announced.author)

    async def accepted(self, contribution: Contribution, step: int, bytes_max: int) -> bytes | None:
        """A payload that the entry of `step` names; None if the peer has to load a snapshot instead.

        The author may have given the coordinator a wrong length. After the first try the peer takes any length up to
        `bytes_max`.
        """
        give_up = time.monotonic() + self._patience_seconds
        waits, size_max, rounds = patience.waits(), None, 0
        while (data := self._payloads.get(contribution.payload_sha256)) is None:
            try:
                await self._pull(
                    step,
                    contribution.payload_sha256,
                    contribution.payload_bytes,
                    contribution.public_key,
                    size_max,
                    hasty=True,
                )
            except NetworkError as error:
                newest, rounds = self._snapshots.newest, rounds + 1
                will_do = newest is not None and newest.step >= step and rounds >= ACCEPTED_ROUNDS_MIN
                if will_do or time.monotonic() > give_up:
                    return None
                self._runtime.log.info("payload missing; trying again", step=step, why=str(error))
                size_max = bytes_max
                await asyncio.sleep(waits.next())
        return data

    def keep(self, step: int, sha256: bytes, data: bytes) -> None:
        """Keep a payload that came without a request. The caller has checked its hash."""
        if self._payloads.put(step, sha256, data):
            self._runtime.counters.payload_bytes_received += len(data)

    async def _pull(
        self, step: int, sha256: bytes, size: int, author: bytes, size_max: int | None = None, *, hasty: bool = False
    ) -> bytes:
        held = self._payloads.get(sha256)
        if held is not None:
            return held
        newest = self._snapshots.newest
        holders = [author, *self._view.roster, *(newest.holders if newest is not None else ())]
        if size_max is not None:  # the author comes last, because a dishonest author gains when others wait
            holders = [*dict.fromkeys(key for key in holders if key != author), author]
        data = await self._fetcher.fetch(sha256, size, holders, size_max, hasty=hasty)
        self.keep(step, sha256, data)
        return data
