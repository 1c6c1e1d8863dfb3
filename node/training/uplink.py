"""The size of this peer's votes follows the bytes that the uplink carries in the time that a step allows. Pure; knows no clock.

The module assumes that a payload's time to a typical peer, as the pullers report it, grows with the payload's bytes. The size
moves one place at a time. The size moves up (more bytes) only if the larger payload should take clearly less than the budget.
The size moves down as soon as the present payload takes more. Refuses to guess: without reports nothing changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

REPORTS_KEPT = 5
"""How many arrivals and computations a median is over."""

ROOM = 0.7
"""A larger payload must fit in this part of the budget, so that the size does not swing."""

SENT_MAX = 16
"""Published payloads without a report."""


class VoteSize:
    """Chooses among `payload_bytes`, from each size (group size or k) to the bytes of its payload."""

    def __init__(self, payload_bytes: Mapping[int, int], size: int, budget: float) -> None:
        assert size in payload_bytes, f"{size} is none of {sorted(payload_bytes)}"
        self._bytes = dict(payload_bytes)
        self._order = sorted(self._bytes, key=lambda choice: self._bytes[choice])
        self.size = size
        self._budget = budget
        self._sent: dict[bytes, int] = {}
        self._arrivals: deque[float] = deque(maxlen=REPORTS_KEPT)
        self._computed: deque[float] = deque(maxlen=REPORTS_KEPT)

    def sent(self, sha256: bytes, size: int) -> None:
        """This peer has published a payload of `size`, without a report so far. The oldest payloads are forgotten."""
        self._sent[sha256] = size
        while len(self._sent) > SENT_MAX:
            del self._sent[next(iter(self._sent))]

    def heard(self, milliseconds: Callable[[bytes], float | None]) -> None:
        """Take the reports on published payloads: `milliseconds` says how long each took, None without a report."""
        for sha256, size in list(self._sent.items()):
            took = milliseconds(sha256)
            if took is not None:
                self.arrived(size, took)
                del self._sent[sha256]

    def arrived(self, size: int, milliseconds: float) -> None:
        """A payload of `size` took so long to reach a typical peer. A report on an earlier size is too old to count."""
        if size == self.size:
            self._arrivals.append(milliseconds)

    def computed(self, milliseconds: float) -> None:
        """This peer's computation of a step took so long. The budget is a part of this time."""
        self._computed.append(milliseconds)

    def fit(self, milliseconds: Callable[[bytes], float | None], computed_ms: float) -> int:
        """The size for the next step, after all that was heard and a computation of so long."""
        self.heard(milliseconds)
        self.computed(computed_ms)
        return self.choose()

    def choose(self) -> int:
        """The size for the next step."""
        if len(self._arrivals) < REPORTS_KEPT or not self._computed:
            return self.size
        allowed, took = self._budget * median(self._computed), median(self._arrivals)
        place = self._order.index(self.size)
        if took > allowed and place > 0:
            self._move(place - 1)
        elif place + 1 < len(self._order):
            expected = took * self._bytes[self._order[place + 1]] / self._bytes[self.size]
            if expected < ROOM * allowed:
                self._move(place + 1)
        return self.size

    def _move(self, place: int) -> None:
        self.size = self._order[place]
        self._arrivals.clear()
