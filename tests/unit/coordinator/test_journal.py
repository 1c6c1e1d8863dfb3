"""The journal on a real SQLite file: order, restart, the same bytes for ever, and a database that fails."""

import os
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.clock import machine
from coordinator.clock.effects import EntryCommitted, LayoutFixed, PeerLeft, SnapshotAgreed, TickOpened
from coordinator.config import settings
from coordinator.store import backup, database
from coordinator.store.journal import Journal, JournalError
from protos.errors import OperatorError
from protos.identity import Identity
from protos.log import Chain, run_id_of
from protos.v1 import log_pb2
from tests.unit.coordinator.driver import RUN_ID, Swarm, config, key

IDENTITY = Identity.from_seed(bytes(32))
GENESIS = log_pb2.Genesis(format_version=1, config_json="{}", coordinator_public_key=IDENTITY.public_key)


def opened(home: Path) -> Journal:
    return Journal(Journal.sqlite_url(home), IDENTITY)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = opened(tmp_path)
    made.create_run(RUN_ID, GENESIS)
    return made


def lived() -> Swarm:
    """A run whose journal has every kind of record."""
    swarm = Swarm(config(min_peers=2, steps=5, snapshot_every=2, strict=True), 3)
    swarm.play(lambda: swarm.run.head_step == 2)
    swarm.leave(swarm.peers[2])
    swarm.finish()
    kinds = {type(record) for record in swarm.journal}
    assert kinds == {LayoutFixed, TickOpened, EntryCommitted, PeerLeft, SnapshotAgreed}
    return swarm


def test_records_come_back_in_order_after_a_restart(journal: Journal, tmp_path: Path) -> None:
    swarm = lived()
    for record in swarm.journal:
        journal.append(RUN_ID, record)
    envelopes = journal.entries(RUN_ID, 1, 99)
    journal.close()
    again = opened(tmp_path)
    assert list(again.records(RUN_ID)) == swarm.journal
    assert again.entries(RUN_ID, 1, 99) == envelopes, "a peer gets the same bytes as before"
    assert again.runs() == [(RUN_ID, GENESIS.SerializeToString(deterministic=True))]
    restored = machine.restore(machine.new_run(RUN_ID, swarm.settings), again.records(RUN_ID), 0)
    assert restored.head_hash == swarm.run.head_hash
    chain = Chain(RUN_ID, IDENTITY.public_key)
    for envelope in envelopes:
        chain.extend(envelope)
    assert (chain.step, chain.head) == (5, swarm.run.head_hash)
    again.close()


def test_pages_of_entries(journal: Journal) -> None:
    for record in lived().journal:
        journal.append(RUN_ID, record)
    every = journal.entries(RUN_ID, 1, 99)
    assert len(every) == 5
    assert journal.entries(RUN_ID, 2, 2) == every[1:3]
    assert journal.entries(RUN_ID, 6, 9) == []
    assert journal.entries(bytes(32), 1, 9) == []
    journal.close()


def test_runs_are_apart_and_a_run_is_created_once(journal: Journal) -> None:
    other = run_id_of(GENESIS)
    journal.create_run(other, GENESIS)
    with pytest.raises(JournalError):
        journal.create_run(other, GENESIS)
    journal.append(RUN_ID, LayoutFixed(key(0), 1))
    journal.append(other, LayoutFixed(key(1), 2))
    journal.append(RUN_ID, PeerLeft(1, key(0)))
    assert list(journal.records(RUN_ID)) == [LayoutFixed(key(0), 1), PeerLeft(1, key(0))]
    assert list(journal.records(other)) == [LayoutFixed(key(1), 2)]
    journal.close()


