"""A peer gets other peers' payloads from its own disk, or from any holder by hash, and keeps them for others.

A peer tries to pull an announced payload a few times while its step is open. A payload that an entry names is needed at once,
until a later snapshot replaces it. Refuses no bytes that have the hash: the caller checks whether the bytes are votes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from node.blobs.fetcher import BlobFetcher
from node.blobs.payloads import Payloads
from node.swarm.facts import AgreedSnapshots
from node.swarm.inbox import Announced
from node.swarm.runtime import ByRange, Runtime, View, aggregators_in
from protos import slices
from protos.clocks import Waits
from protos.errors import NetworkError, Refusal, RefusedError
from protos.identity import short
from protos.log import Contribution
from protos.slices import Slice

FETCH_ROUNDS_MAX = 6
# A peer asks for votes that the log names so often before it loads a snapshot instead.
ACCEPTED_ROUNDS_MIN = 3
ASK_SECONDS = 15.0
AWAY_SHOWN = 3
NOBODY_HAS_VOTES = (
    "no peer online has votes of a step that the log names: waiting for such a peer. If none comes back, the run's operator "
    "can go on from an earlier state: `swarmentum-coordinator run fork`"
)
AWAY_ROUNDS = 6
"""After some 15 s of them a person hears that a step waits for peers that are away."""


class Pulls:
    """One peer's, into its `payloads`. The peer looks for an accepted payload for `patience_seconds`. `ask` asks for the
    agreed snapshots: in the coordinator's stream their notices wait behind entries, and these here for votes that are gone."""

    def __init__(
        self,
        fetcher: BlobFetcher,
        payloads: Payloads,
        view: View,
        snapshots: AgreedSnapshots,
        runtime: Runtime,
        patience_seconds: float,
        ask: Callable[[], Awaitable[object]],
    ) -> None:
        self._ask, self._ask_again = ask, -math.inf
        self._fetcher, self._payloads = fetcher, payloads
        self._view, self._snapshots = view, snapshots
        self._runtime, self._patience_seconds = runtime, patience_seconds
        self._told_away = False

    async def announced(self, announced: Announced, which: Sequence[int]) -> bytes:
        """Its slices of the ranges `which`. Try while the step is open, a bounded number of times. Afterwards the entry decides
        whether the payload counts.

        Raises NetworkError.
        """
        waits = Waits()
        for _ in range(FETCH_ROUNDS_MAX - 1):
            try:
                return await self._announced(announced, which)
            except NetworkError as error:
                if announced.step <= self._view.step:
                    raise
                self._runtime.log.debug("pulling again", step=announced.step, why=str(error))
                await asyncio.sleep(waits.next())
        return await self._announced(announced, which)

    async def _announced(self, announced: Announced, which: Sequence[int]) -> bytes:
        by_range = self._view.by_range(announced.step)
        holders = [announced.author, *aggregators_in(by_range), *self._others()]
        named = announced.payload_sha256, announced.payload_bytes
        return await self._pull_slices(announced.step, *named, holders, None, which, by_range)

    async def accepted(
        self,
        contribution: Contribution,
        step: int,
        bytes_max: int,
        by_range: ByRange = (),
        which: Sequence[int] | None = None,
    ) -> bytes | None:
        """A payload that the entry of `step` names, or its slices of the ranges `which`; None if the peer has to load a
        snapshot instead.

        The author may have given the coordinator a wrong length. After the first try the peer takes any length up to
        `bytes_max`. `by_range`: the step's aggregators, which are asked before the author.
        """
        holders = [*aggregators_in(by_range), contribution.public_key]
        which = range(self._view.ranges) if which is None else which
        named = contribution.payload_sha256, contribution.payload_bytes
        return await self._needed(*named, step, holders, bytes_max, which, by_range)

    async def aggregate(self, part: Slice, step: int, holders: Sequence[bytes]) -> bytes | None:
        """A slice of the sum that the entry of `step` names; None if the peer has to load a snapshot instead."""
        return await self._needed(part.sha256, part.total_bytes, step, holders, None)

    async def hashes(self, sha256: bytes, size: int, step: int, holders: Sequence[bytes]) -> bytes | None:
        """The hashes of the payloads whose sum the entry of `step` names, which its aggregators have; None as `aggregate`."""
        return await self._needed(sha256, size, step, holders, None)

    async def _needed(
        self,
        sha256: bytes,
        size: int,
        step: int,
        first: Sequence[bytes],
        bytes_max: int | None,
        which: Sequence[int] = (),
        by_range: ByRange = (),
    ) -> bytes | None:
        """Look for a blob of the log with patience, until a later snapshot replaces it. `bytes_max`: it is a payload. After the
        first try its author comes last then, because a dishonest author gains when others wait."""
        give_up = time.monotonic() + self._patience_seconds
        waits, rounds = Waits(), 0
        while True:
            holders = [*first, *self._others()]
            if rounds and bytes_max is not None:
                holders = [*(key for key in self._others() if key not in first), *first]
            try:
                if bytes_max is None:
                    found = await self._pull(step, sha256, size, holders, hasty=True)
                else:
                    most = bytes_max if rounds else None
                    found = await self._pull_slices(step, sha256, size, holders, most, which, by_range, hasty=True)
                self._told_away = False
                return found
            except NetworkError as error:
                rounds += 1
                if (rounds >= ACCEPTED_ROUNDS_MIN and self._is_replaced(step)) or time.monotonic() > give_up:
                    return None
                self._runtime.log.info("payload missing; trying again", step=step, why=str(error))
                if rounds == AWAY_ROUNDS and not self._told_away:
                    self._told_away = True
                    who = ", ".join(map(short, first[:AWAY_SHOWN]))
                    self._runtime.log.warning(NOBODY_HAS_VOTES, step=step, authors=who)
                await asyncio.sleep(waits.next())

    def _is_replaced(self, step: int) -> bool:
        """Whether a snapshot that has the step is agreed. Asks for it, one call at a time, and waits for no answer: a silent
        coordinator does not keep a peer from votes that others have."""
        if self._newest_step < step and (now := time.monotonic()) >= self._ask_again:
            self._ask_again = now + ASK_SECONDS
            self._runtime.spawn(self._asked())
        return self._newest_step >= step

    async def _asked(self) -> None:
        with suppress(NetworkError, RefusedError):
            await self._ask()

    @property
    def _newest_step(self) -> int:
        newest = self._snapshots.newest
        return -1 if newest is None else newest.step

    def keep(self, step: int, sha256: bytes, data: bytes) -> None:
        """Keep a payload that came without a request. The caller has checked its hash."""
        if self._payloads.put(step, sha256, data):
            self._runtime.counters.payload_bytes_received += len(data)

    def keep_own(self, step: int, sha256: bytes, data: bytes) -> None:
        """Keep what this peer itself has made for others; until `sync`, a power cut undoes that."""
        self._payloads.put(step, sha256, data)

    def sync(self, names: Iterable[bytes]) -> None:
        """From any thread. Raises DiskError."""
        self._payloads.sync(names)

    def _others(self) -> list[bytes]:
        """Peers that may hold what a step needs: its roster, and the holders of the newest snapshot."""
        newest = self._snapshots.newest
        return [*self._view.roster, *(newest.holders if newest is not None else ())]

    async def _pull_slices(
        self,
        step: int,
        name: bytes,
        size: int,
        holders: Sequence[bytes],
        size_max: int | None,
        which: Sequence[int],
        by_range: ByRange,
        *,
        hasty: bool = False,
    ) -> bytes:
        """A payload's list and its slices of these ranges; of one range, the payload. Bytes that are no list of slices of
        `size` bytes come alone: such a payload counts as no votes. None are longer than a list, so that nobody finds slices in
        them: a slice of another payload is here by its hash, too, and may be a list with slices."""
        ranges, most = self._view.ranges, slices.list_bytes(self._view.ranges)
        if ranges == 1:
            return await self._pull(step, name, size, holders, size_max, hasty=hasty)
        head_max = None if size_max is None else min(size_max, most)
        head = await self._pull(step, name, most, holders, head_max, hasty=hasty)
        if len(head) > most:
            raise NetworkError(f"what is here by a payload's hash has {len(head)} bytes, and a list of slices {most}")
        try:
            parts = slices.open_list(head)
        except Refusal:
            return head
        if len(parts) != ranges or slices.total_bytes(parts) != size:
            return head
        asked = {n: _for_range(n, holders, by_range) for n in which}
        pulled = (self._pull(step, parts[n].sha256, parts[n].total_bytes, asked[n], hasty=hasty) for n in which)
        found = await asyncio.gather(*pulled, return_exceptions=True)  # the next try must not meet pulls of this one
        if failed := next((it for it in found if isinstance(it, BaseException)), None):
            raise failed
        return head + b"".join(it for it in found if isinstance(it, bytes))

    async def _pull(
        self,
        step: int,
        sha256: bytes,
        size: int,
        holders: Sequence[bytes],
        size_max: int | None = None,
        *,
        hasty: bool = False,
    ) -> bytes:
        held = self._payloads.get(sha256)
        if held is not None:
            return held
        data = await self._fetcher.fetch(sha256, size, list(dict.fromkeys(holders)), size_max, hasty=hasty)
        self.keep(step, sha256, data)
        return data


def _for_range(number: int, holders: Sequence[bytes], by_range: ByRange) -> list[bytes]:
    """The same peers, and those last that add up other ranges alone: they have no slice of this one."""
    late = {*aggregators_in(by_range)}.difference(by_range[number] if number < len(by_range) else ())
    return sorted(holders, key=late.__contains__)
