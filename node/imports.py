"""Imports of large packages, a quarter quicker. Importing torch and transformers makes some million objects that stay. Python
looks for garbage among them again and again while they are made. And a package may import what a peer never uses.

Measured on 2 cores, CPU time until a small Llama is built: 6.9 s with the collector, 5.2 s without it. hivemind's import takes
0.4 s less without scipy.optimize, of which it needs one function for averages that no peer of ours takes.

`quiet_libraries`: what libraries warn of while they are imported and used is either no fault, or comes as an error, too.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import sys
import tempfile
import threading
from _multiprocessing import SemLock  # type: ignore[import-not-found]
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from protos.errors import OperatorError


@contextmanager
def many_imports(*, said: bool = False) -> Iterator[None]:
    """Collect no garbage inside; afterwards, leave what was imported out of all later collections.

    `said`: tell a person on stderr what takes the time, if torch is not here yet. OperatorError if the system does not give
    what they need.
    """
    _needed()
    if said and "torch" not in sys.modules:
        print("loading torch ...", file=sys.stderr, flush=True)
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            atexit.unregister(gc.unfreeze)
            atexit.register(gc.unfreeze)  # otherwise C++ modules report leaks when Python ends
            gc.enable()


def _needed() -> None:
    """What the packages take for granted. MKL ends the process without a working folder, and says that it cannot load torch's
    library; torch's and hivemind's imports end with a traceback."""
    try:
        Path.cwd()
    except OSError as error:
        raise OperatorError(f"the working folder cannot be used: {error.strerror}; go to another one (cd)") from error
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise OperatorError("no folder takes temporary files, which torch needs: name one by TMPDIR") from error
    try:
        SemLock(0, 1, 1, f"/swarmentum-{os.getpid()}", True)  # gone at once; macOS takes 30 characters
    except FileExistsError:
        pass  # another thread is just there, or somebody was killed there: they can be made
    except OSError as error:
        raise OperatorError(f"no semaphore can be made ({error.strerror}): mount a writable /dev/shm") from error


def later(name: str) -> None:
    """Load this module when somebody first uses it, not when another package imports it.

    Python's `LazyLoader` does not do: any look at the module loads it, and `inspect` looks at the `__file__` of every module.
    """
    if name in sys.modules:
        return

    def load(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} is not loaded yet, so it has no {attribute!r}")
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    stand_in = sys.modules[name] = ModuleType(name)
    stand_in.__getattr__ = load  # type: ignore[method-assign]


SILENCE_SECONDS_MAX: Final = 2.0
"""A person waits for so long without a word."""
WAITING: Final = "waiting for the run's coordinator"
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
def no_progress_bar() -> Iterator[None]:
    """Switch off the progress bar that the library draws while it writes, because it would disturb the live view."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def slowly(what: str) -> Iterator[None]:
    """Inside, this program asks somebody on the network: after SILENCE_SECONDS_MAX, `what` is told on stderr, once."""
    timer = threading.Timer(SILENCE_SECONDS_MAX, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
