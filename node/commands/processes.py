"""The processes that a command starts on this machine. Each has its log, and all end with the command.

Refuses to continue with a process that has ended or is silent: the end of its log is the error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Any

from protos.errors import NetworkError
from protos.safe_path import python_command

READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 10.0


class Processes:
    """Child processes with their logs; `close` ends every one, the last started first."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[tuple[str, subprocess.Popen[str], IO[str]]] = []

    def start(self, name: str, *command: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `python -m ...`; stderr goes to <name>.log, stdout is the caller's."""
        log = (self._logs / f"{name}.log").open("w")
        child = subprocess.Popen(
            python_command("-m", *command),
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # this command passes Ctrl-C on, in order
        )
        self._children.append((name, child, log))
        return child

    def ready(self, name: str, child: subprocess.Popen[str]) -> dict[str, Any]:
        """The first JSON line that a child prints. Raises NetworkError with the end of the child's log if it prints none."""
        line = _first_line(child, READY_SECONDS_MAX)
        if not line:
            raise NetworkError(f"{name} did not start. The end of the log:\n{self.last_words(name)}")
        values: dict[str, Any] = json.loads(line)
        return values

    def last_words(self, name: str) -> str:
        """The end of a child's log."""
        return "\n".join((self._logs / f"{name}.log").read_text().splitlines()[-12:])

    def ended(self) -> list[str]:
        """Names of children that have ended with an error."""
        return [name for name, child, _ in self._children if child.poll() not in (None, 0)]

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
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
            log.close()


def _first_line(child: subprocess.Popen[str], seconds_max: float) -> str:
    import select

    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], seconds_max)
    return child.stdout.readline() if ready else ""
