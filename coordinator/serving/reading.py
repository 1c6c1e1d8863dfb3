"""The log, read: from an engine and threads that the clock does not use, and from a cache of pages.

Peers that follow and strangers have a thread each, so neither waits for the other, and the clock's writes wait for none.
Refuses strangers' reads beyond READS_WAITING_MAX.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from coordinator.store.journal import Journal
from coordinator.store.states import states
from protos.errors import SwarmentumError
from protos.start import StartingState
from protos.v1 import envelope_pb2

READS_WAITING_MAX = 64
PAGES_CACHED_BYTES_MAX = 64 << 20

Page: TypeAlias = "tuple[envelope_pb2.SignedEnvelope, ...]"
_Key: TypeAlias = tuple[bytes, int, int]


class ReadersBusyError(SwarmentumError):
    """Too many strangers read the log at the moment: try again in a second."""


class LogPages:
    """Pages of signed entries of every run. The page of one place in the log is read once, even if many callers want it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._followers = ThreadPoolExecutor(1, thread_name_prefix="read-followers")
        self._strangers = ThreadPoolExecutor(1, thread_name_prefix="read-strangers")
        self._waiting: dict[tuple[_Key, int, bool], asyncio.Future[Page]] = {}
        self._cached: OrderedDict[_Key, tuple[int, int, Page]] = OrderedDict()  # (head, bytes, page)
        self._bytes = 0

    async def page(self, run_id: bytes, first: int, count: int, head: int, *, follows: bool) -> Page:
        """At most `count` entries from step `first` on, of a log whose head is `head`. JournalError, ReadersBusyError."""
        if first > head:
            return ()
        key = (run_id, first, count)
        if key in self._cached and (len(self._cached[key][2]) == count or self._cached[key][0] == head):
            self._cached.move_to_end(key)
            return self._cached[key][2]
        task = self._waiting.get((key, head, follows))
        if task is None:
            if not follows and sum(not lane for _, _, lane in self._waiting) >= READS_WAITING_MAX:
                raise ReadersBusyError("too many strangers read the log; try again in a second")
            task = asyncio.ensure_future(self._read(key, head, follows))
            self._waiting[key, head, follows] = task
            task.add_done_callback(lambda done: self._done(key, head, follows, done))
        return await asyncio.shield(task)

    async def states(
        self, run_id: bytes, coordinator: bytes, agreed_digests: Mapping[int, bytes]
    ) -> list[StartingState]:
        """The states that a fork can begin at. JournalError, Refusal."""
        read = partial(states, self._journal, run_id, coordinator, agreed_digests)
        return await asyncio.get_running_loop().run_in_executor(self._strangers, read)

    async def _read(self, key: _Key, head: int, follows: bool) -> Page:
        lane = self._followers if follows else self._strangers
        rows = await asyncio.get_running_loop().run_in_executor(lane, self._journal.entries, *key)
        page = tuple(envelope_pb2.SignedEnvelope.FromString(row) for row in rows)
        self._keep(key, head, sum(map(len, rows)), page)
        return page

    def _done(self, key: _Key, head: int, follows: bool, done: asyncio.Future[Page]) -> None:
        del self._waiting[key, head, follows]
        if not done.cancelled():
            done.exception()  # a caller that hung up does not read it, and asyncio would log it

    def _keep(self, key: _Key, head: int, size: int, page: Page) -> None:
        self._bytes += size - self._cached.pop(key, (0, 0, ()))[1]
        self._cached[key] = head, size, page
        while self._bytes > PAGES_CACHED_BYTES_MAX and self._cached:
            self._bytes -= self._cached.popitem(last=False)[1][1]

    def close(self) -> None:
        """Release threads and database."""
        for lane in (self._followers, self._strangers):
            lane.shutdown(wait=True, cancel_futures=True)
        self._journal.close()
