"""A fact that takes a while to ask for, such as one of another process: asked in the background, told from memory.

The control door answers at once, so a coordinator that is away, or a p2pd that hangs, must not make an owner wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from protos.errors import SwarmentumError

FIRST_SECONDS_MAX = 0.5
T = TypeVar("T")


class CachedAnswer(Generic[T]):
    """The last answer of `ask`; at most one thread asks at a time, and at most once in `seconds`."""

    def __init__(self, ask: Callable[[], T], seconds: float) -> None:
        self._ask, self._seconds = ask, seconds
        self._lock = threading.Lock()
        self._value: T | None = None
        self._next = 0.0
        self._thread: threading.Thread | None = None

    def get(self) -> T | None:
        """The last answer; None before the first one. Waits a moment for a first answer, and never for a later one."""
        with self._lock:
            due = time.monotonic() >= self._next and (self._thread is None or not self._thread.is_alive())
            if due:
                self._next = time.monotonic() + self._seconds
                self._thread = threading.Thread(target=self._learn, name="owner's fact", daemon=True)
                self._thread.start()
            thread = self._thread
        if self._value is None and due and thread is not None:
            thread.join(FIRST_SECONDS_MAX)
        return self._value

    def _learn(self) -> None:
        try:
            self._value = self._ask()
        except (
            SwarmentumError,
            RuntimeError,
        ):  # not reached, or the network's loop is at its end: the last answer stays
            return
