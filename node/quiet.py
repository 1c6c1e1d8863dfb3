"""Libraries whose own log lines are not for people: what they warn of here is either no fault, or comes as an error, too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

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
