"""Log lines that strangers cause have a rate, and say how many were left out."""

from typing import Any

import pytest

from coordinator.serving import metrics, throttled_log
from coordinator.serving.metrics import Failures, Metrics
from coordinator.serving.throttled_log import ThrottledLog


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append({"event": event, **values})


def test_a_cause_and_all_causes_have_a_rate_and_nothing_is_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(throttled_log, "monotonic_ms", lambda: now[0])
    log = Log()
    lines = ThrottledLog(log)
    for _ in range(1_000):
        lines.info("refused", b"one")
    lines.info("refused", b"two")
    assert len(log.lines) == throttled_log.CAUSE_LINES_MAX + 1
    assert log.lines[-1] == {"event": "refused", "lines_left_out": 1_000 - throttled_log.CAUSE_LINES_MAX}
    for number in range(5_000):
        lines.info("refused", number)
    assert len(log.lines) == throttled_log.LINES_MAX
    now[0] = 10 * throttled_log.LINE_MS
    for number in range(5_000):
        lines.info("refused", -number)
    assert len(log.lines) == throttled_log.LINES_MAX + 10


def test_refused_joins_fill_no_log_and_a_version_is_of_plain_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger caused ten lines a second from one address, and as many addresses as it had."""
    monkeypatch.setattr(throttled_log, "monotonic_ms", lambda: 0)
    log = Log()
    monkeypatch.setattr(metrics.structlog, "get_logger", lambda _: log)  # type: ignore[attr-defined]
    found = Failures(Metrics())
    for number in range(1_000):
        found.count(bytes(32), 1, f"{number}.٣.１")
    assert len(log.lines) == throttled_log.CAUSE_LINES_MAX
    assert [(row.software_version, row.count) for row in found.of(bytes(32))] == [(metrics.OTHER, 1_000)]
