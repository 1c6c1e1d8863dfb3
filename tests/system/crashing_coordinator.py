"""`python -m coordinator`, but it dies like kill -9 at a journal write: `... crashing_coordinator before|after N serve ...`.

N counts the writes of this process, from 1. Not a test: tests/system/test_coordinator_process.py starts it.
"""

import os
import sys
from typing import Any

from coordinator.__main__ import main
from coordinator.store.journal import Journal

KILLED = 9


def arm(when: str, write: int) -> None:
    """Die before or after the n-th write."""
    append, seen = Journal.append, [0]

    def dying(self: Journal, *args: Any) -> None:
        seen[0] += 1
        if seen[0] == write and when == "before":
            os._exit(KILLED)
        append(self, *args)
        if seen[0] == write and when == "after":
            os._exit(KILLED)

    Journal.append = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    sys.argv[1:3] = []
    main()
