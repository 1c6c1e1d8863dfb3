"""A command on a terminal of its own (a pty): what people type at it, what they see, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pyte

from tests.system.local_swarm import READY_SECONDS_MAX, wait_for

CTRL_C = b"\x03"
CLIPBOARD_AND_KEYS = re.compile(r"\x1b\[[<>=][0-9;]*[a-zA-Z]|\x1b\[\?[0-9;]*\$p")
"""Sequences about the keyboard and modes, which pyte would print."""


class Terminal:
    """`python -m command ...` as the leader of a session whose terminal this is."""

    def __init__(
        self,
        *command: str,
        environment: dict[str, str] | None = None,
        size: tuple[int, int] | None = None,
        in_shell: bool = False,
    ) -> None:
        """`size`: columns and rows of a window as people have it; without it, the terminal can only print lines. `in_shell`: a
        shell is the leader, and lives on when the command has ended; otherwise the kernel hangs up the terminal then."""
        self.screen = b""
        self.size = size
        self._began = time.monotonic()
        self.pid, self._master = pty.fork()
        if not self.pid:
            if size is not None:
                os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", LC_ALL="C.UTF-8")
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
            env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
            words = [sys.executable, "-m", *command]
            words = ["sh", "-c", '"$@"; sleep 600', "sh", *words] if in_shell else words
            os.execvpe(words[0], words, env)
        self.code: int | None = None

    @property
    def child(self) -> int:
        """The command, if a shell started it."""
        [pid] = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(pid)

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

    def rows(self) -> list[str]:
        """The window as a person sees it now, row by row."""
        assert self.size is not None, "it has no window"
        window = pyte.Screen(*self.size)
        pyte.Stream(window).feed(CLIPBOARD_AND_KEYS.sub("", self.look()))
        return [row.rstrip() for row in window.display]

    def shows(self, text: str) -> bool:
        """Whether the window has a text now."""
        return any(text in row for row in self.rows())

    def modes(self) -> list[Any]:
        """How the terminal is set: echo, whole lines, and so on."""
        return termios.tcgetattr(self._master)

    def wait_for(self, what: str, look: Callable[[], object], seconds: float = READY_SECONDS_MAX) -> None:
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

    def wait_end(self) -> None:
        """Until the command has ended."""
        try:
            wait_for("end of the command", self.ended)
        except AssertionError as error:
            raise AssertionError(f"{error}; the terminal shows:\n{self.look()[-3000:]}") from None

    def check_ends_soon(self, seconds_max: float) -> None:
        """It ends in this time, and half of what it took to come this far: that says how slow the machine is."""
        asked = time.monotonic()
        self.wait_end()
        took, lived = time.monotonic() - asked, asked - self._began
        assert took < seconds_max + lived / 2, f"{took:.1f} s to its end, after {lived:.1f} s: {self.look()[-3000:]}"

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
    lines = {it.pid: " ".join(it.info["cmdline"] or ()) for it in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if "p2pd" in line and f"-id={home}/identity.key" in line]
