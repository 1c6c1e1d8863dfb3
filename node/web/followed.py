"""One run that the page follows: its facts, its verified log and its figures, read again and again from the coordinator.

The process reads as anybody may (GetRun, ListEntries), and joins nothing. An entry that does not hold ends the following: the
page then names the entry, and shows nothing after it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import structlog

from node.link.run_reader import DoesNotHoldError, RunReader, extended
from node.web.run_stats import STEPS_MAX, RunStats, happenings, here
from protos.clocks import Waits
from protos.errors import NetworkError, OperatorError, Refusal, RefusedError
from protos.invite import Invite
from protos.log import Chain
from protos.run_config import RunConfig
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb

LENGTH_BYTES: Final = 4
PAGE_ENTRIES_MAX: Final = 512
PAGE_BYTES_MAX: Final = 1 << 20
SPOOL_BYTES_MAX: Final = 8 << 30


class SpoolFullError(Exception):
    """The log is longer than this process keeps, or the disk of the temporary folder is full."""


class Spool:
    """The signed entries of one log by step, in a temporary file: browsers get the same bytes that the coordinator signed.

    The file is a row of records: a u32 length (big endian) and the envelope. The spool knows no contents; the caller verifies.

    Envelopes of the steps 1, 2, 3 ... in order. OperatorError without a temporary folder.
    """

    def __init__(self, bytes_max: int = SPOOL_BYTES_MAX) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="swarmentum-web-")  # noqa: SIM115 - `close` closes it
        except OSError as error:
            text = f"the page has no temporary folder to keep the log in ({error.strerror}); TMPDIR names another"
            raise OperatorError(text) from error
        self._ends = array("Q", [0])
        self._bytes_max = bytes_max

    @property
    def head(self) -> int:
        """The last step; 0 if the spool is empty."""
        return len(self._ends) - 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all records."""
        return self._ends[-1]

    def append(self, envelope: bytes) -> None:
        """Keep the envelope of the next step. Raises SpoolFullError, and keeps nothing of this envelope then."""
        end = self._ends[-1] + LENGTH_BYTES + len(envelope)
        if end > self._bytes_max:
            raise SpoolFullError(f"the log is longer than {self._bytes_max} bytes, the most that the page keeps")
        record = len(envelope).to_bytes(LENGTH_BYTES, "big") + envelope
        try:
            written = os.pwrite(self._file.fileno(), record, self._ends[-1])
        except OSError as error:
            raise SpoolFullError(f"the temporary folder cannot hold the log: {error.strerror}") from error
        if written != len(record):
            raise SpoolFullError("the temporary folder is full, and cannot hold the log")
        self._ends.append(end)

    def page(self, first: int) -> tuple[bytes, int, bool]:
        """Records from step `first` on: their bytes, the last step among them, and whether the page is as long as a page gets.

        A page that is not full may grow. `first` is at least 1. Without such steps the page is empty.
        """
        last = min(self.head, first + PAGE_ENTRIES_MAX - 1)
        if first > last:
            return b"", first - 1, False
        begin, fits = self._ends[first - 1], last
        while fits > first and self._ends[fits] - begin > PAGE_BYTES_MAX:
            fits -= 1
        full = fits < last or fits - first + 1 == PAGE_ENTRIES_MAX
        return os.pread(self._file.fileno(), self._ends[fits] - begin, begin), fits, full

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


LOOK_SECONDS: Final = 1.0
FINISHED_LOOK_SECONDS: Final = 15.0
AGAIN_SECONDS_MIN: Final = 0.5
AGAIN_SECONDS_MAX: Final = 15.0
EVALUATIONS_READ_MAX: Final = 64
"""Evaluations of the last states, which the coordinator tells beside the log: the last of a run are in no entry."""
PEERS_SEEN_MAX: Final = 4096
LIVE_ENTRIES_MAX: Final = 64
"""Entries that one look finds are seen live if they are at most so many, and the look before was up to date."""
ENTRIES_AT_ONCE: Final = 32
"""Entries that are verified before browsers are served again: some 0.1 ms each, more with many peers."""


