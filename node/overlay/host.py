"""This peer on the overlay: go-libp2p through hivemind's daemon (p2pd), with our Ed25519 identity and GossipSub.

Offers addresses, connections, streams and gossip, all as bytes. After the daemon was started again, the host registers every
stream protocol and topic again. `daemon`, `links`, `streams` and `pubsub` do the work; knows no run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import structlog
from hivemind.p2p import P2P

from node.overlay import reach
from node.overlay.daemon import Daemon, Ready, Tasks
from node.overlay.links import Links, OverlayStreams, StreamHandler
from node.overlay.pubsub import MessageHandler, Pubsub
from node.overlay.reach import Access, ReachState
from node.overlay.relays import Finder, Relaying
from node.overlay.settings import OverlaySettings
from protos.errors import NetworkError, OperatorError, Refusal
from protos.identity import Identity, public_key_of

PROTOCOL = "/swarmentum/life/1"
LIFE_BYTES = 16
SECONDS_MAX = 5.0
KNOWN_MAX = 1024
# The other side has DROP_SECONDS to read this peer's answer before this peer drops the connections. The peer that asked waits
# REDIAL_SECONDS for their end before it dials again.
DROP_SECONDS = 0.1
REDIAL_SECONDS = 0.3

Opener = Callable[[bytes, str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Incarnations:
    """A connection belongs to one life of a peer: each start of the overlay draws a number, and peers that meet tell
    theirs.

    A killed process closes no connection. The process's TCP connections end at once, but other peers keep its QUIC connections
    for some 30 s. A p2pd with such a connection uses it first. If the killed peer comes back with its identity, gossip and
    streams to it go into a connection that nobody reads.

    So a peer that receives another peer's new number drops its connections to the old life, and the peer that asked dials
    again. A stranger's false number costs at most the stranger's own connection. ADR 20.

    One peer's. `open` opens a stream to a public key, `drop` ends all connections to a peer id, `dial` makes a new one.
    """

    def __init__(
        self, open_stream: Opener, drop: Callable[[str], Awaitable[None]], dial: Callable[[str], Awaitable[None]]
    ) -> None:
        self._open, self._drop, self._dial = open_stream, drop, dial
        self._own = secrets.token_bytes(LIFE_BYTES)
        self._known: dict[str, bytes] = {}
        self._met: set[str] = set()

    def begin(self, *, again: bool = False) -> None:
        """The overlay has started. `again`: this peer ended its connections before, so that this is still the same life.

        A new life would make a relay drop this peer's new connection, and with it the place that the relay keeps for the peer.
        """
        if not again:
            self._own = secrets.token_bytes(LIFE_BYTES)
        self._met = set()

    async def meet(self, here: set[str]) -> None:
        """Tell this life to connected peers that have not heard it on this connection; bounded in time."""
        new, self._met = here - self._met, set(here)
        await asyncio.gather(*(self._tell(remote) for remote in new))

    async def _tell(self, remote: str) -> None:
        try:
            async with asyncio.timeout(SECONDS_MAX):
                reader, writer = await self._open(public_key_of(remote), PROTOCOL)
                try:
                    writer.write(self._own)
                    await writer.drain()
                    theirs, dropped = await reader.readexactly(LIFE_BYTES), await reader.readexactly(1)
                finally:
                    writer.close()
        except (NetworkError, OperatorError, OSError, asyncio.IncompleteReadError, TimeoutError):
            return  # a peer of other software, or one that is gone
        if self._is_new(remote, theirs):
            await self._drop(remote)
        elif dropped != b"\1":
            return
        await asyncio.sleep(REDIAL_SECONDS)
        await self._dial(remote)

    async def answer(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read a peer's life, and send this peer's own. True if the peer had another life before: drop its connections then."""
        async with asyncio.timeout(SECONDS_MAX):
            new = self._is_new(remote, await reader.readexactly(LIFE_BYTES))
            writer.write(self._own + bytes([new]))
            await writer.drain()
        return new

    def _is_new(self, remote: str, life: bytes) -> bool:
        """Whether this peer has met another life of `remote`. Remembers the newest KNOWN_MAX peers."""
        before = self._known.pop(remote, None)
        self._known[remote] = life
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        return before not in (None, life)


async def nothing_to_do() -> None:
    """For a host without state beyond its streams and topics."""


