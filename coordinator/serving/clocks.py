"""The two clocks of a coordinator. The clocks are read here, so that a test can set either."""

from __future__ import annotations

import time


def monotonic_ms() -> int:
    """The runtime's clock in ms. The clock never goes back, and its readings never cross the wire."""
    return time.monotonic_ns() // 1_000_000


def unix_ms() -> int:
    """The wall clock in ms since 1970. Only the end times of tickets depend on this clock."""
    return time.time_ns() // 1_000_000
