"""Who this peer is connected to: says where it is, finds the run's peers in the DHT, dials them, and leaves no public peer
on a relay. Knows peers and addresses only; what is said over the connections is the session's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from node.swarm import settings as limits
from node.swarm.dht import Discovery
from node.swarm.host import Host, is_public
from protos.address import parse_address
from protos.errors import Refusal
from protos.text import printable

Logger = Any


class Connections:
    """One peer's, over one overlay host. `moved` is called with this peer's addresses when they change.

    `wanted` gives the ids of the peers that should be connected now, `ask` where the coordinator knows peers.
    """

    def __init__(
        self,
        host: Host,
        run_id: bytes,
        *,
        moved: Callable[[tuple[str, ...]], None],
        wanted: Callable[[], set[str]],
        ask: Callable[[], Awaitable[list[str]]],
        log: Callable[..., None],
        discovery: Callable[[Host, bytes], Discovery] = Discovery,
    ) -> None:
        self._host, self._run_id = host, run_id
        self._moved, self._wanted, self._ask, self._log = moved, wanted, ask, log
        self._make_discovery = discovery
        self._discovery = discovery(host, run_id)
        self._again: dict[str, tuple[float, float]] = {}  # relayed peers: not before, and how long to wait after

    async def start(self, known: list[str]) -> None:
        """Join the DHT through peers whose addresses are known."""
        await self._discovery.start(known)

    async def restart(self, known: list[str]) -> None:
        """The host's daemon is a new one: its connections and its DHT are gone."""
        await self._discovery.stop()
        await self.connect_to(known)
        self._discovery = self._make_discovery(self._host, self._run_id)
        await self._discovery.start(known)

    async def stop(self) -> None:
        """Stop answering others' lookups."""
        await self._discovery.stop()

    async def keep_forever(self) -> None:
        """Say where this peer is, find the others, stay connected."""
        announced, addresses, ways = 0.0, tuple[str, ...](), dict[str, bool]()
        while True:
            found = tuple(await self._host.addresses())
            if found and found != addresses:
                addresses, announced = found, 0.0
                self._moved(found)
            if time.monotonic() - announced > limits.DHT_REFRESH_SECONDS and await self._discovery.announce(
                list(addresses)
            ):
                announced = time.monotonic()
            peers = await self._discovery.peers()
            await self.connect_to([address for theirs in peers.values() for address in theirs])
            here = await self._host.connected()
            missing = self._wanted() - here.keys()
            if missing:
                await self.connect_to(await self._ask())
            if here != ways:
                ways, relayed = here, sorted(peer[-8:] for peer, direct in here.items() if not direct)
                self._log("connections", direct=sorted(peer[-8:] for peer in here if here[peer]), relayed=relayed)
            await asyncio.sleep(limits.DISCOVER_AGAIN_SECONDS if missing else limits.DISCOVER_SECONDS)

    async def connect_to(self, addresses: list[str]) -> None:
        """Dial those that this peer is not connected to, up to OVERLAY_PEERS_MAX. What is no address is left out."""
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            try:
                peer = parse_address(address).peer
            except Refusal as refusal:
                self._log("not an address", why=printable(str(refusal)))
                continue
            by_peer.setdefault(peer, []).append(address)
        here = await self._host.connected()
        new = [theirs for peer, theirs in by_peer.items() if peer not in here and peer != self._host.peer_id]
        room = max(limits.OVERLAY_PEERS_MAX - len(here), 0)
        await asyncio.gather(*(self._host.connect(theirs) for theirs in new[:room]))
        await self._host.meet()
        await self._straighten({peer: theirs for peer, theirs in by_peer.items() if here.get(peer) is False})

    async def _straighten(self, relayed: dict[str, list[str]]) -> None:
        """A public peer that dialled us through our relay first is not left there: its bandwidth is everybody's."""
        now = time.monotonic()
        for peer, theirs in relayed.items():
            public = [address for address in theirs if is_public(address)]
            again, patience = self._again.get(peer, (0.0, limits.STRAIGHTEN_SECONDS_MIN))
            if not public or now < again:
                continue
            direct = await self._host.straighten(peer, public)
            self._log("relayed connection to a public peer", to=peer, direct=direct)
            self._again[peer] = (now + patience, min(2 * patience, limits.STRAIGHTEN_SECONDS_MAX))
            if len(self._again) > limits.OVERLAY_PEERS_MAX:
                self._again.pop(next(iter(self._again)))
