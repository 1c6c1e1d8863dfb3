"""Relays: a peer takes them if others cannot dial it, and is one for others within its owner's bound. ADR 20, ADR 50.

`Finder` finds out whether others can dial this peer. Refuses to do anything if a person has said how the peer is reached.
Refuses to believe one answer: `reach.conclude` decides.

p2pd counts what this peer relays, and has no limit of a rate. So the bound is one of the mean: a peer that has relayed more
than its owner gives stops being a relay until it has caught up. Refuses to guess: bytes that p2pd does not tell do not count,
and where they are bounded, a p2pd that has told nothing for SILENT_SECONDS relays no more (its port for figures may be another
program's).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from node.overlay.daemon import Daemon
from node.overlay.links import CIRCUIT, Links
from node.overlay.reach import RELAYS_WANTED, Opener, ReachResult, ReachState, Remote, ask_all, conclude, tcp_ports
from protos.clocks import Waits
from protos.errors import NetworkError

LOOK_SECONDS = 10.0
# A peer asks again after so long: its router may have got another address, or its owner may have opened a port. While it lacks
# an answer or a relay, it looks every LACKING_SECONDS, and asks when it has a new connection. Otherwise it asks after
# LACKING_SECONDS, then twice as long, ...: its first public peer becomes a relay only once others have dialled that peer back.
LACKING_SECONDS = 2.0
ASK_AGAIN_SECONDS = 300.0
RESERVED_SECONDS_MAX = 10.0
BEGIN_SECONDS_MAX = 2.0
POLL_SECONDS = 0.1
# A relay that is gone in so many looks in a row, or that has forgotten this peer, is asked again or replaced. If that does not
# help, the peer waits twice as long before it tries the next time, at most 2 ** VAIN_DOUBLINGS times as long.
GONE_LOOKS = 2
VAIN_DOUBLINGS = 5


class Finder:
    """One peer's. `open_stream` opens a stream to a public key; `bootstrap` names peers that are asked first."""

    def __init__(self, daemon: Daemon, links: Links, open_stream: Opener, peer_id: str, log: Any) -> None:
        self._daemon, self._links, self._open, self._peer_id, self._log = daemon, links, open_stream, peer_id, log
        self.finding = ReachResult(ReachState.UNKNOWN)
        self._next, self._gone, self._vain = 0.0, 0, 0
        self._waits = Waits(2 * LACKING_SECONDS, ASK_AGAIN_SECONDS)
        self._asked: frozenset[str] = frozenset()

    @property
    def relays_for_others(self) -> bool:
        """Whether peers that nobody can dial may take this peer as their relay."""
        settings = self._daemon.settings
        return settings.reachability == "public" and settings.relay_for_others

    async def begin(self) -> None:
        """`find_out`, as soon as a peer is connected that can be asked; without one after BEGIN_SECONDS_MAX, later."""
        await self.somebody()
        await self.find_out()

    async def somebody(self) -> None:
        """Wait until a peer is connected that can be asked, at most BEGIN_SECONDS_MAX."""
        for _ in range(round(BEGIN_SECONDS_MAX / POLL_SECONDS)):
            if await self._links.remotes():
                return
            await asyncio.sleep(POLL_SECONDS)

    async def find_out(self) -> ReachResult:
        """Ask, and start p2pd again if the answer asks for other settings. Bounded in time; UNKNOWN if nobody answers."""
        self._gone, before = 0, self.finding
        found = await self.ask()
        if found.verdict is not ReachState.UNKNOWN:
            self.finding = found
        if not self._lacking:
            self._waits.reset()
        wait = self._waits.next() if self._lacking else ASK_AGAIN_SECONDS
        self._next = time.monotonic() + wait
        if found.verdict is ReachState.UNKNOWN:
            return before
        if found != before:
            self._log.info(
                "whether others can dial this peer", reachable=found.verdict.value, asked=found.asked, seen_at=found.seen_at,
                relays=[relay[-8:] for relay in found.relays],
            )  # fmt: skip
        await self._follow(found)
        return found

    async def ask(self) -> ReachResult:
        """Ask, and change nothing. Bounded in time."""
        remotes = await self._remotes()
        self._asked = frozenset(it.peer for it in remotes)
        told = await ask_all(self._open, remotes, tcp_ports(await self._links.addresses()))
        return conclude(told, self._peer_id)

    async def keep_forever(self) -> None:
        """Ask again now and then, and replace relays that are gone."""
        while True:
            await asyncio.sleep(LACKING_SECONDS if self._lacking else LOOK_SECONDS)
            try:
                if await self._should_ask():
                    await self.find_out()
            except NetworkError as error:
                self._log.warning("the overlay is not back", error=str(error))

    async def _should_ask(self) -> bool:
        here = {it.peer for it in await self._links.remotes()}
        chosen = peers_of(self._daemon.settings.relays)
        if not chosen or (chosen & here and await self._is_reserved()):
            self._gone = self._vain = 0
        else:
            self._gone += 1
        patience = GONE_LOOKS << min(self._vain, VAIN_DOUBLINGS)
        new = self._lacking and bool(here - self._asked)
        return new or self._gone >= patience or time.monotonic() >= self._next

    @property
    def _lacking(self) -> bool:
        """Whether this peer lacks an answer from outside, or the relay that it needs."""
        finding = self.finding
        return finding.verdict is ReachState.UNKNOWN or (finding.verdict is ReachState.PRIVATE and not finding.relays)

    async def _remotes(self) -> list[Remote]:
        """Connected peers; those that a person or the invite named come first, because strangers cannot choose them."""
        named = peers_of(self._daemon.named)
        return sorted(await self._links.remotes(), key=lambda it: it.peer not in named)

    async def _follow(self, found: ReachResult) -> None:
        """Have p2pd run as the finding says."""
        self._links.also = found.addresses
        now = self._daemon.settings
        if found.verdict is ReachState.PUBLIC:
            if now.reachability != "public":
                await self._change(reachability="public", relays=())
            return
        alive = peers_of(now.relays) & peers_of(found.relays)
        enough = min(RELAYS_WANTED, len(found.relays))
        # p2pd takes its relays when it starts, so relays that are good enough stay. A p2pd that has lost the place at its relay
        # does not ask that relay again for an hour.
        if found.relays and (len(alive) < enough or not await self._is_reserved()):
            first = self._vain % len(found.relays)  # after relays that did not take this peer, the next ones
            relays = (*found.relays[first:], *found.relays[:first])[:RELAYS_WANTED]
            await self._change(reachability="private", relays=relays)
            self._vain = 0 if await self._reserved() else self._vain + 1

    async def _change(self, **settings: Any) -> None:
        """Start p2pd again with these settings. Other peers learn that the old connections are at an end."""
        await self._links.part()
        await self._daemon.change(**settings)

    async def _reserved(self) -> bool:
        """Wait until this peer has an address through a relay, at most RESERVED_SECONDS_MAX; whether it has one."""
        for _ in range(round(RESERVED_SECONDS_MAX / POLL_SECONDS)):
            if await self._is_reserved():
                return True
            await asyncio.sleep(POLL_SECONDS)
        self._log.warning("no relay has taken this peer yet; still trying")
        return False

    async def _is_reserved(self) -> bool:
        """Whether a relay keeps a place for this peer: the peer has an address through it."""
        return any(CIRCUIT in address for address in await self._links.addresses())