class Host:
    """One p2pd. Peer ids and addresses are text; each call raises NetworkError in bounded time.

    `refused` counts gossip that is refused.
    """

    def __init__(
        self,
        identity: Identity,
        identity_path: Path,
        settings: OverlaySettings,
        refused: Callable[[Refusal], None] = lambda refusal: None,
    ) -> None:
        self.identity, self.settings = identity, settings
        self._log = structlog.get_logger("overlay").bind(step="-", peer=identity.peer_id[-8:])
        self._tasks = Tasks(self._log)
        relays = settings.relay_for_others and settings.relay_bytes_a_second != 0
        now = replace(settings, relay_for_others=relays)
        self._daemon = Daemon(identity.peer_id, identity_path, now, self._tasks, self._log)
        self._links = Links(self._daemon)
        self._streams = OverlayStreams(self._daemon, self._links, self._tasks, self._log)
        self.pubsub = Pubsub(self._daemon, self._links, self._streams, self._tasks, refused)
        self._lives = Incarnations(self.open, self._links.drop, self._links.redial)
        self._streams.answer(PROTOCOL, self._on_life)
        self.finder = Finder(self._daemon, self._links, self.open, identity.peer_id, self._log)
        self.relaying = Relaying(self._figures_port, self._relay, self._log, settings.relay_bytes_a_second)
        self._answerer = reach.Answerer(self._links.seen_at, lambda: self.finder.relays_for_others)
        self._streams.answer(reach.PROTOCOL, self._answerer.answer)

    @property
    def peer_id(self) -> str:
        """This peer's libp2p id."""
        return self.identity.peer_id

    @property
    def p2p(self) -> P2P:
        """The live daemon's handle, for hivemind's DHT."""
        return self._daemon.p2p

    @property
    def restarts(self) -> int:
        """How often the daemon was started again."""
        return self._daemon.restarts

    @property
    def gives_bytes(self) -> bool:
        """Whether the owner lets this peer carry bytes of others."""
        return self._daemon.settings.relay_for_others

    @property
    def relayed(self) -> frozenset[str]:
        """Ids of peers that were connected through a relay only, at the last look."""
        return self._links.relayed

    def _figures_port(self) -> int | None:
        """Where p2pd tells what it relays; None if it relays nothing."""
        return self._daemon.figures_port if self.finder.relays_for_others else None

    async def _relay(self, on: bool) -> None:
        """Relay for others, or not, in the owner's limits."""
        if self._daemon.settings.reachability == "private":  # it relays nothing, and its connections stay
            self._daemon.prefer(relay_for_others=on)
            return
        await self._links.part()
        await self._daemon.change(relay_for_others=on)

    async def start(self, bootstrap: tuple[str, ...] = (), restarted: Ready = nothing_to_do) -> None:
        """Start p2pd and connect to the bootstrap peers that answer. Raises NetworkError or OperatorError.

        Text in `bootstrap` that is not an address is left out. `restarted` runs after each restart of the daemon, once streams
        and topics are registered again.
        """
        await self._daemon.start(bootstrap, self._register, restarted)
        if self.settings.relay_for_others:
            self._tasks.spawn(self.relaying.keep_forever())

    async def find_out(self) -> None:
        """Find out whether others can dial this peer, and take relays if not, unless its settings say how it is reached."""
        if self.settings.finds_out:
            await self.finder.begin()

    async def keep_reachable_forever(self) -> None:
        if self.settings.finds_out:
            await self.finder.keep_forever()

    async def _register(self) -> None:
        """Tell a new daemon this peer's stream protocols and topics."""
        self._lives.begin(again=self._daemon.changes)
        await self._streams.register()
        self.pubsub.register()

    async def stop(self) -> None:
        """Stop p2pd and every task; nothing is left running."""
        self._daemon.closing()
        await self._tasks.stop()
        await self._daemon.stop()

    # ---- addresses and connections -----------------------------------------------------------------------------------

    async def addresses(self) -> list[str]:
        return await self._links.addresses()

    async def seen_at(self, remote: str) -> str | None:
        return await self._links.seen_at(remote)

    async def access(self) -> Access:
        """How this peer is reached and connected now. Where a person said how it is reached, that counts."""
        settings, connected = self._daemon.settings, await self.connected()
        said = settings.reachability
        verdict = self.finder.finding.verdict if said == "auto" else ReachState(said)
        direct = sum(connected.values())
        return Access(verdict, len(settings.relays), direct, len(connected) - direct)

    async def subscribers(self, topic: str) -> set[str]:
        return await self.pubsub.subscribers(topic)

    async def connected(self) -> dict[str, bool]:
        return await self._links.connected()

    async def connect(self, addresses: list[str]) -> bool:
        return await self._links.connect(addresses)

    async def dial_directly(self, remote: str, addresses: list[str]) -> bool:
        return await self._links.dial_directly(remote, addresses)

    async def punch(self, remote: str, addresses: list[str]) -> bool:
        return await self._links.punch(remote, addresses)

    async def places(self) -> set[str]:
        """IP addresses of the peers with a direct connection."""
        return {it.ip for it in await self._links.remotes()}

    async def meet(self) -> None:
        """Make sure that connected peers talk to this life of the peer, not to an earlier one (see `incarnations`)."""
        await self._lives.meet(set(await self.connected()))

    async def _on_life(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await self._lives.answer(remote, reader, writer):
            self._log.info("a peer has come back; dropping its old connections", to=remote[-8:])
            self._tasks.spawn(self._drop_soon(remote))

    async def _drop_soon(self, remote: str) -> None:
        await asyncio.sleep(DROP_SECONDS)
        await self._links.drop(remote)

    # ---- streams and gossip ------------------------------------------------------------------------------------------

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Answer streams of a protocol; the handler gets the remote's peer id."""
        await self._streams.serve(protocol, handler)

    async def open(self, remote: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to the peer with this public key; NetworkError if the peer cannot be reached."""
        return await self._streams.open(remote, protocol)

    def expect(self, members: Iterable[bytes]) -> None:
        """These public keys are expected to gossip: each has an allowance of its own."""
        self.pubsub.expect(members)

    async def subscribe(self, topic: str, handler: MessageHandler) -> None:
        """Hand every message of a topic to `handler`, also after a restart of the daemon."""
        await self.pubsub.subscribe(topic, handler)

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip a small message. NetworkError if the daemon does not take it."""
        await self.pubsub.publish(topic, data)

    async def publish_to_each(self, topic: str, data: bytes) -> None:
        await self.pubsub.publish_to_each(topic, data)