class Followed:
    """A run. `at`: the addresses to ask, if they are not those of the invite. `changed` is called after each change."""

    def __init__(self, invite: Invite, at: Iterable[str] = (), changed: Callable[[], None] = lambda: None) -> None:
        self.invite = replace(invite, ticket=b"")  # the page shows and uses a link that admits nobody in mode `invite`
        self.book = RunStats(invite.run_id)
        self.spool = Spool()
        self.facts: pb.GetRunResponse | None = None
        self.config: RunConfig | None = None
        self.problem = "this page has not reached the coordinator yet"
        """Why the page shows an old state, for people; empty if it does not."""
        self.looked: float | None = None
        """Unix seconds of the last answer."""
        self.seen: dict[bytes, float] = {}
        """Public key -> Unix seconds of the last look at which the peer was connected; the newest PEERS_SEEN_MAX."""
        self.head_step = 0
        """The coordinator's last step: the book may still be behind it."""
        self._addresses = tuple(at)
        self._chain = Chain(invite.run_id, invite.coordinator_public_key)
        self._live = False
        self._at = ""
        self._changed = changed
        self._log = structlog.get_logger("web")

    @property
    def run_hex(self) -> str:
        """The run id, 64 hex digits."""
        return self.invite.run_id.hex()

    async def run(self) -> None:
        """Follow until the task is cancelled, or an entry does not hold."""
        waits = Waits(2 * AGAIN_SECONDS_MIN, AGAIN_SECONDS_MAX)
        async with RunReader(self.invite, self._addresses) as reader:
            while True:
                try:
                    await self._look(reader)
                    waits.reset()
                    wait = self._pause()
                except (DoesNotHoldError, SpoolFullError) as error:
                    self._trouble(str(error))
                    self._log.error("the page follows this run no more", run=self.run_hex[:16], why=str(error))
                    return
                except (NetworkError, RefusedError, OperatorError, Refusal) as error:
                    self._trouble(str(error))
                    await reader.close()  # a coordinator of several may act now, or one was started again
                    wait = waits.next()
                await asyncio.sleep(wait)

    def _pause(self) -> float:
        finished = self.facts is not None and self.facts.phase == pb.Phase.PHASE_FINISHED
        return FINISHED_LOOK_SECONDS if finished and self.book.head >= self.head_step else LOOK_SECONDS

    def _trouble(self, text: str) -> None:
        self._live = False
        if self.problem != text:
            self.problem = printable(text)
            self._changed()

    async def _look(self, reader: RunReader) -> None:
        """Ask for the facts, then for the entries that this process does not have."""
        facts, config = await reader.facts()
        if self.config is None:  # it names whose orders the log needs
            self._chain = Chain(self.invite.run_id, self.invite.coordinator_public_key, operators=config.operators)
        self.config, self.head_step = config, facts.head_step
        await self._catch_up(reader)
        self.book.take(facts.evaluations[:EVALUATIONS_READ_MAX])
        before, self.facts = self.facts, facts
        self.looked = time.time()
        self._note(facts, reader.at)
        self.book.looked(self.looked)
        for kind, text in happenings(before, facts):
            self.book.tell(kind, text, self.looked)
        self.problem, self._live = "", True
        self._changed()

    def _note(self, facts: pb.GetRunResponse, at: str) -> None:
        """Keep who is here, and tell that another coordinator acts."""
        assert self.looked is not None, "this is the time of a look"
        for key in here(facts):
            self.seen.pop(key, None)
            self.seen[key] = self.looked
        while len(self.seen) > PEERS_SEEN_MAX:
            del self.seen[next(iter(self.seen))]
        if self._at and at != self._at:
            self.book.tell(
                "take-over", f"the coordinator at {at} acts now; before it was the one at {self._at}", self.looked
            )
        self._at = at

    async def _catch_up(self, reader: RunReader) -> None:
        live = self._live and self.head_step - self.book.head <= LIVE_ENTRIES_MAX
        while self.book.head < self.head_step:
            page = await reader.page(self.book.head + 1)
            if not page:  # the coordinator lost the end of its journal, and peers give it back
                raise NetworkError(f"the coordinator does not give entry {self.book.head + 1} at the moment")
            seen = time.time() if live else None
            for number, envelope in enumerate(page, 1):
                self._take(envelope, seen)
                if number % ENTRIES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if not live:
                self._trouble(f"this page reads the log: {self.book.head:,} of {self.head_step:,} entries")
            await asyncio.sleep(0)

    def _take(self, envelope: bytes, seen: float | None) -> None:
        """Verify one entry, then keep it. Raises DoesNotHoldError or SpoolFullError."""
        step = self._chain.step + 1
        if step > STEPS_MAX:
            raise SpoolFullError(f"the run has more than {STEPS_MAX} steps, the most that the page keeps")
        signed = extended(self._chain, envelope)
        self.spool.append(signed.envelope)
        try:
            self.book.add(signed.entry, seen)
        except Refusal as refusal:
            raise DoesNotHoldError(f"entry {step} of the log does not hold: {refusal}") from refusal

    def close(self) -> None:
        """Delete what is kept on the disk."""
        self.spool.close()
