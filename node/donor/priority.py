"""The priority of this process among the programs of its machine.

Linux counts the priority of each thread by itself, so every thread gets it; threads and processes that start later inherit it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
LATER = "the system lets a program only lower its priority, so nice {} counts from the next start on"


class Priority:
    """Of this process. Off means the priority that the process started with."""

    def __init__(self) -> None:
        self._first = os.getpriority(os.PRIO_PROCESS, 0)

    def set(self, nice: int | None) -> str:
        """Take the priority. Returns why it cannot be taken now; empty: every thread has it."""
        wanted = self._first if nice is None else max(nice, self._first)
        threads = [int(task.name) for task in TASKS.iterdir()] if sys.platform == "linux" else [0]
        try:
            for thread in threads:
                with suppress(ProcessLookupError):  # it has just ended
                    os.setpriority(os.PRIO_PROCESS, thread, wanted)
        except PermissionError:
            return LATER.format(wanted)
        return ""