def peers_of(addresses: Iterable[str]) -> set[str]:
    """The peer ids at the end of multiaddresses."""
    return {address.rpartition("/p2p/")[2] for address in addresses}


COUNT_SECONDS = 2.0
ANSWER_SECONDS_MAX = 2.0
SILENT_SECONDS = 30.0
ANSWER_BYTES_MAX = 4 << 20
# A bucket holds so many seconds of the owner's rate. A peer that has stopped relaying begins again once it is full: each change
# of p2pd's settings ends all of its connections.
BUCKET_SECONDS = 300.0
BITS_A_BYTE = 8
_RELAYED = re.compile(rb"^libp2p_relaysvc_data_transferred_bytes_total (\d+(?:\.\d+)?(?:e\+\d\d)?)$", re.MULTILINE)


class Bucket:
    """Bytes that may be relayed now. `rate`: bytes a second that flow in. Pure: the time is given, in seconds."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self._at = rate, now
        self._left = self._most
        self.is_open = rate > 0

    @property
    def _most(self) -> float:
        return self.rate * BUCKET_SECONDS

    def empty(self, now: float) -> None:
        """Close until it is full again: nobody knows how much was relayed."""
        self._left, self._at, self.is_open = 0.0, now, False

    def take(self, size: int, now: float) -> bool:
        """So many bytes were relayed since the last call. Returns whether this peer may relay now."""
        self._left = min(self._left + (now - self._at) * self.rate, self._most) - size
        self._at = now
        if self._left <= 0:
            self.is_open = False
        elif self._left >= self._most:
            self.is_open = self.rate > 0
        return self.is_open


async def relayed_bytes(port: int) -> int | None:
    """The bytes that the p2pd with its figures at this port has relayed since its start; None: it does not say.

    The whole answer has ANSWER_SECONDS_MAX: the port may be another program's, which never ends its answer. With HTTP 1.0 the
    answer ends where the connection does.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
                await reader.readexactly(ANSWER_BYTES_MAX)
            finally:
                writer.close()
    except asyncio.IncompleteReadError as ended:
        found = _RELAYED.search(ended.partial)
        return None if found is None else int(float(found[1]))
    except (OSError, TimeoutError):
        return None
    return None


