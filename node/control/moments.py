"""How long a pause is that a person gives as a length or as a time of the day. Pure; refuses what is neither."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from protos.errors import OperatorError

UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SECONDS_MAX: Final = 30 * 86400


def seconds_of(length: str | None, until: str | None, now: datetime) -> float | None:
    """Seconds from `now` (local time) on; None if neither is given. Raises OperatorError."""
    if length is not None and until is not None:
        raise OperatorError("--for and --until are two ways to say one thing: give one of them")
    if until is not None:
        return _until(until, now)
    return None if length is None else _length(length)


def _length(text: str) -> float:
    found = re.fullmatch(r"(\d{1,7})([smhd])", text.strip())
    seconds = int(found[1]) * UNIT_SECONDS[found[2]] if found else 0
    if not 0 < seconds <= SECONDS_MAX:
        raise OperatorError(f"--for {text}: expected a number and s, m, h or d, such as 90m or 2h; at most 30d")
    return float(seconds)


def _until(text: str, now: datetime) -> float:
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip())
    if found is None or int(found[1]) > 23 or int(found[2]) > 59:
        raise OperatorError(f"--until {text}: expected a time of the day such as 18:00")
    then = now.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
    if then <= now:
        then += timedelta(days=1)
    return then.timestamp() - now.timestamp()  # on a day with a change of the clock, too
