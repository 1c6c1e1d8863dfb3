"""The lease and the fence, against a real PostgreSQL server; the arithmetic of a lease without one."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
import structlog

from coordinator.clock.effects import TicketMade, TicketRevoked, TicketUsed, TickOpened
from coordinator.serving import election
from coordinator.serving.election import LEASE_SECONDS, HeldLease, Lease, held_since
from coordinator.store import database
from coordinator.store import journal as journal_module
from coordinator.store.journal import Checkpoint, FencedError, FullDiskError, Journal, JournalError
from protos.disk import write_bytes
from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import Ticket
from protos.log import FORMAT_VERSION, run_id_of
from protos.v1 import log_pb2
from tests.system.postgres import Postgres, server_or_skip
from tests.unit.coordinator.driver import Swarm, config
from tests.unit.coordinator.serving import eventually

IDENTITY = Identity.from_seed(bytes([1]) * 32)
CERTIFICATE = bytes([2]) * 32


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    yield from server_or_skip()


class Place:
    """A database, the leases and journals that tests open there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.opened: list[Lease | Journal] = []

    def lease(self, number: int, key: Identity = IDENTITY, certificate: bytes = CERTIFICATE) -> Lease:
        made = Lease(database.parsed(self.url), f"here:{number}", key, certificate)
        self.opened.append(made)
        return made

    def journal(self) -> Journal:
        made = Journal(self.url, IDENTITY)
        self.opened.append(made)
        return made


@pytest.fixture
def place(server: Postgres) -> Iterator[Place]:
    made = Place(server.database())
    yield made
    for each in made.opened:
        each.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "LEASE_SECONDS", 0.05)


def test_a_lease_ends_by_the_clock_from_before_it_was_asked_for() -> None:
    held = held_since(7, 100.0)
    assert held == HeldLease(7, 100.0 + LEASE_SECONDS)
    assert held.left(100.5) == LEASE_SECONDS - 0.5
    assert held.left(100.0 + LEASE_SECONDS) == 0.0
    assert held.left(1000.0) == 0.0


def test_one_holds_it_until_it_ends_or_is_given_back(place: Place) -> None:
    one, other = place.lease(0), place.lease(1)
    held = one.acquire()
    assert held is not None
    assert other.acquire() is None
    assert one.acquire() is None, "who holds it renews it"
    renewed = one.renew(held)
    assert renewed.token == held.token
    assert renewed.until > held.until
    one.release(renewed)
    taken = other.acquire()
    assert taken.token == held.token + 1
    assert one.renew(renewed) is None
    one.release(renewed)  # no longer its own
    assert one.acquire() is None


@pytest.mark.usefixtures("quick")
def test_an_ended_lease_is_taken_by_another(place: Place) -> None:
    one, other = place.lease(0), place.lease(1)
    held = one.acquire()
    assert held is not None
    until = time.monotonic() + 240
    while (taken := other.acquire()) is None:
        assert time.monotonic() < until
    assert taken.token == held.token + 1
    assert held.left(time.monotonic()) == 0.0, "the old holder knew before that it had ended"
    assert one.renew(held) is None


def test_those_who_are_here_with_the_one_that_acts_first(place: Place) -> None:
    one, other = place.lease(0), place.lease(1)
    one.say_here()
    other.say_here()
    assert set(one.coordinators()) == {"here:0", "here:1"}
    assert other.acquire() is not None
    one.say_here()
    assert one.coordinators() == other.coordinators() == ("here:1", "here:0")


@pytest.mark.parametrize(("key", "certificate"), [(Identity.from_seed(bytes(32)), CERTIFICATE), (IDENTITY, bytes(32))])
def test_a_database_of_others_is_refused(place: Place, key: Identity, certificate: bytes) -> None:
    place.lease(0)
    with pytest.raises(OperatorError, match=r"copy identity.key, tls.key and tls.crt"):
        place.lease(1, key, certificate)


