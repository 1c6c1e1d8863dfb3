"""Connections to PostgreSQL whose every wait has an end, and which are made anew after an error. psycopg is an extra.

A COMMIT may wait for ever, for a replica that is gone, and no setting of the server ends that wait as a failure. So the
client hangs up. Only the database knows then whether the write is in it, and the journal is read again.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from sqlalchemy import event

from coordinator.store.database import MAY_WAIT

LOCK_SHARE = 0.75
"""The server gives up a lock after this part of the time, so that none waits on for a client that has hung up. A whole
statement may last: a log streams for as long as its link needs."""
T = TypeVar("T")


class BoundedConnection(psycopg.Connection[Any]):
    """A server that is silent for `silent_seconds` loses the connection."""

    silent_seconds = 0.0

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        """As psycopg's. OperationalError for a silent server."""
        try:
            return super().wait(self._heard(gen), *args, **kwargs)
        except TimeoutError:
            self.close()
            text = f"the database was silent for {self.silent_seconds:g} s: {MAY_WAIT}"
            raise psycopg.OperationalError(text) from None

    def _heard(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        heard = time.monotonic()
        try:
            wants = next(gen)
            while True:
                ready = yield wants
                if ready:
                    heard = time.monotonic()
                wants = gen.send(ready)
                if self.silent_seconds and time.monotonic() - heard > self.silent_seconds:
                    raise TimeoutError
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def bound(url: sa.URL, silent_seconds: float, words: dict[str, Any], *, writes: bool) -> sa.Engine:
    """An engine whose every connection is bounded. `words`: of each connection.

    The session behind a connection may be a pooler's (PgBouncer), which gives it to other clients after each transaction. So it
    keeps nothing: `writes` is said with each transaction, and the limit for locks only to a session that is this connection's.
    """
    after_ms = round(silent_seconds * LOCK_SHARE * 1000)
    level: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if writes else {}
    engine = sa.create_engine(url, pool_pre_ping=True, connect_args=words, **level)

    def connect(_: object, __: object, args: Any, options: dict[str, Any]) -> object:
        made = BoundedConnection.connect(*args, autocommit=True, **options)
        made.silent_seconds = silent_seconds
        own = "SELECT set_config('lock_timeout', %s, false) WHERE pg_backend_pid() = %s"
        made.execute(own, (str(after_ms), made.info.backend_pid))
        made.autocommit, made.read_only = writes, None if writes else True
        return made

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "handle_error", _anew)
    return engine


def _anew(context: sa.engine.ExceptionContext) -> None:
    """No connection of before is used again: a server that became read-only stays so for the connections that it has."""
    context.is_disconnect = True
