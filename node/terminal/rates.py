"""Bytes a second now, from totals at two times. Pure: the time is given."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 10.0


class Rates:
    """Of bytes up and down, over the last WINDOW_SECONDS: votes come in bursts, one a step."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def between(self, now: float, up: int, down: int) -> tuple[float | None, float | None]:
        """Bytes a second up and down; None before there are two totals. A total that fell is that of a new start."""
        if self._seen and (up < self._seen[-1][1] or down < self._seen[-1][2]):
            self._seen.clear()
        self._seen.append((now, up, down))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_SECONDS:
            self._seen.popleft()
        then, first_up, first_down = self._seen[0]
        if now <= then:
            return None, None
        return (up - first_up) / (now - then), (down - first_down) / (now - then)
