"""How many calls may be under way, by where they come from. Pure: who takes a place gives it back.

Each kind of call (`Lane`) has places of its own, so that what strangers may ask holds up nothing that peers say. Of each
lane, one network address has so many; all addresses together have so many, but an address of a peer that has a session
always finds room up to its own limit. A call that follows the log holds a place only until its session is known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from protos.rate import Rate


class Lane(Enum):
    """What kind of call it is."""

    PEERS = "peers"  # Report, Follow until its session is known
    JOINING = "joining"  # GetChallenge, MayJoin, Join
    READING = "reading"  # GetRun, ListEntries
    HEALTH = "health"  # health, reflection
    OPERATOR = "operator"


LOOPBACK = "loopback"


@dataclass(frozen=True)
class Limits:
    """Of one lane: calls under way of one address, of this machine, of all; calls of one address at once, and one more
    each so many milliseconds."""

    address_max: int
    loopback_max: int
    all_max: int
    burst: int
    each_ms: float


LIMITS = {
    # a NAT with 256 peers and this machine with as many: each has two reports under way at most
    Lane.PEERS: Limits(1024, 1024, 8192, 5000, 1),
    Lane.JOINING: Limits(64, 512, 512, 2000, 5),
    Lane.READING: Limits(32, 256, 256, 600, 10),
    Lane.HEALTH: Limits(16, 64, 256, 600, 5),
    Lane.OPERATOR: Limits(8, 32, 32, 100, 20),
}
ADDRESSES_KEPT = 4096


class Places:
    """Of one coordinator. `site` is what `protos.address.site` makes of a connection's address."""

    def __init__(self, limits: dict[Lane, Limits] | None = None) -> None:
        self._limits = limits or LIMITS
        self._taken: Counter[tuple[Lane, str]] = Counter()
        self._all: Counter[Lane] = Counter()
        self._rates: dict[Lane, Rate] = {
            lane: Rate(it.burst, it.each_ms, ADDRESSES_KEPT) for lane, it in self._limits.items()
        }

    def take(self, lane: Lane, site: str, now_ms: float, *, known: bool) -> str | None:
        """Take a place; if there is none, why not. `known`: a peer with a session is at this address."""
        limits, key = self._limits[lane], (lane, site)
        if self._taken[key] >= (limits.loopback_max if site == LOOPBACK else limits.address_max):
            return f"{self._taken[key]} calls of your network address are under way; try again in a second"
        if self._all[lane] >= limits.all_max and not known:
            return f"{self._all[lane]} calls are under way; try again in a second"
        if not self._rates[lane].may(site, now_ms):
            return "too many calls from your network address; try again in a second"
        self._taken[key] += 1
        self._all[lane] += 1
        return None

    def give(self, lane: Lane, site: str) -> None:
        """Give a place back that was taken."""
        key = (lane, site)
        assert self._taken[key] > 0, "a place is given back that nobody took"
        self._taken[key] -= 1
        self._all[lane] -= 1
        if not self._taken[key]:
            del self._taken[key]

    def taken(self, lane: Lane) -> int:
        """How many are."""
        return self._all[lane]
