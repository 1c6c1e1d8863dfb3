"""Keeps this peer reachable: finds out whether others can dial it, and takes relays if they cannot. ADR 20.

Refuses to do anything if a person has said how the peer is reached. Refuses to believe one answer: `reach.conclude` decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from node.overlay.daemon import Daemon
from node.overlay.links import CIRCUIT, Links
from node.overlay.reach import RELAYS_WANTED, Opener, ReachResult, ReachState, Remote, ask_all, conclude, tcp_ports
from protos.errors import NetworkError
from protos.waits import Waits

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