class Relaying:
    """Of one peer. `port`: of the present p2pd's figures; `turn` has p2pd relay, or not; `wanted`: see
    `limit`."""

    def __init__(
        self,
        port: Callable[[], int | None],
        turn: Callable[[bool], Awaitable[None]],
        log: Any,
        wanted: float | None = None,
        read: Callable[[int], Awaitable[int | None]] = relayed_bytes,
    ) -> None:
        self._port, self._turn, self._log, self._read = port, turn, log, read
        self._bucket: Bucket | None = None
        self._wanted = wanted
        self._seen: tuple[int | None, int] = (None, 0)
        self._told_at: float | None = None
        self._on = wanted != 0
        self.total = 0
        """Bytes relayed since the start of this peer; each came in once and went out once."""

    def limit(self, bytes_a_second: float | None) -> None:
        """From now on, relay so much on average; None: no limit, 0: nothing."""
        self._wanted = bytes_a_second

    async def keep_forever(self) -> None:
        """Look every COUNT_SECONDS, and have p2pd relay or not."""
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            try:
                await self.look(asyncio.get_running_loop().time())
            except NetworkError as error:
                self._log.warning("the overlay is not back", error=str(error))

    async def look(self, now: float) -> None:
        """Once. Raises NetworkError if p2pd does not come back with its new settings."""
        port = self._port()
        new = await self._relayed_since(port)
        self.total += new or 0
        if self._wanted is None:
            self._bucket = None
        elif self._bucket is None or self._bucket.rate != self._wanted:
            self._bucket = Bucket(self._wanted, now)
        if port is None or new is not None or self._told_at is None:
            self._told_at = now
        elif self._bucket is not None and now - self._told_at >= SILENT_SECONDS:
            self._log.warning(
                "the libp2p daemon does not tell what it relays, so the limit closes", seconds=SILENT_SECONDS
            )
            self._bucket.empty(now)
            self._told_at = now
        may = self._bucket is None or self._bucket.take(new or 0, now)
        if may != self._on:
            self._on = may
            mbit = (self._wanted or 0) * BITS_A_BYTE / 1e6
            self._log.info(
                "relaying for others" if may else "relaying no more for now", relay_mbit=mbit, relayed=self.total
            )
            await self._turn(may)

    async def _relayed_since(self, port: int | None) -> int | None:
        """Bytes since the last look; a new p2pd counts from 0."""
        size = None if port is None else await self._read(port)
        if size is None:
            return None
        before = self._seen[1] if self._seen[0] == port else 0
        self._seen = port, size
        return max(size - before, 0)
