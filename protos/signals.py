"""Signals that ask a command to stop: SIGINT (Ctrl-C), SIGTERM (`systemctl stop`) and SIGHUP (a closed terminal).

A SIGHUP that was ignored when the command started (`nohup`) stays ignored. After a SIGHUP nobody reads the terminal: what is
written there goes nowhere instead of failing. Knows nothing of what is stopped.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STANDARD = (0, 1, 2)
"""Descriptors of stdin, stdout and stderr."""


@contextmanager
def asked_to_stop(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask(number)` for each stop signal, on the main thread only; the handlers from before are put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminals = terminals_of_this_process()

    def heard(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go(terminals)
        ask(number)

    before = {number: signal.signal(number, heard) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While there is nothing to save: a stop signal ends the process without another word, whatever it is doing.

    An exception would do worse: libraries that are being imported, or are downloading, swallow it or print it.
    """
    with asked_to_stop(leave):
        yield


def leave(_number: int = 0) -> NoReturn:
    """End this process now; what belongs to it (p2pd, locks) ends with it."""
    os._exit(EXIT_INTERRUPTED)


def heeded() -> tuple[signal.Signals, ...]:
    """The stop signals but a SIGHUP that was ignored from the start."""
    return tuple(n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)


def terminals_of_this_process() -> tuple[int, ...]:
    """The descriptors of stdin, stdout and stderr that are a terminal."""
    return tuple(number for number in STANDARD if os.isatty(number))


def let_go(terminals: tuple[int, ...]) -> None:
    """The terminal is closed: from now on these descriptors are /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)
