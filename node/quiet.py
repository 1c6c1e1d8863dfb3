"""Libraries whose own log lines are not for people: what they warn of here is either no fault, or comes as an error, too.

They wait in silence, too: `slowly` says what for.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SILENCE_SECONDS_MAX: Final = 2.0
"""A person waits for so long without a word."""
LIBRARIES: Final = ("transformers", "huggingface_hub")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, the libraries log errors alone. Enter it after their import, which sets their levels."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def slowly(what: str) -> Iterator[None]:
    """Inside, a library asks somebody on the network: after SILENCE_SECONDS_MAX, `what` is told on stderr, once."""
    timer = threading.Timer(SILENCE_SECONDS_MAX, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