def test_append_that_fails_leaves_nothing_and_the_next_one_works(journal: Journal) -> None:
    with journal._engine.begin() as connection:
        connection.execute(
            sa.text("CREATE TRIGGER full BEFORE INSERT ON records BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        )
    for _ in range(2):
        with pytest.raises(JournalError, match="disk full"):
            journal.append(RUN_ID, LayoutFixed(key(0), 1))
    with journal._engine.begin() as connection:
        connection.execute(sa.text("DROP TRIGGER full"))
    journal.append(RUN_ID, LayoutFixed(key(0), 1))
    assert list(journal.records(RUN_ID)) == [LayoutFixed(key(0), 1)]
    journal.close()


def test_commit_that_failed_but_was_written(journal: Journal) -> None:
    """The worst answer of a disk: an error, and the record is there. The next append must not collide with it."""

    @sa.event.listens_for(journal._engine, "commit")
    def commit(connection: sa.Connection) -> None:
        connection.connection.dbapi_connection.commit()  # type: ignore[union-attr]
        raise sa.exc.OperationalError("commit", {}, OSError("I/O error"))

    with pytest.raises(JournalError, match="I/O error"):
        journal.append(RUN_ID, LayoutFixed(key(0), 1))
    sa.event.remove(journal._engine, "commit", commit)
    journal.append(RUN_ID, PeerLeft(1, key(0)))
    assert list(journal.records(RUN_ID)) == [LayoutFixed(key(0), 1), PeerLeft(1, key(0))]
    journal.close()


def test_reading_that_fails_is_named(journal: Journal) -> None:
    with journal._engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE records"))
    for read in (
        lambda: list(journal.records(RUN_ID)),
        lambda: journal.entries(RUN_ID, 1, 1),
        lambda: journal.append(RUN_ID, PeerLeft(1, key(0))),
    ):
        with pytest.raises(JournalError, match="no such table"):
            read()
    journal.close()


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="cannot be opened"):
        Journal(f"sqlite:///{tmp_path}", IDENTITY)
    with pytest.raises(OperatorError, match="cannot be opened"):
        Journal("nonsense://x", IDENTITY)


def test_sqlite_is_durable(journal: Journal) -> None:
    with journal._engine.connect() as connection:
        assert connection.execute(sa.text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(sa.text("PRAGMA synchronous")).scalar() == 2
    journal.close()


@pytest.mark.parametrize("name", ["home ?#%41 é", "a?mode=ro", "new\nline", ":memory:"])
def test_the_journal_lies_in_its_home_whatever_the_home_is_called(tmp_path: Path, name: str) -> None:
    """A `?` cut the URL: two homes shared one file outside of both, and a backup did not find it."""
    home = tmp_path / name
    home.mkdir()
    made = opened(home)
    made.create_run(RUN_ID, GENESIS)
    assert (home / "journal.sqlite3").stat().st_size > 0
    assert [path for path in tmp_path.iterdir() if path != home] == []
    (home / "identity.key").write_bytes(IDENTITY.to_libp2p())
    for key_file in ("tls.key", "tls.crt"):
        (home / key_file).write_text("a key")
    about = backup.make(home, tmp_path / "out?side.tar")
    assert about.runs == backup.make(home, tmp_path / "plain.tar").runs
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "out?side.tar", "plain.tar"])
    made.close()


def test_a_journal_that_an_earlier_version_put_elsewhere_is_named(tmp_path: Path) -> None:
    home = tmp_path / "old?1"
    home.mkdir()
    (tmp_path / "old").write_bytes(b"SQLite format 3")
    with pytest.raises(OperatorError, match=r"an earlier version put this journal at .*old.*move that file to"):
        opened(home)


def test_a_home_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"home: .* is no path in UTF-8"):
        settings(home=Path(os.fsdecode(b"/tmp/h\xff")))


@pytest.mark.parametrize("driver", ["", "+psycopg", "+psycopg2", "+asyncpg"])
def test_postgresql_is_reached_over_one_driver_whatever_the_url_says(driver: str) -> None:
    """Another program's URL: over psycopg2 no wait would have an end, and the advice was to install what was installed."""
    url = database.parsed(f"postgresql{driver}://swarm@db.example/swarm?sslmode=require")
    assert str(url) == "postgresql+psycopg://swarm@db.example/swarm?sslmode=require"