def test_a_stalled_holder_writes_nothing(place: Place) -> None:
    """It had the lease, and a record to write; meanwhile another took the lease, and wrote."""
    one, other = place.lease(0), place.lease(1)
    settings = config(min_peers=2, steps=3)
    genesis = log_pb2.Genesis(
        format_version=FORMAT_VERSION, config_json=settings.canonical_json(),
        coordinator_public_key=IDENTITY.public_key, nonce=bytes(16),
    )  # fmt: skip
    run_id = run_id_of(genesis)
    swarm = Swarm(settings, 2)
    swarm.finish()
    records = [r for r in swarm.journal if isinstance(r, TickOpened)]
    held = one.acquire()
    old = place.journal()
    stalled = old.fenced(held.token)
    stalled.create_run(run_id, genesis)
    stalled.append(run_id, records[0])
    one.release(held)
    taken = other.acquire()
    acting = place.journal().fenced(taken.token)
    with pytest.raises(FencedError):
        stalled.append(run_id, records[1])
    with pytest.raises(FencedError):
        stalled.create_run(bytes(32), genesis)
    acting.append(run_id, records[1])
    assert list(old.records(run_id)) == records[:2]
    assert [r for r, _ in old.runs()] == [run_id]
    with pytest.raises(JournalError):
        acting.create_run(run_id, genesis)


def test_a_write_holds_no_lock_when_it_is_done(place: Place) -> None:
    """A coordinator that is stopped right after a write must not keep the lease's row."""
    one, other = place.lease(0), place.lease(1)
    held = one.acquire()
    journal = place.journal().fenced(held.token)
    with journal._writing() as connection:  # stopped in the middle of what it thinks is a transaction
        connection.execute(sa.text("SELECT token FROM lease FOR SHARE"))
        one.release(held)
        assert other.acquire() is not None


def test_a_stalled_holder_gives_no_ticket_away(place: Place) -> None:
    """The one place of a ticket was given by the coordinator that acts; the one that was stalled cannot give it again."""
    one, other = place.lease(0), place.lease(1)
    run_id, ticket = bytes([3]) * 32, Ticket(b"t" * 16, 5, 1, "späß")
    held = one.acquire()
    old = place.journal()
    stalled = old.fenced(held.token)
    stalled.create_run(run_id, log_pb2.Genesis(config_json="{}"))
    stalled.append(run_id, TicketMade(ticket))
    one.release(held)
    taken = other.acquire()
    acting = place.journal().fenced(taken.token)
    acting.append(run_id, TicketUsed(ticket.ticket_id, bytes([1]) * 32))
    with pytest.raises(FencedError):
        stalled.append(run_id, TicketUsed(ticket.ticket_id, bytes([2]) * 32))
    acting.append(run_id, TicketRevoked(ticket.ticket_id, with_peers=True))
    assert list(old.records(run_id)) == [
        TicketMade(ticket),
        TicketUsed(ticket.ticket_id, bytes([1]) * 32),
        TicketRevoked(ticket.ticket_id, with_peers=True),
    ]


def test_a_stalled_holder_neither_keeps_nor_drops_a_checkpoint(place: Place) -> None:
    one, other = place.lease(0), place.lease(1)
    run_id = bytes([4]) * 32
    held = one.acquire()
    old = place.journal()
    stalled = old.fenced(held.token)
    stalled.create_run(run_id, log_pb2.Genesis(config_json="{}"))
    for number in (10, 20, 30):
        stalled.keep(run_id, Checkpoint(number, bytes(32), b"of the first"))
    one.release(held)
    taken = other.acquire()
    acting = place.journal().fenced(taken.token)
    acting.keep(run_id, Checkpoint(40, bytes(32), b"of the second"))
    with pytest.raises(FencedError):
        stalled.keep(run_id, Checkpoint(35, bytes(32), b"too late"))
    with old._reading() as connection:
        numbers = connection.execute(sa.text("SELECT number FROM checkpoints ORDER BY number")).scalars().all()
    assert numbers == [30, 40]


