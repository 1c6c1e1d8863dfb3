"""This process and its children: command lines, signals that ask a command to stop, threads left at work, and usable cores.

A child never imports a module because of the folder that a person stands in. `python -m` puts the working folder first on the
module path. A file beside somebody's run.toml would then run in the place of a library. `-P` (Python 3.11) leaves that folder
out. `PYTHONSAFEPATH` does so for processes that a child or a library starts. Refuses no module that is installed, or that lies
in a folder which PYTHONPATH names. A run's own module (`model.factory`) is imported from the working folder only after the
person has agreed (`import_from_working_folder`).

The signals are SIGINT (Ctrl-C), SIGTERM (`systemctl stop`) and SIGHUP (a closed terminal). A SIGHUP that was ignored when the
command started (`nohup`) stays ignored. After a SIGHUP nobody reads the terminal: what is written there goes nowhere instead of
failing.

The cores are those of the machine, of the process's affinity, and of its container's quota of CPU time. A container with a
quota of two cores sees all of the machine's. With a thread for each of them, it computes for a moment and then stands still
until the next period. A file that is not there sets no limit.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from protos import guard

SAFE_PATH_FLAG: Final = "-P"
SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"


def python_command(*words: str, python: str | None = None) -> tuple[str, ...]:
    """The command that runs Python with `words`, such as `-m` and a module. `python`: another one than runs this program."""
    return (python or sys.executable, SAFE_PATH_FLAG, *words)


def guarded(*command: str) -> tuple[str, ...]:
    """The command line that runs `command` in a session of its own, and ends it with this process (`protos/guard.py`).

    The thread that starts it has to live as long. To end it, terminate it: elsewhere than on Linux a killed guard ends nothing.
    """
    return (sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *command)


def keep_path_safe(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let each Python that this process, its children or its libraries start leave the working folder out, too."""
    environment[SAFE_PATH_VARIABLE] = "1"


def safe_environment() -> dict[str, str]:
    """A copy of this process's environment in which each Python leaves the working folder out."""
    made = dict(os.environ)
    keep_path_safe(made)
    return made


def import_from_working_folder() -> None:
    """Let this process import from the working folder, for a person who has agreed to code that a run names.

    The folder comes last, so no file in it takes the place of a library.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


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


_LEFT: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def join_or_leave(thread: threading.Thread, seconds_max: float) -> None:
    """Wait so long for the end of a daemon thread. If it still works then, nobody waits for it any more."""
    thread.join(seconds_max)
    if thread.is_alive():
        _LEFT.add(thread)


def end_beside_threads(code: int) -> None:
    """End this process at once if a thread that was left still works; otherwise return.

    Python's own end would abort the process when such a thread comes back from C++, torch for example.
    """
    if any(thread.is_alive() for thread in _LEFT):
        os._exit(code)


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


GROUPS: Final = Path("/proc/self/cgroup")
ROOT: Final = Path("/sys/fs/cgroup")
MOUNTS: Final = {"cpu": ("cpu,cpuacct", "cpu", "cpuacct,cpu", "unified", ""), "memory": ("memory", "unified", "")}
"""Folders of a controller below ROOT: version 1 has one of its own, version 2 has none."""


def usable_cores(groups: Path = GROUPS, root: Path = ROOT) -> int:
    """At least 1. A quota of one and a half cores counts as two."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _quotas(groups, root)]
    return max(min([here, *quotas]), 1)


def _quotas(groups: Path, root: Path) -> Iterator[float]:
    """In cores: of the process's group, and of all groups around it, in both versions of cgroup."""
    for folder in groups_of("cpu", groups, root):
        yield from _of_group(folder)


def groups_of(controller: str, groups: Path = GROUPS, root: Path = ROOT) -> Iterator[Path]:
    """The folders of the groups that limit this process, each with all around it: a service, a job of Slurm, a container.

    Some are not there: a container sees its own group as the root, or its path on the host."""
    for path in {path for named, path in _paths(groups, controller) if named in ("", controller)}:
        for mount in MOUNTS[controller]:
            yield from (root / mount / group for group in _outwards(path))


def _paths(groups: Path, controller: str) -> Iterator[tuple[str, str]]:
    """Controller (empty: version 2) and path of each group that this process is in."""
    yield "", ""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        yield controller if controller in controllers.split(",") else controllers, path.strip("/")


def _outwards(path: str) -> Iterator[str]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield "/".join(parts[:length])


def _of_group(folder: Path) -> Iterator[float]:
    most, period = _words(folder / "cpu.max", 2)  # version 2
    if not most:
        [most], [period] = _words(folder / "cpu.cfs_quota_us", 1), _words(folder / "cpu.cfs_period_us", 1)
    if most.isdigit() and period.isdigit() and int(most) and int(period):
        yield int(most) / int(period)


def _words(file: Path, number: int) -> list[str]:
    """So many first words of a file; empty ones if it has fewer, or is not there."""
    try:
        words = file.read_text().split()
    except (OSError, UnicodeDecodeError):
        words = []
    return [*words, *[""] * number][:number]
