"""One coordinator of several on one database: stands by until the lease is free, acts while it holds it, stands by again.

The election decides nothing: `lease.py` says which coordinator may act, and the journal refuses writes of any other. A
coordinator with its own database does not use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import structlog

from coordinator.serving.hub import Hub
from coordinator.store.checkpoint import FoldedRuns
from coordinator.store.journal import Journal, JournalError
from coordinator.store.lease import LOOK_SECONDS, RENEW_SECONDS, HeldLease, Lease

# How often a coordinator reads the records of the acting one, announces itself, and looks for others.
READ_SECONDS = 1.0
CLOSE_SECONDS_MAX = 1.0
T = TypeVar("T")


class Election:
    """`run` goes on until it is cancelled; then `close`."""

    def __init__(
        self,
        lease: Lease,
        journal: Journal,
        hub: Hub,
        show: Callable[[bool], Awaitable[None]],
        met: Callable[[tuple[str, ...]], None],
    ) -> None:
        """The election calls `show` when this coordinator begins or ceases to act.

        The election calls `met` with the addresses of all coordinators, that of the acting one first."""
        self.known = asyncio.Event()
        """Set once this coordinator knows which one acts."""
        self._lease, self._journal, self._hub = lease, journal, hub
        self._show, self._met = show, met
        self._held: HeldLease | None = None
        self.here: tuple[str, ...] = ("another coordinator",)
        """The addresses of the coordinators that are here, that of the one that acts (or acted last) first."""
        self._looked_at = float("-inf")
        # The lease has a thread of its own, so that a write that hangs does not keep it from being renewed.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease")
        self._log = structlog.get_logger("coordinator").bind(step=0, peer="-")

    async def run(self) -> None:
        """Stand by and act, in turn."""
        while True:
            folds = FoldedRuns(self._journal)
            held = await self._wait(folds)
            why = await self._lead(held, folds)
            self._held = None
            self._hub.stand_by(f"this coordinator stands by: {why}")
            self._log.warning("this coordinator stands by", why=why)
            await self._show(False)

    async def _wait(self, folds: FoldedRuns) -> HeldLease:
        """Wait for the lease, and meanwhile read the records of the other coordinator."""
        said = ""
        while True:
            try:
                here = await self._look()
                await self._call(folds.catch_up)
                held = await self._call(self._lease.acquire)
                if held is not None:
                    return held
                why = f"{here[0]} acts"
            except JournalError as error:
                why = f"the database does not answer ({error})"
            self._hub.stands_by = f"this coordinator stands by; {why}"
            if why != said:
                self._log.info("this coordinator stands by", why=why)
            said = why
            self.known.set()
            await asyncio.sleep(LOOK_SECONDS)

    async def _lead(self, held: HeldLease, folds: FoldedRuns) -> str:
        """Act until the lease is lost; returns why."""
        fenced = asyncio.Event()  # of this holding alone: an earlier holding's refusal says nothing about it
        holding = asyncio.ensure_future(self._hold(held, fenced))
        beginning = asyncio.ensure_future(self._begin(held, folds, fenced))
        try:
            await asyncio.wait({holding, beginning}, return_when=asyncio.FIRST_COMPLETED)
            if beginning.done():
                beginning.result()
            return await holding
        finally:
            holding.cancel()
            beginning.cancel()
            await asyncio.gather(holding, beginning, return_exceptions=True)

    async def _begin(self, held: HeldLease, folds: FoldedRuns, fenced: asyncio.Event) -> None:
        """Read the last records, after which no other coordinator can write, and continue from there."""
        while True:
            try:
                await asyncio.to_thread(folds.catch_up)
                lines = await asyncio.to_thread(self._journal.lines)
                break
            except JournalError as error:
                self._log.warning("the journal cannot be reached; the coordinator tries again", error=str(error))
                await asyncio.sleep(LOOK_SECONDS)
        self._hub.act(folds, self._journal.fenced(held.token), fenced.set, lines)
        self._looked_at = float("-inf")  # another coordinator acts now
        self._log.info("this coordinator acts", token=held.token, runs=len(self._hub.runs))
        await self._show(True)
        self.known.set()

    async def _hold(self, held: HeldLease, fenced: asyncio.Event) -> str:
        """Renew the lease until that fails; returns why."""
        while left := held.left(time.monotonic()):
            self._held = held
            with suppress(TimeoutError):
                await asyncio.wait_for(fenced.wait(), min(RENEW_SECONDS, left))
                return "another coordinator acts"
            try:
                async with asyncio.timeout(held.left(time.monotonic())):
                    renewed = await self._call(lambda now=held: self._lease.renew(now))  # type: ignore[misc]
                    if renewed is None:
                        return "another coordinator took the lease"
                    held = renewed
                    await self._look()
            except JournalError as error:
                self._log.warning("the lease could not be renewed; the coordinator tries again", error=str(error))
            except TimeoutError:
                break
        return "the database did not answer in time"

    async def _look(self) -> tuple[str, ...]:
        """From time to time, announce this coordinator and look for others."""
        if time.monotonic() - self._looked_at >= READ_SECONDS:
            await self._call(self._lease.say_here)
            before, self.here = self.here, await self._call(self._lease.coordinators)
            if self.here != before:
                self._met(self.here)
            self._looked_at = time.monotonic()
        return self.here

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Give the lease back, so that another coordinator acts at once."""
        held, self._held = self._held, None
        if held is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._call(lambda: self._lease.release(held)), CLOSE_SECONDS_MAX)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._lease.close()
