"""The processes that a command or a program starts on this machine. Each has its log; all end with it, also if it is killed.

`LocalProcesses` is a whole swarm on this machine (a coordinator, a relay, an anchor and peers on loopback), for `swarmentum
demo` and `swarmentum.local`. Each process is the command that a user runs, and has a home and a log by its name.

Refuses to continue with a process that has ended or is silent: the end of its log is the error.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from protos.errors import (
    DivergedError,
    NetworkError,
    OperatorError,
    RefusedError,
    StoppedError,
    SwarmentumError,
)
from protos.process import guarded, python_command

READY_SECONDS_MAX = 240.0
STOP_SECONDS_MAX = 10.0
LINES_SHOWN = 12
BY_EXIT_CODE = {
    error.exit_code: error for error in (OperatorError, NetworkError, RefusedError, DivergedError, StoppedError)
}


class Processes:
    """Child processes with their logs; `close` ends every one, the last started first."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[tuple[str, subprocess.Popen[str], IO[str]]] = []

    def start(self, name: str, *command: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `python -m ...`; stderr goes to <name>.log, stdout is the caller's."""
        log = (self._logs / f"{name}.log").open("a")

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                guarded(*python_command("-m", *command)),
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # whoever started them passes Ctrl-C on, in order
            )

        child = _starter.result_of(start)
        self._children.append((name, child, log))
        return child

    def ready(self, name: str, child: subprocess.Popen[str]) -> dict[str, Any]:
        """The first JSON line that a child prints. Raises the child's error with the end of its log if it prints none."""
        line = _first_line(child, READY_SECONDS_MAX)
        if not line:
            raise self.failure(name, "did not start")
        values: dict[str, Any] = json.loads(line)
        return values

    def failure(self, name: str, what: str = "failed") -> SwarmentumError:
        """The error of a child that ended: of the kind that its exit code says, with the end of its log."""
        child = next(child for its_name, child, _ in reversed(self._children) if its_name == name)
        try:
            kind: type[SwarmentumError] = BY_EXIT_CODE.get(child.wait(0.5), SwarmentumError)
        except subprocess.TimeoutExpired:  # it is silent
            kind = NetworkError
        return kind(f"{name} {what}. The end of the log:\n{self.last_words(name)}")

    def last_words(self, name: str) -> str:
        """The end of a child's log."""
        log = self._logs / f"{name}.log"
        return "\n".join(log.read_text().splitlines()[-LINES_SHOWN:]) if log.exists() else f"{log} is gone"

    def ended(self) -> list[str]:
        """Names of children that have ended with an error."""
        return [name for name, child, _ in self._children if child.poll() not in (None, 0)]

    def kill(self, child: subprocess.Popen[str]) -> None:
        """SIGKILL to a child, which is forgotten: it ended as it should."""
        _kill(child)
        for it in [it for it in self._children if it[1] is child]:
            self._children.remove(it)
            _shut(child, it[2])

    def close(self) -> None:
        """SIGINT to each, then a deadline, then SIGKILL."""
        for _, child, _ in reversed(self._children):
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
        until = time.monotonic() + STOP_SECONDS_MAX
        for _, child, log in reversed(self._children):
            try:
                child.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                _kill(child)
            _shut(child, log)
        self._children.clear()


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)  # the guard is the child's parent on some systems
    child.wait()


def _shut(child: subprocess.Popen[str], log: IO[str]) -> None:
    if child.stdout is not None:
        child.stdout.close()
    log.close()


def _first_line(child: subprocess.Popen[str], seconds_max: float) -> str:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], seconds_max)
    return child.stdout.readline() if ready else ""


