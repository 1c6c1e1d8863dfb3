"""The file of a peer's log lines while its terminal shows the view. Bounded: beyond its limit it replaces `peer.log.1`.

Refuses to end the peer: a line that the disk does not take is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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
