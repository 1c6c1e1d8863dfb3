"""The audience of a server: it serves members of the roster at once, and strangers from the rest. Pure: the time is given.

A blob server has one, and the server of pushes has another with its own limits (`node/swarm/pushes.py`).

A member of the open step's roster has streams of its own. Every other peer is a stranger, also a peer that still loads a
snapshot and replays the log. So strangers get the same blobs. All strangers together have a limit of streams, of bytes in
memory and of bytes a second. The last limit is lower while the server serves a member.

If another stranger comes and there is no room, the stranger with the most streams loses one, if it has at least two more than
the new one. Otherwise the server ends the stream that it has waited for longest, of those that have as many as the new one.
Refuses the new stranger if the server waits for none. Streams that wait for their turn to be sent to count like all others:
else a few strangers that ask for much at once would hold all places, and a joiner's new stream, which has not asked yet,
would be the only one to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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
