"""Turns with blobs: which holder a peer asks next, and which peer a server serves next. Pure: time and bytes are given.

The peer asks one holder after the other. If a holder sends nothing, the peer keeps waiting, but also asks the next holder. If
a holder sends too slowly, the next holder takes over after the bytes that came. If two begin to send, the slower one stops. A
peer that did not hold the blob may have pulled it meanwhile, so a few of these peers are asked again while nothing comes. If
most peers are known to hold the blob, all waits are shorter. ADR 6.

A blob server has an audience, and the server of pushes has another with its own limits (`node/swarm/pushes.py`). A member of
the open step's roster has streams of its own. Every other peer is a stranger, also a peer that still loads a snapshot and
replays the log. So strangers get the same blobs. All strangers together have a limit of streams, of bytes in memory and of
bytes a second. The last limit is lower while the server serves a member.

If another stranger comes and there is no room, the stranger with the most streams loses one, if it has at least two more than
the new one. Otherwise the server ends the stream that it has waited for longest, of those that have as many as the new one.
Refuses the new stranger if the server waits for none. Streams that wait for their turn to be sent to count like all others:
else a few strangers that ask for much at once would hold all places, and a joiner's new stream, which has not asked yet,
would be the only one to end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from protos.clocks import Waits

# A holder has this long for a blob, and a second more for so many bytes. The lower time counts while the peer could ask other
# holders; after that, the time that a modem needs counts. So a holder that sends a byte now and then delays no peer.
IMPATIENT_SECONDS = 3.0
IMPATIENT_BYTES_A_SECOND = 64_000
# The peer asks the next holder beside a holder that has been silent for this long, and at most so many side by side.
HEDGE_SECONDS = 1.0
ATTEMPTS_MAX = 4
# The same for a payload that the log accepted: a quorum held it, and this peer cannot continue without it. The time is longer
# for more bytes (at IMPATIENT_BYTES_A_SECOND, because this peer's own link may be slow), and for holders that answered late.
HASTE_SECONDS = 0.25
# The peer asks holders that lacked a blob again while others keep it waiting. The peer asks LACKING_ROUND_MAX of them after
# this long, then again after twice as long each time, in LACKING_ROUNDS_MAX rounds.
LACKING_SECONDS = 0.5
LACKING_ROUND_MAX = 4
LACKING_ROUNDS_MAX = 5


@dataclass(eq=False)
class Attempt:
    """A request to one holder for one blob of `total` bytes. `buffer`: the bytes so far, from the blob's first byte on.

    Other holders sent its first `resumed` bytes before. `usual_seconds`: the time that the holder took lately to open a stream
    or, once the stream is `opened`, to answer (`answered`). Times are seconds of one clock.
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
        """The number of bytes that are missing."""
        return self.total - len(self.buffer)

    @property
    def sends(self) -> bool:
        """Whether bytes of the blob came in this attempt."""
        return len(self.buffer) > self.resumed

    @property
    def silent_at(self) -> float:
        """The time at which the holder counts as silent, if nothing comes before."""
        return self.progress_at + HEDGE_SECONDS

    @property
    def quiet_at(self) -> float:
        """As `silent_at`, for a puller in haste: not later, and not before twice the holder's usual time."""
        haste, usual = (
            HASTE_SECONDS + (self.total - self.resumed) / IMPATIENT_BYTES_A_SECOND,
            2 * self.usual_seconds,
        )
        return min(self.silent_at, self.progress_at + max(haste, usual))

    @property
    def late_at(self) -> float:
        """The time at which the holder counts as too slow while the peer has not asked all others."""
        return self.began_at + IMPATIENT_SECONDS + (self.total - self.resumed) / IMPATIENT_BYTES_A_SECOND


