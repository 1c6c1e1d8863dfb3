"""The journal: the records that must survive a crash, in order, in a database (SQLite by default, any SQLAlchemy URL).

A record is durable when `append` returns, and is never changed. Records are deleted only with their whole run (`delete_run`,
`purge`), whose id is kept for ever. Entries are kept as the signed envelopes that
travel. So a peer gets the same bits after a restart as before. If several coordinators share a database, only the one with
the newest token of the lease can write (`fenced`). Checkpoints have a table of their own, and hold nothing that does not
follow from the records. Only the newest two of each run are kept. ADRs 2 and 44.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from coordinator.clock.effects import EntryCommitted, Record, SnapshotAgreed, SnapshotFact, Withdrawn
from coordinator.store import record_codec
from coordinator.store.database import connected, is_full, making_tables, of_file, parsed, reason
from coordinator.store.record_codec import ENTRY, SNAPSHOT, WITHDRAWN, Context
from protos.envelope import parse
from protos.errors import Refusal, SwarmentumError
from protos.identity import Identity
from protos.log import SignedEntry, entry_hash
from protos.v1 import envelope_pb2, log_pb2

_METADATA = sa.MetaData()
_RUNS = sa.Table(
    "runs",
    _METADATA,
    sa.Column("run_id", sa.LargeBinary(32), primary_key=True),
    sa.Column("genesis", sa.LargeBinary, nullable=False),
)
_RECORDS = sa.Table(
    "records",
    _METADATA,
    sa.Column("run_id", sa.LargeBinary(32), sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("records_by_step", "run_id", "kind", "step"),
)
_CHECKPOINTS = sa.Table(
    "checkpoints",
    _METADATA,
    sa.Column("run_id", sa.LargeBinary(32), sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("head_hash", sa.LargeBinary(32), nullable=False),
    sa.Column("sha256", sa.LargeBinary(32), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
_LINES = sa.Table(
    "lines",
    _METADATA,
    sa.Column("run_id", sa.LargeBinary(32), sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
"""The line before each full run: the row with the largest number counts."""
_DELETED = sa.Table("deleted_runs", _METADATA, sa.Column("run_id", sa.LargeBinary(32), primary_key=True))
"""The ids of the runs that the operator deleted. Their rows in the other tables may still be there for a while."""
PURGED_ROWS = 1000
"""Records that one transaction deletes: other runs write between two of them."""
READ_ROWS = 1000
"""Records that one statement reads: a driver holds all of them in memory, and a server sorts them all before the first."""
CHECKPOINTS_KEPT = 2
"""The newest, and one more in case that the newest does not fit."""
VERIFIED_LAST = 8
"""The number of newest entries that are verified when they are read: each holds the hash of all before it."""
LEASE = sa.Table(
    "lease",
    sa.MetaData(),
    sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
    sa.Column("address", sa.String(256), nullable=False),
)
"""The right to write, if several coordinators share the database; coordinator/serving/election.py makes the table."""


class JournalError(SwarmentumError):
    """The database refused: disk full, read-only, gone. Nothing was announced that is not in it; whether the last record
    is in it, only the database knows."""


class FullDiskError(JournalError):
    """The disk of the database is full."""


class FencedError(JournalError):
    """Another coordinator acts on this database since: nothing was written, and nothing more may be."""


@dataclass(frozen=True)
class Checkpoint:
    """A run as its first `number` records made it; the last of them is the entry whose hash is `head_hash`."""

    number: int
    head_hash: bytes
    body: bytes


class Journal:
    """All runs of one coordinator. Calls block: the runtime makes them from a worker thread."""

    def __init__(self, url: str | sa.URL, identity: Identity) -> None:
        self._identity = identity
        self._numbers: dict[bytes, int] = {}
        self._token: int | None = None
        self._url = parsed(url)
        self._engine = connected(self._url)
        with making_tables(self._engine, _METADATA):
            pass

    def fenced(self, token: int) -> Journal:
        """The same journal, which writes only while no newer token of the lease was given: FencedError from then on."""
        made = copy.copy(self)
        made._numbers, made._token = {}, token
        return made

    def reader(self) -> Journal:
        """The same journal over connections of its own that cannot write, so that long reads delay no write."""
        made = copy.copy(self)
        made._engine = connected(self._url, writes=False)
        return made

    @staticmethod
    def sqlite_url(home: Path) -> sa.URL:
        """URL of the default database in a home folder."""
        return of_file(home / "journal.sqlite3")

    @property
    def place(self) -> str:
        """The place of the journal, for people, without a password."""
        return self._engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Release the database."""
        self._engine.dispose()

    def create_run(self, run_id: bytes, genesis: log_pb2.Genesis) -> None:
        """Record a new run; JournalError if it is there already."""
        self._insert(_RUNS, {"run_id": run_id, "genesis": genesis.SerializeToString(deterministic=True)})

    def runs(self) -> list[tuple[bytes, bytes]]:
        """Every run's id with the bytes of its genesis: whether they are one is for the reader. Not those that are deleted."""
        kept = sa.select(_RUNS.c.run_id, _RUNS.c.genesis).where(_RUNS.c.run_id.not_in(sa.select(_DELETED.c.run_id)))
        with self._reading() as connection:
            rows = connection.execute(kept.order_by(_RUNS.c.run_id)).all()
        return [(row.run_id, row.genesis) for row in rows]

    def deleted(self) -> list[bytes]:
        """The ids of all runs that were ever deleted."""
        with self._reading() as connection:
            return list(connection.execute(sa.select(_DELETED.c.run_id)).scalars())

    def delete_run(self, run_id: bytes) -> None:
        """The run is gone, durably, and its id is taken for ever. `purge` then deletes its rows."""
        self._insert(_DELETED, {"run_id": run_id})

    def purge(self) -> bool:
        """Delete some rows of deleted runs. Whether any are left; if this fails or the program ends, it may be called again."""
        gone, its = sa.select(_DELETED.c.run_id), _RECORDS.c.run_id == _DELETED.c.run_id
        first = sa.select(sa.func.min(_RECORDS.c.number)).where(its).scalar_subquery()
        with self._reading() as connection:
            due = sa.select(_DELETED.c.run_id, first.label("first")).where(sa.exists().where(its))
            row = connection.execute(due.limit(1)).first()
        if row is not None:
            self._drop(_RECORDS, _RECORDS.c.run_id == row.run_id, _RECORDS.c.number < row.first + PURGED_ROWS)
            return True
        for table in (_CHECKPOINTS, _LINES, _RUNS):
            self._drop(table, table.c.run_id.in_(gone))
        return False

    def shrink(self) -> bool:
        """Give the disk the room of deleted runs, if that is half of a SQLite file or more. Nobody else may use the file."""
        if self._engine.dialect.name != "sqlite":
            return False
        with failing_as_journal_error(self._engine.connect, "made smaller") as connection:
            outside = connection.execution_options(isolation_level="AUTOCOMMIT")
            free, pages = (
                outside.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("freelist_count", "page_count")
            )
            if 2 * free < pages:
                return False
            outside.exec_driver_sql("VACUUM")
            return True

    def append(self, run_id: bytes, *records: Record) -> None:
        """Write these records, in order; durable on return. One that fails on a server may leave those before it."""
        number = self._next_number(run_id)
        # A failed commit may have written after all: only the database knows, so it is asked again the next time.
        self._numbers.pop(run_id, None)
        rows, context = [], Context(run_id, self._identity)
        for at, record in enumerate(records, number):
            kind, step, body = record_codec.encode(context, record)
            rows.append({"run_id": run_id, "number": at, "kind": kind, "step": step, "body": body})
        self._insert(_RECORDS, *rows)
        self._numbers[run_id] = number + len(rows)

    def _insert(self, table: sa.Table, *rows: dict[str, Any]) -> None:
        """One transaction: the rows are written, and the token is still the newest, or neither.

        FOR SHARE lets no other coordinator take the lease between the look at the token and the commit.
        """
        with self._writing() as connection:
            for row in rows:
                if self._token is None:
                    connection.execute(table.insert().values(row))
                    continue
                values = sa.select(*(sa.literal(value, table.c[name].type) for name, value in row.items()))
                held = values.select_from(LEASE).where(LEASE.c.token == self._token).with_for_update(read=True)
                insert = table.insert().from_select(list(row), held)
                if connection.execute(insert, execution_options={"preserve_rowcount": True}).rowcount != 1:
                    raise FencedError(f"another coordinator acts: the lease has a newer token than {self._token}")

    def records(self, run_id: bytes, first: int = 0) -> Iterator[Record]:
        """Every record of a run from the number `first` on, in order; numbers have no gaps.

        The coordinator's own signatures are verified on the newest entries only.
        """
        newest = sa.select(_RECORDS.c.number).where(_RECORDS.c.run_id == run_id, _RECORDS.c.kind == ENTRY)
        newest = newest.order_by(_RECORDS.c.step.desc()).limit(VERIFIED_LAST)
        columns = _RECORDS.c.number, _RECORDS.c.kind, _RECORDS.c.step, _RECORDS.c.body
        page = sa.select(*columns).where(_RECORDS.c.run_id == run_id).order_by(_RECORDS.c.number).limit(READ_ROWS)
        with self._reading() as connection:
            verified = min(connection.execute(newest).scalars(), default=0)
            while rows := connection.execute(page.where(_RECORDS.c.number >= first)).all():
                for row in rows:
                    context = Context(run_id, self._identity, verified=row.number >= verified)
                    yield record_codec.decode(context, row.kind, row.step, row.body)
                first = rows[-1].number + 1

    def keep(self, run_id: bytes, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, instead of the oldest. Checkpoints of records that the journal has lost since are deleted,
        too."""
        number, body = checkpoint.number, checkpoint.body
        self._drop(_CHECKPOINTS, _CHECKPOINTS.c.run_id == run_id, _CHECKPOINTS.c.number >= number)
        digest = hashlib.sha256(body).digest()
        row = {"run_id": run_id, "number": number, "head_hash": checkpoint.head_hash, "sha256": digest, "body": body}
        self._insert(_CHECKPOINTS, row)
        newest = sa.select(_CHECKPOINTS.c.number).where(_CHECKPOINTS.c.run_id == run_id)
        with self._reading() as connection:
            numbers = connection.execute(newest.order_by(_CHECKPOINTS.c.number.desc())).scalars().all()
        if len(numbers) > CHECKPOINTS_KEPT:
            oldest = numbers[CHECKPOINTS_KEPT - 1]
            self._drop(_CHECKPOINTS, _CHECKPOINTS.c.run_id == run_id, _CHECKPOINTS.c.number < oldest)

    def keep_line(self, run_id: bytes, body: bytes) -> None:
        """Write the line before a run instead of the one before; no bytes: there is none. The new row comes first, so a crash
        loses neither."""
        query = sa.select(sa.func.max(_LINES.c.number)).where(_LINES.c.run_id == run_id)
        with self._reading() as connection:
            number = (connection.execute(query).scalar() or 0) + 1
        if body:
            self._insert(_LINES, {"run_id": run_id, "number": number, "body": body})
        self._drop(_LINES, _LINES.c.run_id == run_id, _LINES.c.number < number)

    def lines(self) -> dict[bytes, bytes]:
        """The lines before full runs, by run id."""
        with self._reading() as connection:
            rows = connection.execute(sa.select(_LINES.c.run_id, _LINES.c.body).order_by(_LINES.c.number)).all()
        return {row.run_id: row.body for row in rows}

    def _drop(self, table: sa.Table, *which: sa.ColumnElement[bool]) -> None:
        statement = sa.delete(table).where(*which)
        if self._token is not None:
            statement = statement.where(sa.exists().where(LEASE.c.token == self._token))
        with self._writing() as connection:
            connection.execute(statement)

    def checkpoints(self, run_id: bytes) -> tuple[list[Checkpoint], list[str]]:
        """The checkpoints that fit the records, newest first, and the reasons why the others do not."""
        query = sa.select(_CHECKPOINTS).where(_CHECKPOINTS.c.run_id == run_id)
        found, unfit = [], []
        with self._reading() as connection:
            for row in connection.execute(query.order_by(_CHECKPOINTS.c.number.desc())).all():
                entry = sa.select(_RECORDS.c.body).where(
                    _RECORDS.c.run_id == run_id, _RECORDS.c.number == row.number - 1, _RECORDS.c.kind == ENTRY
                )
                body = connection.execute(entry).scalar()
                if hashlib.sha256(row.body).digest() != row.sha256:
                    unfit.append(f"the one of {row.number} records is damaged")
                elif body is None or _hash_of(body) != row.head_hash:
                    unfit.append(f"the one of {row.number} records names an entry that the journal does not have")
                else:
                    found.append(Checkpoint(row.number, row.head_hash, row.body))
        return found, unfit

    def entries(self, run_id: bytes, from_step: int, count: int) -> list[bytes]:
        """Signed envelopes of at most `count` entries from `from_step` on."""
        query = sa.select(_RECORDS.c.body).where(
            _RECORDS.c.run_id == run_id, _RECORDS.c.kind == ENTRY, _RECORDS.c.step >= from_step
        )
        with self._reading() as connection:
            return [row.body for row in connection.execute(query.order_by(_RECORDS.c.step).limit(count))]

    def agreed_snapshots(self, run_id: bytes) -> list[SnapshotFact]:
        """Every snapshot that the run agreed on and that nobody withdrew, by step."""
        query = sa.select(_RECORDS.c.kind, _RECORDS.c.step, _RECORDS.c.body).where(
            _RECORDS.c.run_id == run_id, _RECORDS.c.kind.in_((SNAPSHOT, WITHDRAWN))
        )
        found: dict[int, SnapshotFact] = {}
        context = Context(run_id, self._identity)
        with self._reading() as connection:
            for row in connection.execute(query.order_by(_RECORDS.c.number)):
                match record_codec.decode(context, row.kind, row.step, row.body):
                    case SnapshotAgreed(snapshot=fact):
                        found[fact.step] = fact
                    case Withdrawn(from_step=first):
                        found = {step: fact for step, fact in found.items() if step < first}
        return [found[step] for step in sorted(found)]

    def _next_number(self, run_id: bytes) -> int:
        if run_id not in self._numbers:
            query = sa.select(sa.func.max(_RECORDS.c.number)).where(_RECORDS.c.run_id == run_id)
            with self._reading() as connection:
                last = connection.execute(query).scalar()
            self._numbers[run_id] = 0 if last is None else last + 1
        return self._numbers[run_id]

    def _writing(self) -> AbstractContextManager[sa.Connection]:
        return failing_as_journal_error(self._engine.begin, "written")

    def _reading(self) -> AbstractContextManager[sa.Connection]:
        return failing_as_journal_error(self._engine.connect, "read")

    def seal(self, run_id: bytes, record: EntryCommitted) -> SignedEntry:
        """The entry, signed by this coordinator. The same record always gives the same bytes."""
        return record_codec.seal(Context(run_id, self._identity), record)


def _hash_of(envelope: bytes) -> bytes:
    """The hash of the entry in it; empty if there is none."""
    try:
        return entry_hash(parse(envelope_pb2.SignedEnvelope, envelope).body)
    except Refusal:
        return b""


@contextmanager
def failing_as_journal_error(
    begin: Callable[[], AbstractContextManager[sa.Connection]], what: str
) -> Iterator[sa.Connection]:
    """A connection or transaction whose failure, at any point of it, is a JournalError."""
    try:
        with begin() as connection:
            yield connection
    except SQLAlchemyError as error:
        kind = FullDiskError if is_full(error) else JournalError
        raise kind(f"the journal cannot be {what}: {reason(error)}") from error
