"""Log lines that are bounded, because identities are free, a log is on a disk, and a fault may last for hours.

`ThrottledLog` has the lines that other programs cause: a refused request, a notice to one peer. It refuses to log more of
them than a disk can take: each cause has a rate, and all causes together have one. A line says how many before it were left
out.

`Trouble` is a journal that takes no writes: said once as an error, counted, and told to everybody who asks. Most often a
disk is full. Nothing is lost meanwhile: a step is decided only in the journal. It refuses to try again at each event: after
a failure the run waits for a second, then for longer, up to RETRY_MS_MAX. Each try reads the journal, and peers connect
again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

from coordinator.store.journal import FullDiskError, JournalError
from protos.clocks import Waits, monotonic_ms
from protos.limits import RateLimiter

if TYPE_CHECKING:
    from coordinator.serving.metrics import Metrics

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
        self._say(self._log.warning, event, cause, values)

    def _say(self, say: Callable[..., Any], event: str, cause: Hashable, values: dict[str, Any]) -> None:
        now_ms = monotonic_ms()
        if not (self._by_cause.allow(cause, now_ms) and self._all.allow("", now_ms)):
            self._left_out += 1
            return
        if self._left_out:
            values["lines_left_out"], self._left_out = self._left_out, 0
        say(event, **values)


RETRY_MS_MIN: Final = 1_000
RETRY_MS_MAX: Final = 5_000
SAY_AGAIN_MS: Final = 60_000
FULL: Final = "the coordinator's disk is full: no step is decided until there is room, and nothing is lost"
FAILING: Final = "the coordinator cannot write its journal: no step is decided until it can, and nothing is lost"


class Trouble:
    """Of one run. `why`: for peers and `status`, without paths of the coordinator's machine; empty while writes succeed."""

    def __init__(self, log: Any, metrics: Metrics, run: str) -> None:
        self._log, self._metrics, self._run = log, metrics, run
        self.why = ""
        self._since_ms = self._said_ms = self._again_ms = 0
        self._waits = Waits(RETRY_MS_MIN, RETRY_MS_MAX)
        metrics.journal_failing.labels(run).set(0)

    def check(self, now_ms: int) -> None:
        """Raises JournalError until it is time to try again."""
        if self.why and now_ms < self._again_ms:
            raise JournalError(self.why)

    def failed(self, error: JournalError, now_ms: int, step: int) -> int:
        """A write or a read failed. Returns when to try again."""
        first = not self.why
        self.why = FULL if isinstance(error, FullDiskError) else FAILING
        self._metrics.journal_failures.labels(self._run).inc()
        self._metrics.journal_failing.labels(self._run).set(1)
        if first:
            self._since_ms = now_ms
            self._waits.reset()
        if first or now_ms - self._said_ms >= SAY_AGAIN_MS:
            self._said_ms = now_ms
            self._log.error(self.why, step=step, peer="-", error=str(error), seconds=(now_ms - self._since_ms) // 1000)
        self._again_ms = now_ms + round(self._waits.next())
        return self._again_ms

    def refused(self, lines: ThrottledLog, cause: bytes, values: dict[str, Any]) -> None:
        """Log a refused request. After a failed write no peer is connected, and is told why: that is no line of its own."""
        if not self.why:
            lines.info("a request was refused", cause, **values)

    def over(self, now_ms: int, step: int) -> None:
        """A write succeeded."""
        if self.why:
            self.why = ""
            self._metrics.journal_failing.labels(self._run).set(0)
            seconds = round((now_ms - self._since_ms) / 1000, 1)
            self._log.warning("the journal can be written again; the run goes on", step=step, peer="-", seconds=seconds)