class _Starter:
    """A thread that lives as long as this process. Linux ends a guarded child when the thread that started the child ends."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[str]], Future[subprocess.Popen[str]]]]
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def result_of(self, work: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
        future: Future[subprocess.Popen[str]] = Future()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # after a fork there is none
                self._work = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(self._work,), daemon=True, name="starts children"
                )
                self._thread.start()
            self._work.put((work, future))
        return future.result()

    @staticmethod
    def _run(
        work: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[str]], Future[subprocess.Popen[str]]]],
    ) -> None:
        while True:
            start, future = work.get()
            try:
                future.set_result(start())
            except OSError as error:
                future.set_exception(error)


_starter = _Starter()


COORDINATOR, RELAY, ANCHOR = "coordinator", "relay", "anchor"
NO_PAGE = "none"
LOOPBACK = "127.0.0.1:0"
END_BYTES = 1 << 14
"""Of a file of steps: more than a few lines."""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""For runs that name nothing of the hub: no library asks there."""


class LocalProcesses:
    """Starts the processes; `processes` ends them."""

    def __init__(self, processes: Processes, homes: Path) -> None:
        self.processes, self._homes = processes, homes

    def home(self, name: str) -> Path:
        """The folder of the process of this name."""
        return self._homes / name

    def create(
        self, file: Path, run_toml: Callable[[str], str], *flags: str, anchor: bool, page: str = NO_PAGE
    ) -> dict[str, Any]:
        """Start the coordinator and the relay, and create the run. Returns what `run create` printed: the links.

        `run_toml` gets the relay's address and makes the text of `file`. `page`: where the coordinator serves its web page.
        """
        start, ready = self.processes.start, self.processes.ready
        at = ("--listen", LOOPBACK, "--json")
        relay = start(RELAY, "node", "relay", "--home", str(self.home(RELAY)), "--set", "reachability=auto", *at)
        home = str(self.home(COORDINATOR))
        coordinator = start(COORDINATOR, "coordinator", "serve", "--home", home, "--web-listen", page, *at)
        addresses = ready(RELAY, relay)["addresses"]
        ready(COORDINATOR, coordinator)
        file.write_text(run_toml(addresses[0]), encoding="utf-8")
        words = ("run", "create", str(file), *(("--anchor",) if anchor else ()), "--home", home, "--json", *flags)
        return ready("create", start("create", "coordinator", *words))

    def anchor(self, link: str, *flags: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the anchor: its reports on the run's state count, and it only applies entries."""
        return self._peer(ANCHOR, "anchor", link, 1, flags, environment)

    def join(
        self, name: str, link: str, threads: int, *flags: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a peer. The same name again is the same identity."""
        return self._peer(name, "join", link, threads, flags, environment)

    def _peer(
        self,
        name: str,
        command: str,
        link: str,
        threads: int,
        flags: tuple[str, ...],
        environment: dict[str, str] | None,
    ) -> subprocess.Popen[str]:
        own = ("--home", str(self.home(name)), "--listen", LOOPBACK, "--threads", str(threads), "--json")
        surroundings = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        return self.processes.start(name, "node", command, link, *own, *flags, environment=surroundings)

    def run_folder(self, name: str, run_id: bytes) -> Path:
        """What a peer keeps of a run."""
        return self.home(name) / "runs" / run_id.hex()[:16]

    def steps(self, name: str, run_id: bytes) -> list[dict[str, Any]]:
        """What a peer wrote about its steps so far (whole lines)."""
        return _lines(self._steps_file(name, run_id))

    def last_step(self, name: str, run_id: bytes) -> int:
        """The last step that a peer wrote about; 0 before the first. Reads the end of the file alone."""
        steps = _lines(self._steps_file(name, run_id), END_BYTES)
        return int(steps[-1]["step"]) if steps else 0

    def _steps_file(self, name: str, run_id: bytes) -> Path:
        return self.run_folder(name, run_id) / "steps.jsonl"


def _lines(path: Path, end: int | None = None) -> list[dict[str, Any]]:
    """The whole lines of a file, or of its last `end` bytes; none if there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        if end is not None and (first := file.seek(0, os.SEEK_END) - end) > 0:
            file.seek(first)
            file.readline()  # the end of a line
        else:
            file.seek(0)
        data = file.read()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
