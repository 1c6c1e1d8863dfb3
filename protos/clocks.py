"""This machine's clocks, read here so that a test can set either; and whether the wall clock is wrong, against a coordinator's
and against the date of this software.

No decision of a run depends on a peer's wall clock: deadlines are monotonic. `hours`, the month's traffic, logs, QUIC and the
relays of libp2p depend on it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final

from protos.text import duration

APART_SECONDS_MAX: Final = 300.0
"""Clocks that nobody sets drift by some seconds a day."""
MADE: Final = datetime(2026, 11, 1, tzinfo=UTC)
"""This software is not older: a machine without a battery for its clock starts in 1970 or 2000."""
SET_IT: Final = "Set this machine's clock (for example `timedatectl set-ntp true`)."

_LAST_MS: Final = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp() * 1000)


def monotonic_ms() -> int:
    """A clock in ms that never goes back. Its readings never cross the wire."""
    return time.monotonic_ns() // 1_000_000


def unix_ms() -> int:
    """The wall clock in ms since 1970. Of a coordinator, only the end times of tickets depend on this clock."""
    return time.time_ns() // 1_000_000


def wrong(now: datetime, coordinator_unix_ms: int = 0) -> str:
    """What is wrong with a clock that says `now`; empty if nothing is known against it.

    `coordinator_unix_ms`: the coordinator's clock at the same moment; 0: not known.
    """
    return too_early(now) or apart(now, coordinator_unix_ms)


def too_early(now: datetime) -> str:
    """What is wrong with a clock from before this software was made; else empty."""
    return f"{_said(now)}, and this software is younger" if now < MADE else ""


def apart(now: datetime, coordinator_unix_ms: int) -> str:
    """How a clock differs from the coordinator's; empty if it does not, if that is not known, or if it is `too_early`."""
    if now < MADE or not 0 < coordinator_unix_ms <= _LAST_MS:
        return ""
    there = datetime.fromtimestamp(coordinator_unix_ms / 1000, UTC)
    seconds = abs((now - there).total_seconds())
    if seconds <= APART_SECONDS_MAX:
        return ""
    return f"{_said(now)}, and the coordinator's says {there:%Y-%m-%d %H:%M} UTC: they are {duration(seconds)} apart"


def _said(now: datetime) -> str:
    return f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
