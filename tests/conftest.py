"""For all tests: what a test leaves unclosed is found at that test, not in the middle of a later one; and every test draws
the same random numbers each time, alone or after others. New ones for hypothesis: `pytest --hypothesis-profile=default`.
"""

import atexit
import gc
import os
import random
import resource
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from protos.process import SAFE_PATH_VARIABLE

settings.register_profile("same", derandomize=True, deadline=None)  # a busy machine is no failure
settings.load_profile("same")

PROCESS_MARKS = {"system", "netns", "interop"}
LOG_BYTES_SHOWN = 800


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their argument: packed ones hold the time, and two workers would collect different tests."""
    return argname if isinstance(val, bytes) else None


def pytest_sessionstart() -> None:
    """Collecting tests imports torch and much else: see node/imports.py."""
    gc.disable()
    # In the background of a shell, or below nohup, nobody hears Ctrl-C or a hang-up, nor do programs that tests end by them
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first: no core is idle at the end while another has just begun a long file.

    `make test` says --no-loadscope-reorder, because xdist would begin with the files that have most tests.
    """
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """All modules are there and stay: no later collection goes through them."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


def pytest_sessionfinish() -> None:
    """A worker of xdist ends without the end of Python, which takes the folder of tests/system/copied.py away."""
    if "multiprocessing.util" in sys.modules:
        sys.modules["multiprocessing.util"]._run_finalizers()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test that fails for one draw in ten is found when it is written, not by somebody else."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _own_command() -> Iterator[None]:
    """A command that a test calls in this process writes its log to what stderr was then: later tests have another. It keeps
    the working folder out of each Python that is started (protos/process.py): later tests start theirs as they say. `layout`
    bounds its memory: what later tests need in one worker may be more."""
    safe, memory = os.environ.get(SAFE_PATH_VARIABLE), resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, memory)
    if "structlog" in sys.modules:
        sys.modules["structlog"].reset_defaults()
    if safe is None:
        os.environ.pop(SAFE_PATH_VARIABLE, None)


@pytest.fixture(autouse=True, scope="session")
def _no_page() -> None:
    """Coordinators of tests start no web page: it takes a second of a core, and a fixed port. Tests of the page ask for one."""
    os.environ.setdefault("SWARMENTUM_COORDINATOR_WEB_LISTEN", "none")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Collect garbage after each test that starts processes, so that a file or socket left open fails the right test.

    Nor may Python 3.11 find such an object while pytest parses source to report a failure: the warning about it parses
    source again, which 3.11 answers with a SystemError in place of the whole report (cpython issue 106905).
    """
    try:
        return (yield)
    finally:
        if any(mark.name in PROCESS_MARKS for mark in item.iter_markers()):
            gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure of a test with processes shows the end of each process's log."""
    report = yield
    if report.failed:
        report.sections += [(f"end of {log.name}", _end(log)) for log in _logs(getattr(item, "funcargs", {}))]
    return report


def _logs(arguments: dict[str, Any]) -> Iterator[Path]:
    """Logs in the folders that a test was given, or that a swarm which it was given lives in."""
    for value in arguments.values():
        folder = getattr(value, "folder", value)
        if isinstance(folder, Path) and folder.is_dir():
            yield from sorted(folder.glob("*.log"))


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_BYTES_SHOWN:]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks of a peer have: more threads add up a product in another order, and spin longer than small tensors take."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
