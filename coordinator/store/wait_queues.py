"""The lines before full runs, in memory and as bytes: the journal keeps one row for each run, so that neither a restart nor a
take-over costs anybody a place.

A line is no part of a run: no entry depends on it. The hub writes it, at most once a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import structlog

from coordinator.clock.wait_queue import LINE_MAX, Line, QueuedPeer, QueuePace, moved

FILE = "lines.json"
"""Where earlier versions kept the lines, in the coordinator's home."""
FILE_BYTES_MAX = 1 << 22
RETURN_MS_MAX = 60_000
"""After a start, the peers that were in the run come back within this time."""


class WaitQueues:
    """By run id, as they were when this coordinator began to act (`kept`), and since."""

    def __init__(self, now_ms: int = -RETURN_MS_MAX, kept: Mapping[bytes, bytes] | None = None) -> None:
        self._lines: dict[bytes, Line] = {}
        self._paces: dict[bytes, QueuePace | None] = {}
        self._read_ms = now_ms
        self._changed: set[bytes] = set()
        for run_id, body in (kept or {}).items():
            if line := _read(body, now_ms):
                self._lines[run_id] = line

    def of(self, run_id: bytes) -> Line:
        """The line before a run."""
        return self._lines.get(run_id, {})

    def waits_for_members(self, now_ms: int) -> bool:
        """Whether the coordinator started so recently that places that look free may belong to peers that come back."""
        return now_ms - self._read_ms < RETURN_MS_MAX

    def keep(self, run_id: bytes, line: Line, now_ms: int) -> QueuePace | None:
        """The line is this now. Returns the line's pace since this start."""
        before = self.of(run_id)
        if _rows(before) != _rows(line):
            self._changed.add(run_id)
        pace = self._paces[run_id] = moved(self._paces.get(run_id), before, line, now_ms)
        self._lines[run_id] = line
        if not line:
            del self._lines[run_id], self._paces[run_id]
        return pace

    @property
    def is_changed(self) -> bool:
        """Whether the journal has other lines than these."""
        return bool(self._changed)

    def pop_changed(self) -> dict[bytes, bytes]:
        """The lines that the journal does not have, as bytes; empty bytes for a line without peers."""
        found = {run_id: json.dumps(_rows(self.of(run_id))).encode() for run_id in sorted(self._changed)}
        self._changed.clear()
        return {run_id: b"" if body == b"[]" else body for run_id, body in found.items()}

    def unwritten(self, run_id: bytes) -> None:
        """The journal did not take this line: it is written with the next one."""
        self._changed.add(run_id)


def _rows(line: Line) -> list[list[object]]:
    return [[key.hex(), waiting.part, waiting.called_ms is not None] for key, waiting in line.items()]


def _read(body: bytes, now_ms: int) -> Line:
    """Times begin anew: the time while no coordinator acted does not count. Bytes that are no line cost the places in it."""
    try:
        return {
            bytes.fromhex(key): QueuedPeer(str(part), now_ms, now_ms if called and called[0] else None)
            for key, part, *called in json.loads(body)[:LINE_MAX]
        }
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        log = structlog.get_logger("coordinator")
        log.warning("the line before a full run cannot be read; it begins anew", step=0, peer="-", why=str(error))
        return {}


def from_file(data: bytes) -> dict[bytes, bytes]:
    """The lines of a file of an earlier version; a file that cannot be read has none."""
    try:
        return {bytes.fromhex(run_id): json.dumps(line).encode() for run_id, line in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
