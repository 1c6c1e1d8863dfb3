"""Decides which holder of a blob a peer asks next, and when, from the time and the bytes that came. Knows no stream.

The peer asks one holder after the other. If a holder sends nothing, the peer keeps waiting, but also asks the next holder. If
a holder sends too slowly, the next holder takes over after the bytes that came. If two begin to send, the slower one stops. A
peer that did not hold the blob may have pulled it meanwhile, so a few of these peers are asked again while nothing comes. If
most peers are known to hold the blob, all waits are shorter. ADR 24.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from node.blobs import blobs

# A holder has this long for a blob, and a second more for so many bytes. While other holders could be asked, the lower time
# counts; after that, the time that a modem would need. So a holder that sends a byte now and then delays nobody.
IMPATIENT_SECONDS = 3.0
# How long one holder may be silent before the next is asked beside it, and how many are asked side by side.
HEDGE_SECONDS = 1.0
ATTEMPTS_MAX = 4
# The same for a payload that the log accepted: a quorum held it, and this peer cannot go on without it. Longer for more bytes
# (at IMPATIENT_BYTES_A_SECOND: our own link may be what is slow) and for holders that took long to answer lately.
HASTE_SECONDS = 0.25
# Those who do not hold a blob are asked again while others keep us waiting: so many after this long, then after twice as
# long each, in so many rounds.
LACKING_SECONDS = 0.5
LACKING_ROUND_MAX = 4
LACKING_ROUNDS_MAX = 5


@dataclass(eq=False)
class Attempt:
    """One holder is asked for one blob of `total` bytes. `buffer`: what has come, from the blob's first byte on.

    Its first `resumed` bytes had come from others before. `usual_seconds`: what the holder took lately for what is waited
    for: to open a stream or, once it is `opened`, to answer (`answered`). Times are seconds of one clock.
    """

    holder: bytes
    total: int
    began_at: float
    buffer: bytearray = field(default_factory=bytearray)
    usual_seconds: float = 0.0
    resumed: int = field(init=False)
    progress_at: float = field(init=False)
    opened: bool = field(init=False, default=False)
    answered: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.resumed, self.progress_at = len(self.buffer), self.began_at

    @property
    def missing(self) -> int:
        """Bytes."""
        return self.total - len(self.buffer)

    @property
    def sends(self) -> bool:
        """Whether bytes of the blob came in this attempt."""
        return len(self.buffer) > self.resumed

    @property
    def silent_at(self) -> float:
        """From when on it is silent, if nothing comes until then."""
        return self.progress_at + HEDGE_SECONDS

    @property
    def quiet_at(self) -> float:
        """As `silent_at`, for a puller in haste: not later, and not before it is longer than usual."""
        haste = HASTE_SECONDS + (self.total - self.resumed) / blobs.IMPATIENT_BYTES_A_SECOND
        return min(self.silent_at, self.progress_at + max(haste, 2 * self.usual_seconds))

    @property
    def late_at(self) -> float:
        """From when on it is too slow while others were not asked yet."""
        return self.began_at + IMPATIENT_SECONDS + (self.total - self.resumed) / blobs.IMPATIENT_BYTES_A_SECOND


class Turns:
    """Of one pull. At most ATTEMPTS_MAX are asked side by side."""

    def __init__(self, holders: Iterable[bytes]) -> None:
        self._left = deque(dict.fromkeys(holders))  # not asked yet
        self._back: dict[bytes, int] = {}  # gave way, and will be asked again: how many bytes they sent
        self._gave_way: set[bytes] = set()
        self._lacking: deque[bytes] = deque()
        # Those who lacked the blob are asked again in rounds, each for a few of them.
        self._rounds, self._round_left, self._round_at = 0, 0, 0.0
        self._rounds_max, self._hasty = LACKING_ROUNDS_MAX, False

    def hasten(self, now: float) -> None:
        """From now on, others are asked beside a silent one sooner, and another round of those who lacked it is due."""
        if not self._hasty:
            self._hasty, self._round_at = True, min(self._round_at, now)
            self._rounds_max += 1

    def next(self, now: float, running: Collection[Attempt]) -> bytes | None:
        """The holder to ask now; None to wait or, if none is running, because nobody is left."""
        if len(running) >= ATTEMPTS_MAX or any(self._company_at(attempt) > now for attempt in running):
            return None
        if self._left:
            return self._left.popleft()
        if self._back:
            best = max(self._back, key=self._back.__getitem__)
            del self._back[best]
            return best
        return self._again(now) if running else None

    def gives_way(self, now: float, running: Collection[Attempt]) -> Attempt | None:
        """Who has to stop: the one that is behind of two that send; or, for one that was not asked yet, one that is too slow
        or the longest of too many silent ones.

        It is asked again after all others, once, who sent more first.
        """
        sending = [attempt for attempt in running if attempt.sends and attempt.silent_at > now]
        if len(sending) > 1:
            return self._stop(min(sending, key=lambda attempt: (len(attempt.buffer), -attempt.began_at)))
        if not self._left and not self._back:
            return None
        chosen = [attempt for attempt in running if attempt.late_at <= now and attempt.holder not in self._gave_way]
        if len(running) >= ATTEMPTS_MAX and all(self._waits_at(attempt) <= now for attempt in running):
            chosen = chosen or list(running)
        if not chosen:
            return None
        return self._stop(min(chosen, key=lambda attempt: attempt.began_at))

    def _stop(self, attempt: Attempt) -> Attempt:
        if attempt.holder not in self._gave_way:
            self._gave_way.add(attempt.holder)
            self._back[attempt.holder] = len(attempt.buffer) - attempt.resumed
        return attempt

    def wakes_at(self, running: Collection[Attempt]) -> float | None:
        """When the time alone may call for another holder; None: never."""
        full = len(running) >= ATTEMPTS_MAX
        all_wait_at = max(map(self._waits_at if full else self._company_at, running), default=0.0)
        if self._left or self._back:
            return min([all_wait_at, *(a.late_at for a in running if a.holder not in self._gave_way)])
        if not self._lacking or self._rounds == self._rounds_max or full:
            return None
        return max(all_wait_at, self._round_at)

    def first(self, holder: bytes) -> None:
        """Ask it once more, before all others."""
        self._left.appendleft(holder)

    def lacks(self, holder: bytes, now: float) -> None:
        """It does not hold the blob now."""
        if not self._lacking and not self._rounds:
            self._round_at = now + LACKING_SECONDS
        self._lacking.append(holder)

    def _again(self, now: float) -> bytes | None:
        """One that lacked it, if a round is on or due. Rounds come after LACKING_SECONDS, then after twice as long each."""
        if not self._lacking or self._rounds == self._rounds_max or self._round_at > now:
            return None
        self._round_left = (self._round_left or min(len(self._lacking), LACKING_ROUND_MAX)) - 1
        if not self._round_left:
            self._rounds += 1
            self._round_at = now + LACKING_SECONDS * 2**self._rounds
        return self._lacking.popleft()

    def _company_at(self, attempt: Attempt) -> float:
        """From when on others are asked beside it: if it is silent or, once all have had their turn, if it is too slow."""
        return min(self._waits_at(attempt), attempt.quiet_at) if self._hasty else self._waits_at(attempt)

    def _waits_at(self, attempt: Attempt) -> float:
        """From when on it makes room where too many are asked."""
        return attempt.silent_at if self._left or self._back else min(attempt.silent_at, attempt.late_at)
