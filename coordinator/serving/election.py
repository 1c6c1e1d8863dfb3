"""One coordinator of several on one database: stands by until the lease is free, acts while it holds it, stands by again.

The lease is one row in the database, by the database's clock. Each holding of it has a token, one more than the last, and the
journal takes a record only under the newest token (`coordinator/store/journal.py`). So a coordinator that stalls while it acts,
and is replaced, can do no harm. The token makes two coordinators safe; the times below only make a take-over quick. ADR 15.

The election decides nothing. A coordinator with its own database does not use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa
import structlog

from coordinator.serving.hub import Hub
from coordinator.store.checkpoint import FoldedRuns
from coordinator.store.database import MAY_WAIT, connected, making_tables
from coordinator.store.journal import LEASE, Journal, JournalError, failing_as_journal_error
from protos.disk import DiskError
from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import COORDINATORS_MAX

# The lease lasts this long after its last renewal, and is renewed this often: three renewals in a row may fail. Peers notice
# a silent coordinator in about the same time (node/link/client.py).
LEASE_SECONDS = 2.0
RENEW_SECONDS = 0.5
# How often those that stand by look whether the lease is free.
LOOK_SECONDS = 0.25
# Invites name the coordinators that were here lately: an address too many costs a peer nothing.
HERE_SECONDS = 600
_METADATA = sa.MetaData()
_LEASE = LEASE.to_metadata(_METADATA)
_COORDINATORS = sa.Table(
    "coordinators",
    _METADATA,
    sa.Column("address", sa.String(256), primary_key=True),
    sa.Column("seen", sa.DateTime(timezone=True), nullable=False),
)
_OWNER = sa.Table(
    "owner",
    _METADATA,
    sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("public_key", sa.LargeBinary(32), nullable=False),
    sa.Column("certificate_sha256", sa.LargeBinary(32), nullable=False),
)
# clock_timestamp(), not now(): a statement may have waited for the row.
_FIRST = sa.text("INSERT INTO lease (id, token, expires, address) VALUES (1, 0, 'epoch', '') ON CONFLICT DO NOTHING")
_OWN = sa.text(
    "INSERT INTO owner (id, public_key, certificate_sha256) VALUES (1, :key, :certificate) ON CONFLICT DO NOTHING"
)
_TAKE = sa.text(
    "UPDATE lease SET token = token + 1, expires = clock_timestamp() + make_interval(secs => :seconds), address = :address "
    "WHERE id = 1 AND expires < clock_timestamp() RETURNING token"
)


def _quick(words: str) -> sa.TextClause:
    """A statement that need not survive the database: without it the lease only ends sooner. Taking the lease is durable: no
    token may ever be given twice. The session keeps no setting: it may be a pooler's, which gives it to others."""
    return sa.text(f"WITH quick AS (SELECT set_config('synchronous_commit', 'off', true)) {words}")


_RENEW = _quick(
    "UPDATE lease SET expires = clock_timestamp() + make_interval(secs => :seconds) FROM quick "
    "WHERE id = 1 AND token = :token RETURNING token"
)
_RELEASE = _quick("UPDATE lease SET expires = 'epoch' FROM quick WHERE id = 1 AND token = :token")
_SAY_HERE = _quick(
    "INSERT INTO coordinators (address, seen) SELECT :address, clock_timestamp() FROM quick "
    "ON CONFLICT (address) DO UPDATE SET seen = excluded.seen"
)
_WHO = sa.text(
    "SELECT address, address = (SELECT address FROM lease WHERE id = 1) AS acts FROM coordinators "
    "WHERE seen > clock_timestamp() - make_interval(secs => :seconds) ORDER BY acts DESC, seen DESC LIMIT :most"
)


@dataclass(frozen=True)
class HeldLease:
    """The lease, held until `until` on this machine's monotonic clock, counted from before it was asked for."""

    token: int
    until: float

    def left(self, now: float) -> float:
        """Seconds that this coordinator may still act; 0.0 when it has to stop."""
        return max(self.until - now, 0.0)


def held_since(token: int, asked_at: float) -> HeldLease:
    """The database counts from a moment after `asked_at`, so its time ends later than ours."""
    return HeldLease(token, asked_at + LEASE_SECONDS)


