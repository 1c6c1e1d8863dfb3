"""`python -m coordinator`, but it stops (SIGSTOP) right before it writes its N-th entry.

`python -m tests.system.stalling_coordinator N serve ...`: so it goes on in the worst moment, when the entry is decided and
about to be written. Not a test: tests/system/test_failover.py starts it.
"""

import os
import signal
import sys
import time
from typing import Any

from coordinator.__main__ import main
from coordinator.clock.effects import EntryCommitted
from coordinator.store.journal import FencedError, Journal

REFUSED = "the entry was refused"


def arm(number: int) -> None:
    """Stop before the n-th entry."""
    append, seen = Journal.append, [0]

    def stalling(self: Journal, run_id: bytes, *records: Any) -> None:
        decides = any(isinstance(record, EntryCommitted) for record in records)
        seen[0] += decides
        if seen[0] == number and decides:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # the signal stops all threads, this one perhaps not at once
            try:
                append(self, run_id, *records)
            except FencedError as error:
                print(f"{REFUSED}: {error}", file=sys.stderr, flush=True)
                raise
            return
        append(self, run_id, *records)

    Journal.append = stalling  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(int(sys.argv[1]))
    sys.argv[1:2] = []
    main()
