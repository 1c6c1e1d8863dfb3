"""The database of a coordinator: one file in its home (SQLite), or a server that several share (PostgreSQL).

Every statement on a server is a transaction of its own, so that a coordinator that stalls holds no lock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from protos.errors import OperatorError

# A short timeout gives up a server that does not answer, so that its coordinator sees in time that the lease has ended. The
# values are seconds; tcp_user_timeout is ms. The options are libpq's, which ignores options that the platform does not have.
_POSTGRES_CONNECT = {
    "connect_timeout": 2,
    "tcp_user_timeout": 2_000,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "application_name": "swarmentum-coordinator",
    "prepare_threshold": None,  # psycopg's: behind a pooler the next session does not have what this one prepared
}
SILENT_SECONDS_MAX = 10.0
MAY_WAIT = "it may wait for a replica (synchronous_standby_names), for a lock, or for its disk"
_DISK_FULL, _WAITED = "53100", ("55P03", "57014")  # 57014: of a statement_timeout of the operator's
# One number for all of swarmentum: two coordinators do not make tables at once ("swarment" as a number).
_TABLES_LOCK = int.from_bytes(b"swarment", "big")


def parsed(url: str | sa.URL) -> sa.URL:
    """A SQLAlchemy URL, PostgreSQL always over psycopg 3; OperatorError if it is none."""
    try:
        found = sa.make_url(url)
    except SQLAlchemyError as error:
        raise OperatorError(
            f"`database` is not a SQLAlchemy URL, e.g. postgresql+psycopg://host/name: {reason(error)}"
        ) from error
    return (
        found.set(drivername="postgresql+psycopg") if found.get_backend_name() in ("postgresql", "postgres") else found
    )


def of_file(path: Path) -> sa.URL:
    """The URL of a SQLite file. As text, a `?` in the path would cut the name, and the file would lie elsewhere.

    Raises OperatorError for a file that an earlier version put there.
    """
    cut = Path(str(path).partition("?")[0])
    if cut != path and not path.exists() and cut.is_file():
        raise OperatorError(
            f"an earlier version put this journal at {str(cut)!r}: stop it, and move that file to {path}"
        )
    return sa.URL.create("sqlite", database=str(path))


def reason(error: SQLAlchemyError) -> str:
    """What the database says, on one line."""
    found = getattr(error, "orig", None)
    text = " ".join(str(found or error).split())
    return f"{text}: {MAY_WAIT}" if getattr(found, "sqlstate", "") in _WAITED else text


def is_full(error: SQLAlchemyError) -> bool:
    """Whether the disk of the database is full. By its code: its words are in the server's language."""
    found = getattr(error, "orig", None)
    return getattr(found, "sqlstate", "") == _DISK_FULL or getattr(found, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL


def shared(url: sa.URL) -> bool:
    """Whether several coordinators may share this database: there is a lease in it."""
    return url.get_backend_name() == "postgresql"


def hidden(url: sa.URL) -> str:
    """For messages: without the password."""
    return url.render_as_string(hide_password=True)


def connected(url: sa.URL, *, writes: bool = True, silent_seconds: float | None = None) -> sa.Engine:
    """An engine (connections are made when they are needed); OperatorError if its driver is not installed.

    Without `writes`, the database itself refuses to change anything for it. A server that is silent for too long is given up.
    """
    try:
        if shared(url):
            from coordinator.store.postgres import bound

            # A server, or what is before it, ends idle connections: a ping finds that out before a write fails for it.
            return bound(url, silent_seconds or SILENT_SECONDS_MAX, _POSTGRES_CONNECT, writes=writes)
        engine = sa.create_engine(url)
    except ImportError as error:
        hint = "pip install '.[postgres]' in the folder of the repository" if shared(url) else "install it"
        raise OperatorError(f"the journal {hidden(url)!r} cannot be opened: {error}; {hint}") from error
    except SQLAlchemyError as error:
        raise OperatorError(
            f"the journal {hidden(url)!r} cannot be opened: {reason(error)}; check `database`"
        ) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _durable_sqlite if writes else _read_only_sqlite)
    return engine


@contextmanager
def making_tables(engine: sa.Engine, metadata: sa.MetaData) -> Iterator[sa.Connection]:
    """One transaction in which the tables are there, made by one coordinator at a time; OperatorError if that fails."""
    try:
        with engine.connect() as connection:
            if shared(engine.url):
                connection.execution_options(isolation_level="READ COMMITTED")
            with connection.begin():
                if shared(engine.url):
                    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _TABLES_LOCK})
                metadata.create_all(connection)
                yield connection
    except SQLAlchemyError as error:
        raise OperatorError(
            f"the journal {hidden(engine.url)!r} cannot be opened: {reason(error)}; check `database` and the disk"
        ) from error


def _durable_sqlite(connection: object, _: object) -> None:
    """WAL so that readers never wait; FULL so that a commit survives the machine, not only the process."""
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _read_only_sqlite(connection: object, _: object) -> None:
    """The file is in WAL mode already: a reader neither waits for the writer nor holds it up."""
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA query_only=ON")
    cursor.close()
