"""Places for calls, by the network address of the caller. Pure: a caller that takes a place gives it back.

Each kind of call (`Lane`) has places of its own, so that calls of strangers do not delay peers. Each lane limits the calls
of one network address, and of all together. An address of a peer with a session always finds room up to its own limit. The
newest connection of a peer with a session has its own places. No stranger takes these, not even one at the same address.
An operator on the coordinator's own machine finds room, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from protos.limits import RateLimiter


class Lane(Enum):
    """The kind of a call."""

    PEERS = "peers"  # Report; Follow until its session is known
    JOINING = "joining"  # GetChallenge, MayJoin, Join
    READING = "reading"  # GetRun, ListEntries
    HEALTH = "health"  # gRPC health
    OPERATOR = "operator"


@dataclass(frozen=True)
class CallLimits:
    """Limits of one lane: calls under way from one address, from this machine, from all. An address may make `burst` calls
    at once, and one more each `each_ms` milliseconds."""

    address_max: int
    loopback_max: int
    all_max: int
    burst: int
    each_ms: float


LIMITS = {
    # For a NAT with 256 peers, and this machine with as many: each sends one call at a time before its session is known.
    Lane.PEERS: CallLimits(512, 1024, 8192, 5000, 1),
    Lane.JOINING: CallLimits(64, 512, 512, 2000, 5),
    Lane.READING: CallLimits(32, 256, 256, 600, 10),
    Lane.HEALTH: CallLimits(16, 64, 256, 600, 5),
    Lane.OPERATOR: CallLimits(8, 32, 32, 100, 20),
}
LOOPBACK = "loopback"
SESSION_CALLS_MAX = 32
"""Calls on the connection of a peer with a session: the peer follows, and makes two or three other calls at a time."""
CONNECTIONS_KNOWN_MAX = 16_384
ADDRESSES_KEPT = 4096


@dataclass(frozen=True)
class Caller:
    """The origin of a call: a site (`protos.address.site`) and a connection; `known`: a peer with a session is at the site."""

    site: str
    connection: str
    known: bool = False


class Places:
    """The places of one coordinator."""

    def __init__(self, limits: Mapping[Lane, CallLimits] | None = None) -> None:
        self._limits = LIMITS if limits is None else limits
        self._taken: Counter[tuple[Lane, str]] = Counter()  # by lane and site
        self._all: Counter[Lane] = Counter()
        self._own: Counter[str] = Counter()  # by connection of a session
        self._sessions: OrderedDict[bytes, str] = OrderedDict()
        self._connections: Counter[str] = Counter()
        self._rates = {lane: RateLimiter(it.burst, it.each_ms, ADDRESSES_KEPT) for lane, it in self._limits.items()}

    def met(self, session_id: bytes, connection: str) -> None:
        """A peer with a session speaks over a connection; the one that it used before is a stranger's again."""
        before = self._sessions.pop(session_id, None)
        if before is not None:
            self._forget(before)
        self._sessions[session_id] = connection
        self._connections[connection] += 1
        while len(self._sessions) > CONNECTIONS_KNOWN_MAX:
            self._forget(self._sessions.popitem(last=False)[1])

    def _forget(self, connection: str) -> None:
        self._connections[connection] -= 1
        if not self._connections[connection]:
            del self._connections[connection]

    def acquire(self, lane: Lane, caller: Caller, now_ms: float) -> CallSlot | str:
        """A place, or why there is none."""
        limits, key, own = self._limits[lane], (lane, caller.site), caller.connection in self._connections
        if own and self._own[caller.connection] >= SESSION_CALLS_MAX:
            return f"{SESSION_CALLS_MAX} calls of your connection are under way; try again in a second"
        if not own and self._taken[key] >= (limits.loopback_max if caller.site == LOOPBACK else limits.address_max):
            return f"{self._taken[key]} calls of your network address are under way; try again in a second"
        here = lane is Lane.OPERATOR and caller.site == LOOPBACK
        if not own and self._all[lane] >= limits.all_max and not (caller.known or here):
            return f"{self._all[lane]} calls are under way; try again in a second"
        if not self._rates[lane].allow(caller.connection if own else caller.site, now_ms):
            return "too many calls from your network address; try again in a second"
        if own:
            self._own[caller.connection] += 1
            return CallSlot(self, None, caller.connection)
        self._taken[key] += 1
        self._all[lane] += 1
        return CallSlot(self, lane, caller.site)

    def release(self, lane: Lane | None, where: str) -> None:
        """A place is free again: of a lane and site, or (without a lane) of a session's connection."""
        if lane is None:
            _less(self._own, where)
        else:
            _less(self._taken, (lane, where))
            _less(self._all, lane)


class CallSlot:
    """A place that one call has, until `leave`; safe to leave twice."""

    def __init__(self, places: Places, lane: Lane | None, where: str) -> None:
        self._places, self._lane, self._where, self._held = places, lane, where, True

    def __enter__(self) -> None:
        """The call begins."""

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """The call needs it no more."""
        if self._held:
            self._held = False
            self._places.release(self._lane, self._where)


def _less(counter: Counter[str] | Counter[Lane] | Counter[tuple[Lane, str]], key: object) -> None:
    counted: Counter[object] = counter  # type: ignore[assignment]
    assert counted[key] > 0, "a place is given back that nobody took"
    counted[key] -= 1
    if not counted[key]:
        del counted[key]