@contextmanager
def waiting_for_a_replica(server: Postgres) -> Iterator[None]:
    """Each COMMIT waits for a replica that is gone."""
    server.obey("ALTER SYSTEM SET synchronous_standby_names = 'gone'", "SELECT pg_reload_conf()")
    try:
        yield
    finally:
        server.obey("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


def ended(name: str) -> str:
    """Ends every connection to a database."""
    return f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"


def test_a_database_that_was_read_only_for_a_while_is_written_again(server: Postgres, place: Place) -> None:
    """Connections that began meanwhile stay read-only; the coordinator kept them, and stood by for good."""
    lease, name = place.lease(0), place.url.rpartition("/")[2]
    held = lease.acquire()
    assert held is not None
    journal = place.journal().fenced(held.token)
    server.obey(f"ALTER DATABASE {name} SET default_transaction_read_only = on", ended(name))
    with pytest.raises(JournalError, match="read-only transaction"):
        journal.create_run(bytes(32), log_pb2.Genesis(config_json="{}"))
    server.obey(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    journal.create_run(bytes(32), log_pb2.Genesis(config_json="{}"))
    server.obey(ended(name))
    journal.create_run(bytes([1]) * 32, log_pb2.Genesis(config_json="{}"))  # no write fails for an idle connection


def test_a_commit_that_waits_for_ever_is_given_up(
    server: Postgres, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is written is the database's secret until the replica is back; no second one can take its place."""
    monkeypatch.setattr(database, "SILENT_SECONDS_MAX", 1.0)
    one, other = place.lease(0), place.lease(1)
    held = one.acquire()
    assert held is not None
    journal, run_id = place.journal().fenced(held.token), bytes([5]) * 32
    journal.create_run(run_id, log_pb2.Genesis(config_json="{}"))
    kept, lost = (TicketMade(Ticket(bytes([n]) * 16, 5, 1, "x")) for n in range(2))
    with waiting_for_a_replica(server):
        with pytest.raises(JournalError, match=r"was silent for 1 s: it may wait for a replica"):
            journal.append(run_id, kept)
        assert list(journal.records(run_id)) == []
        for call in (lambda: one.renew(held), other.acquire, lambda: journal.append(run_id, lost)):
            with pytest.raises(JournalError, match=r"lock timeout.*: it may wait for a replica"):
                call()
    assert one.renew(held) is not None
    assert list(journal.records(run_id)) == [kept]
    journal.append(run_id, lost)
    assert list(journal.records(run_id)) == [kept, lost]


def test_a_long_answer_is_read_to_its_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log streams for as long as its link needs: the server ended it after 7.5 s, and no coordinator acted any more."""
    monkeypatch.setattr(database, "SILENT_SECONDS_MAX", 2.0)
    slow = "SELECT repeat('x', 9000), pg_sleep(0.25) FROM generate_series(1, 10)"
    with place.journal()._reading() as connection:
        assert len(connection.exec_driver_sql(slow).all()) == 10


def test_a_log_is_read_in_pages(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "READ_ROWS", 3)
    journal, run_id = place.journal(), bytes([6]) * 32
    journal.create_run(run_id, log_pb2.Genesis(config_json="{}"))
    records = [TicketMade(Ticket(bytes([n]) * 16, 5, 1, "x")) for n in range(7)]
    journal.append(run_id, *records)
    for first in range(8):
        assert list(journal.records(run_id, first)) == records[first:]


@pytest.fixture
def pooled(server: Postgres, place: Place) -> Iterator[str]:
    """The database's URL behind PgBouncer, which has one session for all clients, one transaction at a time."""
    if shutil.which("pgbouncer") is None:
        pytest.skip("needs Debian's package pgbouncer (apt-get install pgbouncer)")
    with server.pooler(place.url) as url:
        yield url


def test_a_pooler_s_session_keeps_nothing_of_ours(pooled: str, place: Place) -> None:
    """The readers' read-only and the lease's unsafe commits became everybody's: the coordinator stood by for good."""
    direct, place.url = place.url, pooled
    lease, run_id = place.lease(0), bytes([6]) * 32
    held = lease.acquire()
    assert held is not None
    journal = place.journal().fenced(held.token)
    reader = journal.reader()
    place.opened.append(reader)
    journal.create_run(run_id, log_pb2.Genesis(config_json="{}"))
    records = [TicketMade(Ticket(bytes([n]) * 16, 5, 1, "x")) for n in range(9)]  # psycopg prepares what comes often
    for record in records:
        journal.append(run_id, record)
        lease.say_here()
        assert lease.renew(held) is not None
        assert list(reader.records(run_id))[-1:] == [record]
    with pytest.raises(JournalError, match="read-only transaction"):
        reader.append(run_id, *records)
    names = ("default_transaction_read_only", "synchronous_commit", "lock_timeout")
    with sa.create_engine(pooled, poolclass=sa.NullPool).connect() as client:
        assert [client.exec_driver_sql(f"SHOW {name}").scalar() for name in names] == ["off", "on", "0"]
    place.url = direct
    with place.journal()._reading() as connection:
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "7500ms"


def test_a_renewal_waits_for_no_replica(server: Postgres, place: Place) -> None:
    lease = place.lease(0)
    held = lease.acquire()
    assert held is not None
    with waiting_for_a_replica(server):
        lease.say_here()
        assert lease.renew(held) is not None
        assert lease.coordinators() == ("here:0",)


def test_a_full_disk_is_known_by_its_code_and_not_by_words(place: Place) -> None:
    full = "DO $$ BEGIN RAISE 'kein Speicherplatz' USING ERRCODE = 'disk_full'; END $$"
    with pytest.raises(FullDiskError, match="kein Speicherplatz"), place.journal()._writing() as connection:
        connection.exec_driver_sql(full)


def test_readers_keep_the_options_of_the_url(place: Place) -> None:
    """Theirs took the place of the operator's: a reader in another schema found no table."""
    with place.journal()._writing() as connection:
        connection.exec_driver_sql("CREATE SCHEMA other")
    place.url += "?options=-csearch_path%3Dother"
    journal = place.journal()
    journal.create_run(bytes(32), log_pb2.Genesis(config_json="{}"))
    reader = journal.reader()
    place.opened.append(reader)
    assert reader.runs() == journal.runs() != []
    with pytest.raises(JournalError, match="read-only transaction"):
        reader.create_run(bytes([1]) * 32, log_pb2.Genesis(config_json="{}"))


class Told:
    """A hub and a log that keep what they are told."""

    def __init__(self) -> None:
        self.why: list[str] = []
        self.runs = ()
        self.stands_by = ""

    def act(self, *_: object) -> None: ...

    def stand_by(self, why: str) -> None:
        self.why.append(why)


async def test_the_reason_of_the_database_is_told(server: Postgres, place: Place) -> None:
    """It was "did not answer in time" for a database that refused at once."""
    hub, acts = Told(), asyncio.Event()
    lease, journal, name = place.lease(0), place.journal(), place.url.rpartition("/")[2]

    async def show(now: bool) -> None:
        (acts.set if now else acts.clear)()

    elected = election.Election(lease, journal, hub, show, lambda _: None)  # type: ignore[arg-type]
    running = asyncio.ensure_future(elected.run())
    try:
        await eventually(lambda: acts.is_set() or running.done())
        server.obey(f"ALTER DATABASE {name} SET default_transaction_read_only = on", ended(name))
        await eventually(lambda: not acts.is_set() or running.done())
        assert "cannot execute UPDATE in a read-only transaction" in hub.why[0]
        server.obey(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await eventually(lambda: acts.is_set() or running.done())
        assert acts.is_set()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await elected.close()


async def test_a_home_that_takes_no_note_of_other_coordinators_costs_no_lease(place: Place, tmp_path: Path) -> None:
    """Its disk was full and the database elsewhere: the coordinator ended with a traceback when another one came."""
    hub, path, calls = Told(), tmp_path / "serving.json", list[int]()
    in_the_way = tmp_path / ".serving.json.new"
    in_the_way.mkdir()

    async def show(now: bool) -> None: ...

    def met(here: tuple[str, ...]) -> None:
        calls.append(len(here))
        write_bytes(path, ",".join(here).encode())

    elected = election.Election(place.lease(0), place.journal(), hub, show, met)  # type: ignore[arg-type]
    running = asyncio.ensure_future(elected.run())
    try:
        with structlog.testing.capture_logs() as said:
            await eventually(lambda: len(calls) > 2 or running.done())
            assert [line["log_level"] for line in said].count("warning") == 1
        in_the_way.rmdir()
        await eventually(lambda: path.exists() or running.done())
        assert path.read_text() == "here:0"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await elected.close()
