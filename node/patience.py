"""The waits before a failed call is tried again (the first and the longest), and how often the log says so."""

from __future__ import annotations

from protos.waits import Waits

RETRY_SECONDS_MIN = 0.2
RETRY_SECONDS_MAX = 5.0
TOLD_AGAIN_SECONDS = 600.0
"""A call that fails for hours says so again after so long, so that the log of an unattended peer stays short."""


def waits() -> Waits:
    """The waits of one call to others."""
    return Waits(RETRY_SECONDS_MIN, RETRY_SECONDS_MAX)


class Again:
    """Whether a line of the log is worth writing again. Pure: the time comes with each question, in seconds."""

    def __init__(self) -> None:
        self._last, self._at = "", 0.0

    def worth(self, text: str, now: float) -> bool:
        """True for a text that differs from the last one, and TOLD_AGAIN_SECONDS after the last one that was worth it."""
        if text == self._last and now < self._at + TOLD_AGAIN_SECONDS:
            return False
        self._last, self._at = text, now
        return True
