"""Keep the machine awake while the peer works, as a choice of its owner.

Linux: `systemd-inhibit` holds an inhibitor of logind. macOS: `caffeinate`. Both end with this process, also after a kill.
Refuses where there is no such program: Windows, and Linux without systemd.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

START_SECONDS = 0.5
LINUX = (
    "systemd-inhibit", "--what=sleep:idle", "--mode=block", "--who=swarmentum", "--why=a training peer works", "cat",
)  # fmt: skip
"""`cat` reads a pipe of this process, so it ends when this process does, and the inhibitor with it."""
MACOS = ("caffeinate", "-i", "-w")


def command() -> tuple[str, ...] | None:
    """The program that keeps this machine awake; None: there is none."""
    if sys.platform == "darwin":
        found = (*MACOS, str(os.getpid()))
    elif sys.platform == "linux":
        found = LINUX
    else:
        return None
    return found if shutil.which(found[0]) else None


def check(wanted: bool) -> str:
    """ValueError where this machine cannot be kept awake. Returns nothing to tell."""
    if wanted and command() is None:
        raise ValueError(
            "this machine has neither systemd-inhibit nor caffeinate; turn automatic sleep off in its settings"
        )
    return ""


class Awake:
    """Of one peer. A single thread calls it."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = False

    def keep(self, wanted: bool) -> None:
        """Hold the inhibitor, or let the machine sleep again. A system that refuses is logged once, and asked no more."""
        if not wanted:
            self.close()
            return
        if self._process is not None and self._process.poll() is None:
            return
        program = command()
        if self._refused or program is None:
            return
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._log.info("the machine is kept awake while the peer works", by=program[0])
            return
        said = self._process.stderr.read().decode(errors="replace").strip() if self._process.stderr else ""
        self._refused = True
        self._log.warning("the system does not let this peer keep the machine awake", why=said or "it said nothing")
        self.close()

    def close(self) -> None:
        """Let the machine sleep again."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()
        process.terminate()
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
