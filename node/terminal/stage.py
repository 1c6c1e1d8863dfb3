"""The peer's side of its terminal view: starts the view in a process of its own, and keeps all else off the terminal meanwhile.

While the view is up, log lines go to a file in the peer's home, and stdout and stderr lead into that file. Whatever ends the
view, this process puts the terminal back as it was. A view that dies costs the peer nothing: plain lines go on. ADR 35.
"""

from __future__ import annotations

import logging
import os
import re
import select
import subprocess
import sys
import termios
import threading
from collections import deque
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from protos.process import python_command
from protos.text import printable

LINES_KEPT = 50
LINE_CHARACTERS_MAX = 300
STEP_EVENT = "step"
UNSAID = ("event", "level", "timestamp", "peer", "step", "exc_info", "exception")


class RecentLogLines:
    """The last lines of a peer's log, for its owner's eyes: bounded, in memory, and without the line that every step
    writes.

    A structlog processor: it keeps what passes, and changes nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)

    def __call__(self, _logger: Any, _method: str, values: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if values.get("event") != STEP_EVENT and _weight(values) >= logging.INFO:
            with self._lock:
                self._lines.append(_line(values))
        return values

    def last(self, count: int = LINES_KEPT) -> list[dict[str, Any]]:
        """The last lines, the newest last: `at` (ISO 8601, UTC), `level` and `text`."""
        with self._lock:
            return list(self._lines)[-count:]


def _weight(values: MutableMapping[str, Any]) -> int:
    found = logging.getLevelName(str(values.get("level", "info")).upper())
    return found if isinstance(found, int) else logging.INFO


def _words(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)


def _line(values: MutableMapping[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in values.items() if name not in UNSAID}
    said = ", ".join(_words(value) if name == "why" else f"{name} {_words(value)}" for name, value in told.items())
    text = f"{values.get('event', '')}: {said}" if said else str(values.get("event", ""))
    return {
        "at": str(values.get("timestamp", "")),
        "level": str(values.get("level", "info")),
        "text": printable(text, LINE_CHARACTERS_MAX),
    }


# The file of a peer's log lines while its terminal shows the view. Bounded: beyond its limit it replaces `peer.log.1`.
#
# Refuses to end the peer: a line that the disk does not take is lost.

LOG_FILE = "peer.log"
LOG_BYTES_MAX = 8 << 20
"""Some 60,000 steps; the file before it has as much."""


class LogFile:
    """Append-only. `taken`: descriptors that lead into the file, too, for libraries that write past our log."""

    def __init__(self, path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.path, self._bytes_max = path, bytes_max
        self._taken: tuple[int, ...] = ()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._opened()

    def _opened(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, descriptors: Iterable[int]) -> None:
        """From now on these lead into the file."""
        self._taken = tuple(descriptors)
        for descriptor in self._taken:
            os.dup2(self._file, descriptor)

    def let_go(self) -> None:
        """The descriptors lead elsewhere from now on; their owner sees to it."""
        self._taken = ()

    def write(self, text: str) -> None:
        """Append. The file is never longer than its limit and one line."""
        with suppress(OSError):
            if os.fstat(self._file).st_size >= self._bytes_max:
                self._rotate()
            os.write(self._file, text.encode(errors="replace"))

    def _rotate(self) -> None:
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        before, self._file = self._file, self._opened()
        os.close(before)
        self.take(self._taken)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


CLOSE_SECONDS_MAX = 3.0
COLUMNS_MIN, ROWS_MIN = 40, 12
"""A smaller window shows plain lines."""
STDIN, STDOUT, STDERR = 0, 1, 2
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
MODES_OFF = (1000, 1002, 1003, 1004, 1006, 1015, 1049, 2004, 2048)
AS_BEFORE = b"".join(b"\x1b[?%dl" % mode for mode in MODES_OFF) + b"\x1b[?25h\x1b[?7h\x1b[<u\x1b[0m"
"""What a view that was killed leaves behind: the mouse, reports of focus, pastes and sizes, and the other screen go off. The
cursor, lines that wrap, the ordinary keyboard and colours come back. The modes are those of the driver of textual 8."""


def _make_room(terminal: int) -> None:
    """A window that takes no output (Ctrl-S, a `screen` that is stopped) loses the pictures that wait for it. Otherwise this
    process would wait with its last words until somebody reads."""
    if not select.select([], [terminal], [], 0)[1]:
        with suppress(termios.error):
            termios.tcflush(terminal, termios.TCOFLUSH)
            termios.tcflow(terminal, termios.TCOON)


def can_show() -> bool:
    """Whether a person looks at a terminal that the view can use, and may type."""
    if not (os.isatty(STDIN) and os.isatty(STDERR)) or os.environ.get("TERM", "dumb") == "dumb":
        return False
    if os.tcgetpgrp(STDIN) != os.getpgrp() or find_spec("textual") is None:
        return False  # in the background, it may not read; textual belongs to the extra `node`
    size = os.get_terminal_size(STDERR)
    return size.columns >= COLUMNS_MIN and size.lines >= ROWS_MIN and "utf" in (sys.stderr.encoding or "").lower()


class Stage:
    """The log's target, and the view of one peer. `wanted`: show the view from `open` on, if the terminal can."""

    def __init__(self, *, wanted: bool = False) -> None:
        self.recent = RecentLogLines()
        self.log_file: Path | None = None
        """The file of the log lines; None while they go to stderr."""
        self._wanted = wanted and can_show()
        self._lock = threading.RLock()
        self._log: LogFile | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._life = -1
        self._kept: dict[int, int] = {}
        self._attributes: list[Any] = []

    # ---- the log's target --------------------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """A line of the log, to where the log goes now."""
        log = self._log
        if log is None:
            sys.stderr.write(text)
        else:
            log.write(COLOURS.sub("", text))

    def flush(self) -> None:
        """Of stderr; the file has no buffer."""
        if self._log is None:
            sys.stderr.flush()

    # ---- the view ----------------------------------------------------------------------------------------------------

    def open(self, home: Path) -> None:
        """Show the view of the peer with this home, whose control door opens soon."""
        if not self._wanted or self._child is not None:
            return
        with self._lock:
            self._attributes = termios.tcgetattr(STDIN)
            sys.stdout.flush()
            sys.stderr.flush()
            self._kept = {number: os.dup(number) for number in (STDOUT, STDERR) if os.isatty(number)}
            read, self._life = os.pipe()
            home_and_life = ("--home", str(home), "--life", str(read), "--peer", str(os.getpid()))
            command = python_command("-m", "node.terminal.peer_view", *home_and_life)
            screen = self._kept[STDERR]
            self._child = subprocess.Popen(command, stdout=screen, stderr=screen, pass_fds=(read,))
            os.close(read)
            self._log, self.log_file = LogFile(home / LOG_FILE), home / LOG_FILE
            self._log.take(self._kept)
        threading.Thread(target=self._watch, args=(self._child,), name="terminal view", daemon=True).start()

    def close(self) -> None:
        """End the view, and put the terminal back as it was. Safe to call twice, and from a signal's handler."""
        with self._lock:
            child, self._child = self._child, None
            if child is None:
                return
            os.close(self._life)  # the view sees the end of this pipe
            try:
                child.wait(CLOSE_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            self._put_back(clean=child.returncode == 0)

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """On a thread: the view may end by itself, by a mistake or a kill."""
        child.wait()
        with self._lock:
            if self._child is not child:
                return  # `close` ended it
            self._child = None
            os.close(self._life)
            self._put_back(clean=child.returncode == 0)
        self.write(f"the terminal view has ended (exit code {child.returncode}); the log goes on here\n")
        self.flush()

    def _put_back(self, *, clean: bool) -> None:
        log, self._log, self.log_file = self._log, None, None
        if log is not None:
            log.let_go()
        for number, kept in self._kept.items():
            if os.isatty(kept):
                _make_room(kept)
                if not clean and number == STDERR:
                    os.write(kept, AS_BEFORE)
                os.dup2(kept, number)
            else:  # the window is closed: what is written from now on goes nowhere
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.close(kept)
        self._kept = {}
        with suppress(termios.error):  # the window is closed
            termios.tcsetattr(STDIN, termios.TCSANOW, self._attributes)
        if log is not None:
            log.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
