"""The log of actions: what the operator's page asked for, from which session, when, and what became of it.

A line is on the disk before the action begins, and another one after it. An action whose line cannot be written is not done.
The file is bounded: a full one becomes `actions.1.jsonl`, and the one before that goes.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from protos.text import printable

RECORD_FILE: Final = "actions.jsonl"
OLDER_FILE: Final = "actions.1.jsonl"
FILE_BYTES_MAX: Final = 1 << 20
SHOWN_MAX: Final = 100
OUTCOME_CHARACTERS_MAX: Final = 400
PRIVATE: Final = 0o600
BEGUN: Final = "begun"
"""The outcome of an action whose end is not known: it is under way, or the page's process ended meanwhile."""


class Record:
    """The log of actions of one home. Raises OSError where the disk refuses."""

    def __init__(self, home: Path) -> None:
        self._path, self._older = home / RECORD_FILE, home / OLDER_FILE
        self._newest: OrderedDict[int, dict[str, Any]] = OrderedDict()
        for path in (self._older, self._path):
            if path.is_file():
                for line in path.read_bytes()[-2 * FILE_BYTES_MAX :].splitlines():
                    self._read(line)
        self._next = max(self._newest, default=0) + 1

    def begin(self, session: str, action: str, run: str, values: Mapping[str, Any], now: float) -> int:
        """An action begins; its number. `now`: seconds since 1970."""
        number, self._next = self._next, self._next + 1
        asked = {"session": session, "action": action, "run": run, "values": dict(values)}
        self._write({"number": number, "time": round(now, 3), **asked, "outcome": BEGUN})
        return number

    def end(self, number: int, outcome: str) -> None:
        """What became of an action: `done`, or why not."""
        self._write({"number": number, "outcome": printable(outcome, OUTCOME_CHARACTERS_MAX)})

    def newest(self) -> list[dict[str, Any]]:
        """The last actions, newest first."""
        return list(reversed(self._newest.values()))

    def _read(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            number = int(values["number"])
        except (ValueError, TypeError, KeyError):
            return  # the end of a line that a full disk cut off
        if number in self._newest:
            self._newest[number] |= values
        elif "action" in values:
            self._newest[number] = values
        while len(self._newest) > SHOWN_MAX:
            self._newest.popitem(last=False)

    def _write(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(values, ensure_ascii=True).encode("ascii") + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            if os.fstat(descriptor).st_size and self._cut_off():
                line = b"\n" + line
            if os.write(descriptor, line) != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
            full = os.fstat(descriptor).st_size >= FILE_BYTES_MAX
        finally:
            os.close(descriptor)
        if full:
            self._path.replace(self._older)
        self._read(line)

    def _cut_off(self) -> bool:
        """Whether the file ends within a line."""
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