class Turns:
    """The turns of one pull. The peer asks at most ATTEMPTS_MAX holders side by side. `drawn`: see `Waits`."""

    def __init__(self, holders: Iterable[bytes], drawn: Callable[[], float]) -> None:
        self._left = deque(dict.fromkeys(holders))  # not asked yet
        self._back: dict[bytes, int] = {}  # holders that gave way and get another turn: the bytes that they sent
        self._gave_way: set[bytes] = set()
        self._lacking: deque[bytes] = deque()
        # The peer asks holders that lacked the blob again, in rounds of a few holders each.
        self._rounds, self._round_left, self._round_at = 0, 0, 0.0
        self._rounds_max, self._hasty = LACKING_ROUNDS_MAX, False
        self._waits = Waits(LACKING_SECONDS, LACKING_SECONDS * 2**LACKING_ROUNDS_MAX, drawn)

    def hasten(self, now: float) -> None:
        """From now on, the peer asks sooner beside a silent holder, and holders that lacked the blob get one more round."""
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
        """The attempt that has to stop, or None. If two holders send, the attempt with fewer bytes stops.

        Otherwise an attempt stops only if another holder waits for its turn. Such an attempt is too slow, or is the oldest of
        too many silent ones. A stopped holder gets one more turn, after all others; the holder that sent most comes first.
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
        """The time at which another holder may be due without an event; None: never."""
        full = len(running) >= ATTEMPTS_MAX
        all_wait_at = max(map(self._waits_at if full else self._company_at, running), default=0.0)
        if self._left or self._back:
            return min([all_wait_at, *(a.late_at for a in running if a.holder not in self._gave_way)])
        if not self._lacking or self._rounds == self._rounds_max or full:
            return None
        return max(all_wait_at, self._round_at)

    def first(self, holder: bytes) -> None:
        """Ask a holder once more, before all others."""
        self._left.appendleft(holder)

    def lacks(self, holder: bytes, now: float) -> None:
        """A holder does not have the blob now."""
        if not self._lacking and not self._rounds:
            self._waits.reset()
            self._round_at = now + self._waits.next()
        self._lacking.append(holder)

    def _again(self, now: float) -> bytes | None:
        """A holder that lacked the blob, if a round is due. Rounds come after LACKING_SECONDS, then twice as long each."""
        if not self._lacking or self._rounds == self._rounds_max or self._round_at > now:
            return None
        self._round_left = (self._round_left or min(len(self._lacking), LACKING_ROUND_MAX)) - 1
        if not self._round_left:
            self._rounds += 1
            self._round_at = now + self._waits.next()
        return self._lacking.popleft()

    def _company_at(self, attempt: Attempt) -> float:
        """The time at which the peer asks others beside the holder: it is silent or, once all had their turn, too slow."""
        return min(self._waits_at(attempt), attempt.quiet_at) if self._hasty else self._waits_at(attempt)

    def _waits_at(self, attempt: Attempt) -> float:
        """The time at which the attempt makes room if the peer asks too many holders."""
        return attempt.silent_at if self._left or self._back else min(attempt.silent_at, attempt.late_at)


STREAMS_A_PEER_MAX = 32
STREAMS_A_STRANGER_MAX = 16
STRANGERS_STREAMS_MAX = 128
# Limits of all strangers together: bytes of blobs in memory at once, and bytes a second. The lower rate counts while the server
# serves a member of the roster: until MEMBERS_SLOW_SECONDS after a part of a blob, because a slow link takes a while for one,
# and until MEMBERS_BUSY_SECONDS after a whole blob. With a longer time, joiners would get the lower rate for good in a swarm
# whose steps are as short. The higher rate costs a part of a core; a joiner is a stranger, and has several holders.
STRANGERS_BYTES_HELD_MAX = 256 << 20
STRANGERS_BYTES_A_SECOND_BUSY = 1 << 20
STRANGERS_BYTES_A_SECOND = 16 << 20
MEMBERS_SLOW_SECONDS = 0.25
MEMBERS_BUSY_SECONDS = 0.05


@dataclass(frozen=True)
class StreamLimits:
    """Of streams: of one member, of one stranger, of all strangers together, and of everybody (None: members have no limit)."""

    of_a_member: int
    of_a_stranger: int
    of_strangers: int
    of_all: int | None = None


@dataclass(eq=False)
class ServedStream:
    """One stream. `waits_since`: when the server began to wait for the other side; None while the other side waits."""

    remote: str
    end: Callable[[], None]
    waits_since: float | None
    held_bytes: int = 0


class Audience:
    """One server's. Without `members` (None) every peer is a member. Without `limits` they are those of a blob server."""

    def __init__(self, members: frozenset[str] | None = None, limits: StreamLimits | None = None) -> None:
        self.members = members
        self._limits = limits or StreamLimits(STREAMS_A_PEER_MAX, STREAMS_A_STRANGER_MAX, STRANGERS_STREAMS_MAX)
        self._seats: dict[ServedStream, None] = {}
        self._free_at = 0.0
        self._member_at = -MEMBERS_SLOW_SECONDS

    def __len__(self) -> int:
        return len(self._seats)

    def is_member(self, remote: str) -> bool:
        """Whether this peer id is in the roster."""
        return self.members is None or remote in self.members

    def admit(self, remote: str, end: Callable[[], None], now: float) -> ServedStream | None:
        """A seat for one more stream of a peer; None: no room. The audience calls `end` if it needs the seat later."""
        member = self.is_member(remote)
        most = self._limits.of_a_member if member else self._limits.of_a_stranger
        own = [seat for seat in self._seats if seat.remote == remote]
        if len(own) >= most and not (not member and self._evict(own)):
            return None
        strangers = self._strangers()
        if not member and len(strangers) >= self._limits.of_strangers and not self._make_room(strangers, len(own)):
            return None
        if self._limits.of_all is not None and len(self._seats) >= self._limits.of_all:
            if not member or not strangers:
                return None
            if not self._evict(strangers):
                self._end(strangers[0])
        seat = ServedStream(remote, end, now)
        self._seats[seat] = None
        return seat

    def leave(self, seat: ServedStream) -> None:
        """The stream has ended."""
        self._seats.pop(seat, None)

    def hold(self, seat: ServedStream, size: int) -> None:
        """The server sends a blob of `size` bytes on the stream, and holds them in memory; 0: the blob is sent."""
        seat.held_bytes = size
        if self.is_member(seat.remote):
            return
        others = [other for other in self._strangers() if other is not seat and other.held_bytes]
        while sum(other.held_bytes for other in others) + size > STRANGERS_BYTES_HELD_MAX:
            if not self._evict(others):
                return
            others = [other for other in others if other in self._seats]

    def delay(self, seat: ServedStream, size: int, now: float) -> float:
        """Seconds to wait before sending so many bytes: none for a member."""
        if self.is_member(seat.remote):
            self._member_at = now
            return 0.0
        served = any(other.held_bytes for other in self._seats if self.is_member(other.remote))
        busy = now - self._member_at < (MEMBERS_SLOW_SECONDS if served else MEMBERS_BUSY_SECONDS)
        rate = STRANGERS_BYTES_A_SECOND_BUSY if busy else STRANGERS_BYTES_A_SECOND
        begins_at = max(self._free_at, now)
        self._free_at = begins_at + size / rate
        return begins_at - now

    def _strangers(self) -> list[ServedStream]:
        return [seat for seat in self._seats if not self.is_member(seat.remote)]

    def _make_room(self, strangers: list[ServedStream], own: int) -> bool:
        """End a stream for one more of a stranger that has `own`. Returns whether there was one to end."""
        streams = Counter(seat.remote for seat in strangers)
        most = max(streams.values())
        if most < own + 2:
            return self._evict([seat for seat in strangers if streams[seat.remote] >= own])
        greedy = [seat for seat in strangers if streams[seat.remote] == most]
        if not self._evict(greedy):
            self._end(greedy[0])
        return True

    def _evict(self, seats: list[ServedStream]) -> bool:
        """End the stream that the server has waited for longest. Returns whether there was one."""
        waiting = [(seat.waits_since, place, seat) for place, seat in enumerate(seats) if seat.waits_since is not None]
        if not waiting:
            return False
        self._end(min(waiting)[2])
        return True

    def _end(self, seat: ServedStream) -> None:
        del self._seats[seat]
        seat.end()
