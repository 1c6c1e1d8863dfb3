"""The signals that end a peer, and its owner's wish to end it. Ends nothing itself, but for a second signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protos.signals import asked_to_stop, leave


class Stop:
    """SIGINT, SIGTERM and SIGHUP: the first asks the loop to end, a second SIGINT or SIGTERM ends the process at once.

    A closed shell sends its SIGHUP twice, so a second SIGHUP is no second request.
    """

    def __init__(self, before_leaving: Callable[[], None] = lambda: None) -> None:
        self._asked = threading.Event()
        self._nothing_to_save = False
        self._before_leaving = before_leaving

    def __call__(self) -> bool:
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep, and wake when a stop is requested."""
        return self._asked.wait(seconds)

    def ask(self) -> None:
        """The owner wants the peer to end, without a signal."""
        self._asked.set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals meanwhile, on the main thread only. The old handlers are put back."""
        with asked_to_stop(self._ask):
            yield

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """Meanwhile a signal ends the process at once, because downloads and building cannot be asked to stop."""
        self._nothing_to_save = True
        try:
            yield
        finally:
            self._nothing_to_save = False

    def _ask(self, number: int) -> None:
        if self._nothing_to_save or (self() and number != signal.SIGHUP):
            self._before_leaving()
            leave()
        self._asked.set()
