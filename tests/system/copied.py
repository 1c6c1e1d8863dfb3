"""A command of a swarm as a copy of a process that has loaded what the command imports, and has done nothing else.

Of the CPU time of a small swarm three quarters are imports. A copy runs the same module with the same words, in a process, a
session and an environment of its own. Commands that begin as a user's do are in tests of terminals, of the demo and of batch
systems; with SWARMENTUM_TEST_COPIES=none all begin so, as at night.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from protos import guard

GUARD = (sys.executable, "-I", "-S", guard.__file__)
"""No program outlives tests that were killed."""
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
LOADED_WITH = {**SURROUNDINGS, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0"}
OURS = ("SWARMENTUM_", "PYTEST_", "PYTHONHASHSEED", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that no library reads when it is loaded, and one that torch sets itself when it has compiled something."""
PROGRAMS = ("coordinator", "node", "tests.")

_copies: Any = multiprocessing.get_context("forkserver")
_copies.set_forkserver_preload(["tests.system.loaded"])
_loaded_with: dict[str, str] = {}


def begin(
    log: Path, *command: str, environment: dict[str, str] | None = None, inside: tuple[str, ...] = ()
) -> "subprocess.Popen[str] | Copied":
    """`python -m` with a command; what it writes to stderr is added to `log`."""
    environment = {**os.environ, **SURROUNDINGS, **(environment or {})}
    if not inside and command[0].startswith(PROGRAMS) and _can_be_copied(environment):
        return Copied(log, command, environment)
    with log.open("a") as file:
        return subprocess.Popen(
            [*GUARD, str(os.getpid()), *inside, sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=file,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )


def ranks(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(rank, *arguments)` in so many processes side by side, and wait; an error of one ends all, and is raised."""
    from torch.multiprocessing import start_processes

    environment = {**os.environ, **SURROUNDINGS}
    method = "forkserver" if _can_be_copied(environment) else "spawn"
    start_processes(_rank, (environment, work, arguments), nprocs=count, start_method=method)


def _rank(number: int, environment: dict[str, str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    work(number, *arguments)


def _can_be_copied(environment: dict[str, str]) -> bool:
    """The first call loads."""
    if os.environ.get("SWARMENTUM_TEST_COPIES") == "none" or sys.platform != "linux":
        return False
    theirs = {name: value for name, value in environment.items() if not name.startswith(OURS)}
    if not _loaded_with:
        with mock.patch.dict(os.environ, {**theirs, **LOADED_WITH}):
            _forkserver.ensure_running()
        _loaded_with.update({**theirs, **SURROUNDINGS})
        atexit.register(_kill)
    return theirs == _loaded_with


def _kill() -> None:
    """Before `multiprocessing` asks those that are left to end, and waits for each, also for one that is stopped."""
    for process in multiprocessing.active_children():
        if isinstance(process, _copies.Process):
            process.kill()


class Copied:
    """What tests use of `subprocess.Popen`; stdin is empty."""

    def __init__(self, log: Path, command: tuple[str, ...], environment: dict[str, str]) -> None:
        log.touch()
        reader, writer = _copies.Pipe(duplex=False)
        self._process = _copies.Process(target=_run, args=(log, command, environment, writer), daemon=True)
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        reader.close()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a copied command", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it writes from now on; waits for its end."""
        until, said = None if timeout is None else time.monotonic() + timeout, b""

        def left() -> float | None:
            return None if until is None else max(0.0, until - time.monotonic())

        while select.select([self.stdout], [], [], left())[0]:
            if not (piece := os.read(self.stdout.fileno(), 1 << 16)):
                break
            said += piece
        self.wait(left())
        self.stdout.close()
        return said.decode(), None


def _run(log: Path, command: tuple[str, ...], environment: dict[str, str], stdout: Connection) -> None:
    assert "tests.system.loaded" in sys.modules, (
        "an import of what is copied failed, which multiprocessing does not tell"
    )
    os.setsid()
    ctypes.CDLL(None).prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(_forkserver._forkserver_alive_fd)  # type: ignore[attr-defined] # the original ends when nobody has it
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.modules["numpy"].random.seed()  # Python's own has another seed in each copy
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it may have children
    sys.argv[1:] = command[1:]
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
