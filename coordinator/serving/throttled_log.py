"""Log lines that other programs cause: a refused request, a notice to one peer. Identities are free, and a log is on a disk.

Refuses to log more of them than a disk can take: each cause has a rate, and all causes together have one. A line says how many
before it were left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from coordinator.serving.clocks import monotonic_ms
from protos.rate_limiter import RateLimiter

CAUSE_LINES_MAX, CAUSE_LINE_MS = 60, 1_000
"""Lines of one cause at once, and then one each CAUSE_LINE_MS: a peer that is refused now and then loses none."""
LINES_MAX, LINE_MS = 600, 100
"""The same for all causes: at 200 bytes a line, 170 MB a day."""
CAUSES_KEPT = 4096


class ThrottledLog:
    """The lines of one logger. `log`: a bound logger of structlog."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._by_cause = RateLimiter(CAUSE_LINES_MAX, CAUSE_LINE_MS, CAUSES_KEPT)
        self._all = RateLimiter(LINES_MAX, LINE_MS, 1)
        self._left_out = 0

    def info(self, event: str, cause: Hashable, **values: Any) -> None:
        """Log it, or count it if its cause, or all causes together, have had too many lines."""
        self._say(self._log.info, event, cause, values)

    def warning(self, event: str, cause: Hashable, **values: Any) -> None:
        """As `info`."""
        self._say(self._log.warning, event, cause, values)

    def _say(self, say: Callable[..., Any], event: str, cause: Hashable, values: dict[str, Any]) -> None:
        now_ms = monotonic_ms()
        if not (self._by_cause.allow(cause, now_ms) and self._all.allow("", now_ms)):
            self._left_out += 1
            return
        if self._left_out:
            values["lines_left_out"], self._left_out = self._left_out, 0
        say(event, **values)
