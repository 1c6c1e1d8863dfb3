"""How far the download of a state is, in words: bytes, rate, time left. Pure: the time comes with each question."""

from __future__ import annotations

from typing import Final

from protos.amounts import amount, duration

TOLD_SECONDS: Final = 5.0
"""The log has a line about it so often."""
RATE_SECONDS: Final = 0.5
"""No rate is told before: it would say nothing."""


class Loading:
    """One state's download."""

    def __init__(self) -> None:
        self.words = ""
        """For people; empty while no state is being loaded."""
        self._began: tuple[float, int] | None = None
        self._told_at = 0.0

    def came(self, done: int, total: int, now: float) -> bool:
        """`done` of `total` bytes are here, at `now` seconds. Whether the log should tell."""
        if self._began is None or done < self._began[1]:
            self._began, self._told_at = (now, done), now - TOLD_SECONDS
        since, first = self._began
        self.words = f"loading the state: {amount(done)} of {amount(total)}"
        if now - since >= RATE_SECONDS and done > first:
            rate = (done - first) / (now - since)
            self.words += f", {amount(rate)}/s"
            if done < total:
                self.words += f", {duration((total - done) / rate)} left"
        if done < total and now - self._told_at < TOLD_SECONDS:
            return False
        self._told_at = now
        return True

    def waits(self, words: str) -> None:
        """Nobody who has the state is here."""
        self.words = words

    def ended(self) -> None:
        """The state is here, or its download failed."""
        self.words, self._began = "", None
