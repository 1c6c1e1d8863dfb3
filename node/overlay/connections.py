"""This peer's connections: announces its addresses, finds the run's peers in the DHT, dials them, and replaces relayed
connections to public peers by direct ones. Knows peers and addresses only; refuses to know a run or its messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from node.overlay.dht import Discovery
from node.overlay.host import Host
from node.overlay.links import is_public
from protos.address import parse_address
from protos.clocks import Waits
from protos.errors import Refusal
from protos.text import printable

# A refresh costs some six answers with the records of the whole run: 130 kB in a run of 32 peers.
DHT_REFRESH_SECONDS = 300.0
DISCOVER_SECONDS = 10.0
# While a member of the roster is not connected, or only through a relay, the peer looks others up after this time. The peer
# then doubles the time, until the roster or the connections change. With OVERLAY_PEERS_WANTED connections gossip reaches every
# peer, so the peer looks up no more.
DISCOVER_AGAIN_SECONDS = 2.0
DISCOVER_AGAIN_SECONDS_MAX = 60.0
OVERLAY_PEERS_WANTED = 32
DIAL_DIRECTLY_SECONDS_MIN = 5.0
DIAL_DIRECTLY_SECONDS_MAX = 300.0
OVERLAY_PEERS_MAX = 64
# libp2p tries to punch once, when a relayed connection is made, and only if OBSERVERS_MIN others at different addresses have
# told it where they see it (go-libp2p's ActivationThresh). A connection that was made earlier stays relayed: it is made again.
OBSERVERS_MIN = 4
PUNCHES_MAX = 3


class WantedPeers(Protocol):
    """The peers that should be connected, as the run knows them (node/swarm/membership.py)."""

    def wanted(self) -> set[str]:
        """Ids of the peers that should be connected now."""

    async def known_addresses(self) -> list[str]:
        """Multiaddresses of peers that the coordinator knows; may be empty."""

    def moved(self, addresses: tuple[str, ...]) -> None:
        """Take this peer's own addresses, which have changed."""

    def log(self, event: str, **facts: object) -> None:
        """One line of the log."""


