"""A command on a terminal of its own (a pty): what people type at it, what they see, and how it ends."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.system.local_swarm import wait_for

CTRL_C = b"\x03"


class Terminal:
    """`python -m command ...` as the leader of a session whose terminal this is."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        self.screen = b""
        self.pid, self._master = pty.fork()
        if not self.pid:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
            os.execvpe(sys.executable, [sys.executable, "-m", *command], env)
        self.code: int | None = None

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def signal(self, number: signal.Signals) -> None:
        """To every process of the terminal's foreground group, as Ctrl-C is."""
        os.killpg(os.tcgetpgrp(self._master), number)

    def hang_up(self) -> None:
        """The window is closed: the kernel sends SIGHUP."""
        self.look()
        os.close(self._master)
        self._master = -1

    def look(self) -> str:
        """All that was shown so far."""
        while self._master >= 0 and select.select([self._master], [], [], 0)[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            self.screen += data
        return self.screen.decode(errors="replace")

    def wait_for(self, what: str, look: Callable[[], object], seconds: float = 90.0) -> None:
        def found() -> bool:
            assert not self.ended(), f"it ended before {what}: {self.look()}"
            return bool(look())

        try:
            wait_for(what, found, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; the terminal shows:\n{self.look()[-3000:]}") from None

    def ended(self) -> bool:
        self.look()
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def seconds_to_end(self, seconds_max: float) -> float:
        """How long it takes from now to its end."""
        began = time.monotonic()
        try:
            wait_for("end of the command", self.ended, seconds_max)
        except AssertionError as error:
            raise AssertionError(f"{error}; the terminal shows:\n{self.look()[-3000:]}") from None
        return time.monotonic() - began

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._master >= 0:
            with contextlib.suppress(OSError):
                os.close(self._master)


def daemons_of(home: Path) -> list[int]:
    """p2pd processes that have the identity of this home."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "p2pd" in line and f"-id={home}/identity.key" in line:
                found.append(int(entry.name))
    return found
