"""`python -m node`, but each read of its training data takes a while: a share on a bad link, an old disk.

`python -m tests.system.slow_data SECONDS join ...`. Not a test: tests/system/test_faults.py starts it.
"""

import sys
import time
from typing import Any

from node.__main__ import main
from node.data.tokens import FileTokens


def slow_down(seconds: float) -> None:
    """Every window takes so long."""
    read = FileTokens._read

    def slow(self: FileTokens, start: int, length: int) -> Any:
        time.sleep(seconds)
        return read(self, start, length)

    FileTokens._read = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(sys.argv[1]))
    sys.argv[1:2] = []
    main()
