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


def bound(engine: sa.Engine, silent_seconds: float, *settings: str) -> None:
    """Every connection of the engine is bounded, and has these settings of the server."""
    after_ms = round(silent_seconds * LOCK_SHARE * 1000)

    def connect(_: object, __: object, words: Any, options: dict[str, Any]) -> object:
        made = BoundedConnection.connect(*words, autocommit=True, **options)
        made.silent_seconds = silent_seconds
        for setting in (f"lock_timeout = {after_ms}", *settings):
            made.execute(f"SET {setting}")
        return made

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "handle_error", _anew)


def _anew(context: sa.engine.ExceptionContext) -> None:
    """No connection of before is used again: a server that became read-only stays so for the connections that it has."""
    context.is_disconnect = True
