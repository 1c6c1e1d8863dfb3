"""The processes that a command or a program starts on this machine. Each has its log; all end with it, also if it is killed.

Refuses to continue with a process that has ended or is silent: the end of its log is the error.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from node.overlay import guard
from protos.errors import (
    DivergedError,
    NetworkError,
    OperatorError,
    RefusedError,
    StoppedError,
    SwarmentumError,
)
from protos.safe_path import python_command

READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 10.0
LINES_SHOWN = 12
GUARD = (sys.executable, "-I", "-S", guard.__file__)
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
                (*GUARD, str(os.getpid()), *python_command("-m", *command)),
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
        return "\n".join((self._logs / f"{name}.log").read_text().splitlines()[-LINES_SHOWN:])

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
