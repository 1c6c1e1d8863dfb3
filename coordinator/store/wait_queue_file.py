"""The lines before full runs, in a file beside the journal, so that a restart costs nobody a place.

A line is no part of a run: no entry depends on it. A coordinator with a shared database keeps its lines in memory alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import structlog

from coordinator.clock.wait_queue import LINE_MAX, Line, QueuedPeer, QueuePace, moved
from protos.disk import replace_bytes

NAME = "lines.json"
FILE_BYTES_MAX = 1 << 22
RETURN_MS_MAX = 60_000
"""After a start, the peers that were in the run come back within this time."""


class WaitQueueFile:
    """By run id. `path` None: nothing is kept on the disk."""

    def __init__(self, path: Path | None, now_ms: int) -> None:
        self._path = path
        self._lines: dict[bytes, Line] = {}
        self._paces: dict[bytes, QueuePace | None] = {}
        self._read_ms = now_ms
        if path is not None and path.is_file():
            self._read(path, now_ms)

    def of(self, run_id: bytes) -> Line:
        """The line before a run."""
        return self._lines.get(run_id, {})

    def waits_for_members(self, now_ms: int) -> bool:
        """Whether the coordinator started so recently that places that look free may belong to peers that come back."""
        return now_ms - self._read_ms < RETURN_MS_MAX

    def keep(self, run_id: bytes, line: Line, now_ms: int) -> QueuePace | None:
        """The line is this now. The file is written if somebody came or left. Returns the line's pace since this start."""
        changed = list(self.of(run_id)) != list(line)
        pace = self._paces[run_id] = moved(self._paces.get(run_id), self.of(run_id), line, now_ms)
        self._lines[run_id] = line
        if not line:
            del self._lines[run_id], self._paces[run_id]
        if changed and self._path is not None:
            self._write(self._path)
        return pace

    def _write(self, path: Path) -> None:
        values = {
            run_id.hex(): [[key.hex(), waiting.part] for key, waiting in line.items()]
            for run_id, line in self._lines.items()
        }
        try:  # a stranger's request must not wait for the disk, so a loss of power may cost the places
            replace_bytes(path, json.dumps(values).encode(), synced=False)
        except OSError as error:
            log = structlog.get_logger("coordinator")
            log.warning("the lines before full runs are not kept", step=0, peer="-", why=str(error))

    def _read(self, path: Path, now_ms: int) -> None:
        """A file that cannot be read costs the places in the lines, and nothing else."""
        try:
            with path.open("rb") as file:
                values = json.loads(file.read(FILE_BYTES_MAX))
            self._lines = {
                bytes.fromhex(run_id): {
                    bytes.fromhex(key): QueuedPeer(str(part), now_ms) for key, part in line[:LINE_MAX]
                }
                for run_id, line in values.items()
            }
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            self._lines = {}
            log = structlog.get_logger("coordinator")
            log.warning("the lines before full runs cannot be read; they begin anew", step=0, peer="-", why=str(error))
