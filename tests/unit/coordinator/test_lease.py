"""The lease and the fence, against a real PostgreSQL server; the arithmetic of a lease without one."""

import time
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from coordinator.clock.effects import TicketMade, TicketRevoked, TicketUsed, TickOpened
from coordinator.serving import election
from coordinator.serving.election import LEASE_SECONDS, HeldLease, Lease, held_since
from coordinator.store import database
from coordinator.store.journal import Checkpoint, FencedError, Journal, JournalError
from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import Ticket
from protos.log import FORMAT_VERSION, run_id_of
from protos.v1 import log_pb2
from tests.system.postgres import Postgres, server_or_skip
from tests.unit.coordinator.driver import Swarm, config

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
