"""Which holder of a blob is asked next, and when: decided from the time and what came so far, without any stream.

Holders are asked one after the other. Who is silent, or slow, goes on with company: the next one is asked beside it. Who did
not hold the blob may do so a moment later (it pulls it, too), so it is asked again while others keep us waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from node.swarm import settings as limits


@dataclass(eq=False)
class Attempt:
    """One holder is asked for one blob of `total` bytes. `buffer`: what has come, from the blob's first byte on.

    Its first `resumed` bytes had come from others before. Times are seconds of one clock.
    """

    holder: bytes
    total: int
    began_at: float
    buffer: bytearray = field(default_factory=bytearray)
    resumed: int = 0
    progress_at: float = 0.0

    def __post_init__(self) -> None:
        self.resumed, self.progress_at = len(self.buffer), self.began_at

    @property
    def missing(self) -> int:
        """Bytes."""
        return self.total - len(self.buffer)

    @property
    def stalls_at(self) -> float:
        """From when on others are asked beside it, if nothing comes until then: it is silent, or it takes too long."""
        whole = limits.IMPATIENT_SECONDS + (self.total - self.resumed) / limits.IMPATIENT_BYTES_A_SECOND
        return min(self.progress_at + limits.HEDGE_SECONDS, self.began_at + whole)


@dataclass(frozen=True)
class _Lacking:
    """A holder that did not have the blob; it is asked again at `due_at`."""

    due_at: float
    times: int
    holder: bytes


class Turns:
    """Of one pull. At most ATTEMPTS_MAX are asked side by side."""

    def __init__(self, holders: Iterable[bytes]) -> None:
        self._left = deque(dict.fromkeys(holders))
        self._lacking: list[_Lacking] = []
        self._times: dict[bytes, int] = {}
        self._cut: set[bytes] = set()

    def next(self, now: float, running: Collection[Attempt]) -> bytes | None:
        """The holder to ask now; None to wait or, if none is running, because nobody is left."""
        if running and (len(running) >= limits.ATTEMPTS_MAX or any(attempt.stalls_at > now for attempt in running)):
            return None
        if self._left:
            return self._left.popleft()
        soonest = min(self._lacking, key=lambda lacking: lacking.due_at, default=None)
        if not running or soonest is None or soonest.due_at > now:
            return None
        self._lacking.remove(soonest)
        return soonest.holder

    def crowded(self, now: float, running: Collection[Attempt]) -> Attempt | None:
        """Who has to make room for one who was not asked yet: the longest of too many that all keep us waiting.

        It is asked again after all others, once.
        """
        if len(running) < limits.ATTEMPTS_MAX or not self._left or any(attempt.stalls_at > now for attempt in running):
            return None
        longest = min(running, key=lambda attempt: attempt.began_at)
        if longest.holder not in self._cut:
            self._cut.add(longest.holder)
            self._left.append(longest.holder)
        return longest

    def wakes_at(self, running: Collection[Attempt]) -> float | None:
        """When the time alone may call for another holder; None: never."""
        stalled = max((attempt.stalls_at for attempt in running), default=0.0)
        if self._left:
            return stalled
        if not self._lacking or len(running) >= limits.ATTEMPTS_MAX:
            return None
        return max(stalled, min(lacking.due_at for lacking in self._lacking))

    def again(self, holder: bytes) -> None:
        """Ask it once more, before all others."""
        self._left.appendleft(holder)

    def lacks(self, holder: bytes, now: float) -> None:
        """It does not hold the blob now. After LACKING_TIMES_MAX such answers it is asked no more."""
        times = self._times[holder] = self._times.get(holder, 0) + 1
        if times < limits.LACKING_TIMES_MAX:
            self._lacking.append(_Lacking(now + limits.LACKING_SECONDS * 2 ** (times - 1), times, holder))
