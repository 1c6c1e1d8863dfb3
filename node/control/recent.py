"""The last lines of a peer's log, for its owner's eyes: bounded, in memory, and without the line that every step writes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import MutableMapping
from typing import Any

from protos.text import printable

LINES_KEPT = 50
LINE_CHARACTERS_MAX = 300
STEP_EVENT = "step"
UNSAID = ("event", "level", "timestamp", "peer", "step", "exc_info", "exception")


class RecentLogLines:
    """A structlog processor: it keeps what passes, and changes nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)

    def __call__(self, _logger: Any, _method: str, values: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if values.get("event") != STEP_EVENT and _weight(values) >= logging.INFO:
            with self._lock:
                self._lines.append(_line(values))
        return values

    def last(self, count: int = LINES_KEPT) -> list[dict[str, Any]]:
        """The last lines, the newest last: `at` (ISO 8601, UTC), `level` and `text`."""
        with self._lock:
            return list(self._lines)[-count:]


def _weight(values: MutableMapping[str, Any]) -> int:
    found = logging.getLevelName(str(values.get("level", "info")).upper())
    return found if isinstance(found, int) else logging.INFO


def _words(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)


def _line(values: MutableMapping[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in values.items() if name not in UNSAID}
    said = ", ".join(_words(value) if name == "why" else f"{name} {_words(value)}" for name, value in told.items())
    text = f"{values.get('event', '')}: {said}" if said else str(values.get("event", ""))
    return {
        "at": str(values.get("timestamp", "")),
        "level": str(values.get("level", "info")),
        "text": printable(text, LINE_CHARACTERS_MAX),
    }
