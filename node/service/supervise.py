"""Runs a peer for launchd: keeps its log in files of bounded size, and ends with 0 if another start would change nothing.

`python -m node.service.supervise LOG COMMAND ...`. Refuses to start the peer again itself: launchd does.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType

from node.service.manager import LEFT, NOT_AGAIN

LOG_BYTES_MAX = 10 << 20
LOGS_KEPT = 3
LINE_CHARACTERS_MAX = 1 << 16


def supervise(log: Path, command: list[str], bytes_max: int = LOG_BYTES_MAX) -> int:
    """Run `command` to its end; the exit code for launchd. SIGTERM and SIGINT go to the command.

    A log that cannot be written, on a full disk, costs lines of the log and never the peer.
    """
    children: list[subprocess.Popen[str]] = []
    asked: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for child in children:
            child.send_signal(number)

    for awaited in (signal.SIGTERM, signal.SIGINT):  # before there is a child, which would outlive this process
        signal.signal(awaited, forward)
    handler = RotatingFileHandler(log, maxBytes=bytes_max, backupCount=LOGS_KEPT, encoding="utf-8", errors="replace")
    handler.setFormatter(logging.Formatter("%(message)s"))
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        children.append(child)
        for number in list(asked):
            child.send_signal(number)
        assert child.stdout is not None, "it is a pipe"
        while line := child.stdout.readline(LINE_CHARACTERS_MAX):
            handler.emit(logging.makeLogRecord({"msg": line.rstrip("\n"), "levelno": logging.INFO}))
    with suppress(OSError):
        handler.close()
    return 0 if child.returncode in {*NOT_AGAIN, LEFT, -signal.SIGTERM, -signal.SIGINT} else abs(child.returncode)


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), sys.argv[2:]))
