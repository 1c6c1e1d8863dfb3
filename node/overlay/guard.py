"""Runs a command that ends with the process that started it, also when that one is killed and can stop nothing itself.

`python -I -S guard.py PARENT_PID COMMAND ...`. A p2pd that outlives its peer keeps the peer's connections: others go on
talking to it, and hear nothing from the peer that came back with the same identity. On Linux the kernel does it
(prctl(2), PR_SET_PDEATHSIG) and this process becomes the command; elsewhere it stays and watches. Nothing is imported
that is not needed: it starts in some 15 ms.

The command gets a session of its own: Ctrl-C and a closed terminal are told to every process of the terminal, and a p2pd that
dies of them while its peer says goodbye is taken for one that crashed.
"""

import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.25
_LINUX = sys.platform == "linux"


def main(arguments: list[str]) -> int:
    """Become the command, or wait for it; returns its exit code."""
    parent, command = int(arguments[0]), arguments[1:]
    if os.getpgrp() != os.getpid():  # who leads a group already cannot, and need not
        os.setsid()
    if _LINUX:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel knew of our wish
            return 1
        os.execvp(command[0], command)  # noqa: S606 - our own command line
    return _watch(parent, command)


def _watch(parent: int, command: list[str]) -> int:
    child = os.spawnvp(os.P_NOWAIT, command[0], command)  # noqa: S606 - our own command line
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: os.kill(child, number))
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) & 0xFF
        if os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
