"""A rate limiter: a leaky bucket a key, bounded in the keys that it remembers. Pure: the time is given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class RateLimiter:
    """`burst` at once, and then one more each `each_ms`, by key; the `kept` keys that were asked for last are remembered."""

    def __init__(self, burst: int, each_ms: float, kept: int) -> None:
        self._burst_ms, self._each_ms, self._kept = burst * each_ms, each_ms, kept
        self._paid_until: OrderedDict[Hashable, float] = OrderedDict()

    def allow(self, key: Hashable, now_ms: float) -> bool:
        """Whether this key may act once more; each time moves the time that it is paid for."""
        paid = max(self._paid_until.pop(key, now_ms), now_ms) + self._each_ms
        good = paid <= now_ms + self._burst_ms
        self._paid_until[key] = paid if good else paid - self._each_ms
        while len(self._paid_until) > self._kept:
            self._paid_until.popitem(last=False)
        return good
