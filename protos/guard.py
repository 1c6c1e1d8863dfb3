"""The guard runs a command that ends with its parent process, also if the parent is killed and can stop nothing itself.

`python -I -S guard.py PARENT_PID COMMAND ...`. A p2pd that outlives its peer keeps the peer's connections. Other peers then
continue to talk to that p2pd, and hear nothing from the peer that came back with the same identity.

On Linux the kernel ends the command (prctl(2), PR_SET_PDEATHSIG), and this process becomes the command. On other systems this
process stays and watches the parent. The module imports only what it needs, so it starts in some 15 ms.

The command gets a session of its own, because Ctrl-C and a closed terminal reach every process of the terminal. Otherwise p2pd
would die of them while its peer still leaves the run, and the peer would take that for a crash.
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
    if os.getpgrp() != os.getpid():  # the leader of a group cannot start a session, and need not
        os.setsid()
    if _LINUX:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the prctl call
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