class Connections:
    """One peer's, over one overlay host. `neighbours` names the peers that should be connected."""

    def __init__(
        self,
        host: Host,
        run_id: bytes,
        neighbours: WantedPeers,
        discovery: Callable[[Host, bytes], Discovery] = Discovery,
    ) -> None:
        self._host, self._run_id, self._neighbours = host, run_id, neighbours
        self._make_discovery = discovery
        self._discovery = discovery(host, run_id)
        self._again: dict[str, tuple[float, Waits]] = {}  # relayed peers: when to dial next, and the waits after that
        self._punched: dict[str, int] = {}
        self._announced = 0.0
        self._lacked: set[str] = set()

    async def start(self, known: list[str]) -> None:
        """Join the DHT through peers whose addresses are known."""
        await self._discovery.start(known)

    async def restart(self, known: list[str]) -> None:
        """The host's daemon is a new one: its connections and its DHT are gone."""
        self._discovery.forget()
        self._announced, self._lacked = 0.0, set()
        await self.connect_to(known)
        self._discovery = self._make_discovery(self._host, self._run_id)
        await self._discovery.start(known)

    async def stop(self) -> None:
        """Stop answering others' lookups."""
        await self._discovery.stop()

    async def keep_forever(self) -> None:
        """Announce this peer's addresses, find the other peers, stay connected."""
        addresses, ways = tuple[str, ...](), dict[str, bool]()
        again_at, waits = 0.0, Waits(DISCOVER_AGAIN_SECONDS, DISCOVER_AGAIN_SECONDS_MAX)
        while True:
            found = tuple(await self._host.addresses())
            if found and found != addresses:
                addresses, self._announced = found, 0.0
                self._neighbours.moved(found)
            await self._announce(list(addresses))
            await self._host.meet()  # also peers that dialled this one, or that p2pd dialled when it started
            here = await self._host.connected()
            lacking = self._lacking(here)
            if lacking - self._lacked:  # a peer is new, or gone: look for it soon
                again_at = 0.0
                waits.reset()
            self._lacked = lacking
            if (lacking or not here) and time.monotonic() >= again_at:
                await self._look()
                here = await self._host.connected()
                again_at = time.monotonic() + waits.next()
            if here != ways:
                ways, relayed = here, sorted(peer[-8:] for peer, direct in here.items() if not direct)
                self._neighbours.log(
                    "connections", direct=sorted(peer[-8:] for peer in here if here[peer]), relayed=relayed
                )
            soon = bool(lacking) or not here
            await asyncio.sleep(DISCOVER_AGAIN_SECONDS if soon else DISCOVER_SECONDS)

    async def _announce(self, addresses: list[str]) -> None:
        """Put this peer's addresses into the DHT, if the DHT does not have them or forgets them soon."""
        discovery, now = self._discovery, time.monotonic()
        if now - self._announced <= DHT_REFRESH_SECONDS or not await discovery.announce(addresses):
            return
        if discovery is self._discovery:  # the DHT of a daemon that has died since has forgotten them
            self._announced = now

    def _lacking(self, here: dict[str, bool]) -> set[str]:
        """Peers that should be connected, and are not or only through a relay; none if there are enough connections."""
        if len(here) >= OVERLAY_PEERS_WANTED:
            return set()
        return {peer for peer in self._neighbours.wanted() if not here.get(peer)}

    async def _look(self) -> None:
        """Dial the peers that the DHT and the coordinator know."""
        peers = await self._discovery.peers()
        await self.connect_to([address for theirs in peers.values() for address in theirs])
        if self._neighbours.wanted() - (await self._host.connected()).keys():
            await self.connect_to(await self._neighbours.known_addresses())

    async def connect_to(self, addresses: list[str]) -> None:
        """Dial peers that are not connected, up to OVERLAY_PEERS_MAX. Text that is not an address is left out."""
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            try:
                peer = parse_address(address).peer
            except Refusal as refusal:
                self._neighbours.log("not an address", why=printable(str(refusal)))
                continue
            by_peer.setdefault(peer, []).append(address)
        here = await self._host.connected()
        new = [theirs for peer, theirs in by_peer.items() if peer not in here and peer != self._host.peer_id]
        room = max(OVERLAY_PEERS_MAX - len(here), 0)
        await asyncio.gather(*(self._host.connect(theirs) for theirs in new[:room]))
        await self._host.meet()
        await self._dial_directly({peer: theirs for peer, theirs in by_peer.items() if here.get(peer) is False})

    async def meet(self, addresses: list[str]) -> None:
        """Dial these peers now, also if there are many connections: this step needs them."""
        here = await self._host.connected()
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            try:
                by_peer.setdefault(parse_address(address).peer, []).append(address)
            except Refusal as refusal:
                self._neighbours.log("not an address", why=printable(str(refusal)))
        away = [theirs for peer, theirs in by_peer.items() if peer not in here and peer != self._host.peer_id]
        if away:
            await asyncio.gather(*(self._host.connect(theirs) for theirs in away))
            await self._host.meet()

    async def _may_punch(self, peer: str) -> bool:
        """Whether another try to punch through both routers is worth the relayed connection, which ends for it."""
        if self._punched.get(peer, 0) >= PUNCHES_MAX or len(await self._host.places()) < OBSERVERS_MIN:
            return False
        self._punched[peer] = self._punched.pop(peer, 0) + 1
        if len(self._punched) > OVERLAY_PEERS_MAX:
            self._punched.pop(next(iter(self._punched)))
        return True

    async def _dial_directly(self, relayed: dict[str, list[str]]) -> None:
        """Dial a public peer directly that is connected through a relay: a relay's bandwidth is shared by all peers."""
        now = time.monotonic()
        for peer, theirs in relayed.items():
            public = [address for address in theirs if is_public(address)]
            again, waits = self._again.get(peer) or (0.0, Waits(DIAL_DIRECTLY_SECONDS_MIN, DIAL_DIRECTLY_SECONDS_MAX))
            if now < again:
                continue
            if public:
                direct, what = await self._host.dial_directly(peer, public), "relayed connection to a public peer"
            elif self._host.peer_id < peer and await self._may_punch(peer):  # one of the two begins
                direct, what = await self._host.punch(peer, theirs), "relayed connection to a peer behind a router"
            else:
                continue
            self._neighbours.log(what, to=peer, direct=direct)
            self._again[peer] = (now + waits.next(), waits)
            if len(self._again) > OVERLAY_PEERS_MAX:
                self._again.pop(next(iter(self._again)))