class Lease:
    """The row, as one coordinator uses it. Calls block, and one at a time; each raises JournalError."""

    def __init__(self, url: sa.URL, address: str, identity: Identity, certificate_sha256: bytes) -> None:
        self._address = address
        self._url, self._engine = url, connected(url, silent_seconds=LEASE_SECONDS)
        try:
            self._enter(identity.public_key, certificate_sha256)
        except OperatorError:
            self.close()
            raise

    def _enter(self, public_key: bytes, certificate_sha256: bytes) -> None:
        """Make the tables, or see that they are those of coordinators with the same keys."""
        patient = connected(self._url)
        try:
            with making_tables(patient, _METADATA) as connection:
                connection.execute(_FIRST)
                connection.execute(_OWN, {"key": public_key, "certificate": certificate_sha256})
                owner = connection.execute(sa.select(_OWNER)).one()
        finally:
            patient.dispose()
        _check_owner("identity.key", public_key, owner.public_key)
        _check_owner("tls.key and tls.crt", certificate_sha256, owner.certificate_sha256)

    def acquire(self) -> HeldLease | None:
        """The lease if it is free, under a new token."""
        asked_at = time.monotonic()
        with _statement(self._engine) as connection:
            token = connection.execute(_TAKE, {"seconds": LEASE_SECONDS, "address": self._address}).scalar()
        return None if token is None else held_since(token, asked_at)

    def renew(self, held: HeldLease) -> HeldLease | None:
        """Hold it for longer; None if another coordinator has taken it."""
        asked_at = time.monotonic()
        with _statement(self._engine) as connection:
            found = connection.execute(_RENEW, {"seconds": LEASE_SECONDS, "token": held.token}).scalar()
        return held_since(held.token, asked_at) if found is not None else None

    def release(self, held: HeldLease) -> None:
        """Give it back, so that another acts at once; no matter if the database does not answer."""
        with suppress(JournalError), _statement(self._engine) as connection:
            connection.execute(_RELEASE, {"token": held.token})

    def say_here(self) -> None:
        """Invites shall name this coordinator."""
        with _statement(self._engine) as connection:
            connection.execute(_SAY_HERE, {"address": self._address})

    def coordinators(self) -> tuple[str, ...]:
        """The addresses of those that are here, the one that acts (or did last) first."""
        with _statement(self._engine) as connection:
            rows = connection.execute(_WHO, {"seconds": HERE_SECONDS, "most": COORDINATORS_MAX}).all()
        return tuple(address for row in rows for address in row.address.split(","))[:COORDINATORS_MAX]

    def close(self) -> None:
        """Release the connections."""
        self._engine.dispose()


def _statement(engine: sa.Engine) -> AbstractContextManager[sa.Connection]:
    return failing_as_journal_error(engine.begin, "reached")


def _check_owner(files: str, ours: bytes, theirs: bytes) -> None:
    if ours != theirs:
        raise OperatorError(
            f"this database belongs to coordinators with another {files}: copy identity.key, tls.key and tls.crt from the "
            "home folder of the first coordinator to this one's, or name another database"
        )


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

        The election calls `met` with the addresses of all coordinators, that of the acting one first; DiskError: again."""
        self.known = asyncio.Event()
        """Set once this coordinator knows which one acts."""
        self._lease, self._journal, self._hub = lease, journal, hub
        self._show, self._met = show, met
        self._held: HeldLease | None = None
        self.here: tuple[str, ...] = ("another coordinator",)
        """The addresses of the coordinators that are here, that of the one that acts (or acted last) first."""
        self._noted: tuple[str, ...] | None = ()
        """Those that `met` was called with; None while it fails."""
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
                why = str(error)
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
        why = silent = f"the database did not answer in time: {MAY_WAIT}"
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
                    held, why = renewed, silent
                    await self._look()
            except JournalError as error:
                why = str(error)
                self._log.warning("the lease could not be renewed; the coordinator tries again", error=str(error))
            except TimeoutError:
                break
        return why

    async def _look(self) -> tuple[str, ...]:
        """From time to time, announce this coordinator and look for others."""
        if time.monotonic() - self._looked_at >= READ_SECONDS:
            await self._call(self._lease.say_here)
            self.here = await self._call(self._lease.coordinators)
            self._note()
            self._looked_at = time.monotonic()
        return self.here

    def _note(self) -> None:
        """The home's disk may be full, and the database is elsewhere: the lease is held, and the next look tries again."""
        if self._noted == self.here:
            return
        try:
            self._met(self.here)
            self._noted = self.here
        except DiskError as error:
            if self._noted is not None:
                self._log.warning("invites of this coordinator name other coordinators than there are", why=str(error))
            self._noted = None

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
