"""This peer's addresses and connections, as p2pd has them, direct ones and relayed ones; and the libp2p streams over them.

Each call ends within CONNECT_SECONDS_MAX, and an open of a stream within STREAM_OPEN_SECONDS_MAX. A connection on which no
stream opens any more is dropped. Refuses to decide which peers should be connected; `Connections` does that.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, raise_if_failed
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from node.overlay.daemon import FAILURES, Daemon, Tasks
from node.overlay.reach import Remote
from protos.address import usable
from protos.errors import NetworkError, in_words
from protos.identity import peer_id

ADDRESSES_SECONDS_MAX = 5.0
CONNECT_SECONDS_MAX = 10.0
# A peer that should be dialable, but was reached through a relay, is dialled directly so often in a row.
DIRECT_TRIES = 3
PUNCH_SECONDS_MAX = 4.0
PUNCH_LOOK_SECONDS = 0.25
CIRCUIT = "/p2p-circuit"


def is_public(address: str) -> bool:
    """Whether every peer can dial a multiaddress: it leads neither through a relay nor into a private network."""
    words = address.split("/")
    if CIRCUIT in address or len(words) < 3:
        return False
    try:
        return words[1].startswith("dns") or ipaddress.ip_address(words[2]).is_global
    except ValueError:
        return False


class Links:
    """One peer's, over its daemon. Peers are named by their libp2p id."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.also: tuple[str, ...] = ()
        """Multiaddresses at which others have dialled this peer, and that p2pd may not know (`finder`)."""
        self.relayed: frozenset[str] = frozenset()
        """Peers that were connected through a relay only at the last look."""

    async def addresses(self) -> list[str]:
        """Multiaddresses that other peers can dial, relayed ones included; loopback only if there is no other."""
        try:
            told = (await self._daemon.ask(p2pd_pb2.Request.IDENTIFY, ADDRESSES_SECONDS_MAX)).identify
            found = [f"{Multiaddr(address)}/p2p/{PeerID(told.id).to_base58()}" for address in told.addrs]
        except (ValueError, *FAILURES):
            return []
        outside = [address for address in found if "/127.0.0.1/" not in address and "/::1/" not in address]
        return list(dict.fromkeys([*self.also, *(outside or found)]))

    async def connected(self) -> dict[str, bool]:
        """Ids of the connected peers, and whether the connection is direct (False: through a relay only)."""
        found: dict[str, bool] = {}
        for remote, address in await self._peers():
            found[remote] = found.get(remote, False) or CIRCUIT not in address
        self.relayed = frozenset(remote for remote, direct in found.items() if not direct)
        return found

    async def remotes(self) -> list[Remote]:
        """The peers with a direct connection, and where they are."""
        found: dict[str, Remote] = {}
        for remote, told in await self._peers():
            address = self._daemon.tunnels.real(told.partition("/p2p/")[0])
            words = address.split("/")
            if CIRCUIT not in told and len(words) > 4 and words[1] in {"ip4", "ip6"}:
                found.setdefault(remote, Remote(remote, address, words[2]))
        return list(found.values())

    async def _peers(self) -> list[tuple[str, str]]:
        """Each connected peer with each of its addresses; none if p2pd does not say."""
        try:
            peers = (await self._daemon.ask(p2pd_pb2.Request.LIST_PEERS, CONNECT_SECONDS_MAX)).peers
        except FAILURES:
            return []
        return [(PeerID(peer.id).to_base58(), str(Multiaddr(address))) for peer in peers for address in peer.addrs]

    async def seen_at(self, remote: str) -> str | None:
        """The IP address that this peer sees a directly connected peer at."""
        return next((it.ip for it in await self.remotes() if it.peer == remote), None)

    async def connect(self, addresses: list[str]) -> bool:
        """Dial one peer at its addresses (all end in the same /p2p/<id>). False if no address answers, or none is one."""
        target = addresses[0].rpartition("/p2p/")[2]
        try:
            maddrs = [Multiaddr(it.text.rpartition("/p2p/")[0]) for it in usable(addresses, target)]
            await self._dial(target, maddrs)
        except (ValueError, *FAILURES):
            return False
        return True

    async def dial_directly(self, remote: str, addresses: list[str]) -> bool:
        """Replace a relayed connection by a direct one to these public addresses; whether it is direct now.

        p2pd dials no second connection beside a relayed one, so the relayed one is closed first: streams on it break.
        The other side may dial back through the relay before this dial is done, so there are DIRECT_TRIES tries.
        """
        for _ in range(DIRECT_TRIES):
            try:
                await self._disconnect(remote)
            except (ValueError, *FAILURES):
                return False
            await self.connect(addresses)
            if (await self.connected()).get(remote, False):
                return True
        return False

    async def punch(self, remote: str, addresses: list[str]) -> bool:
        """Make a relayed connection again at these addresses, so that libp2p tries to punch through both routers; whether it is
        direct within PUNCH_SECONDS_MAX. Streams on the old connection break."""
        try:
            await self._disconnect(remote)
        except (ValueError, *FAILURES):
            return False
        await self.connect(addresses)
        for _ in range(round(PUNCH_SECONDS_MAX / PUNCH_LOOK_SECONDS)):
            if (await self.connected()).get(remote, False):
                return True
            await asyncio.sleep(PUNCH_LOOK_SECONDS)
        return False

    async def drop(self, remote: str) -> None:
        """End all connections to a peer, best effort; the next stream dials again."""
        with suppress(*FAILURES):
            await self._disconnect(remote)

    async def part(self) -> None:
        """End all connections, best effort: a p2pd that is told to end tells nobody, and other peers would wait for it."""
        await asyncio.gather(*(self.drop(remote) for remote in await self.connected()))

    async def redial(self, remote: str) -> None:
        """Connect at the addresses that p2pd remembers, best effort."""
        with suppress(ValueError, *FAILURES):
            await self._dial(remote, [])

    async def _dial(self, remote: str, addresses: list[Multiaddr]) -> None:
        where = [address.to_bytes() for address in addresses]
        wanted = p2pd_pb2.ConnectRequest(peer=PeerID.from_base58(remote).to_bytes(), addrs=where)
        await self._daemon.ask(p2pd_pb2.Request.CONNECT, CONNECT_SECONDS_MAX, connect=wanted)

    async def _disconnect(self, remote: str) -> None:
        wanted = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(remote).to_bytes())
        await self._daemon.ask(p2pd_pb2.Request.DISCONNECT, CONNECT_SECONDS_MAX, disconnect=wanted)


STREAM_OPEN_SECONDS_MAX = 10.0
# After so many opens in a row that ran into their deadline, the connection is dropped and dialled again.
OPENS_STUCK_MAX = 2

StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class OverlayStreams:
    """One peer's."""

    def __init__(self, daemon: Daemon, links: Links, tasks: Tasks, log: Any) -> None:
        self._daemon, self._links, self._tasks, self._log = daemon, links, tasks, log
        self._handlers: dict[str, StreamHandler] = {}
        self._stuck: dict[str, int] = {}

    def answer(self, protocol: str, handler: StreamHandler) -> None:
        """Answer streams of a protocol from the daemon's next start on; the handler gets the remote's peer id."""
        self._handlers[protocol] = handler

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Answer streams of a protocol from now on. NetworkError if p2pd does not take it."""
        self.answer(protocol, handler)
        await self._register(protocol)

    async def register(self) -> None:
        """Tell a new daemon every protocol."""
        for protocol in self._handlers:
            await self._register(protocol)

    async def _register(self, protocol: str) -> None:
        handler = self._handlers[protocol]

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(info.peer_id.to_base58(), reader, writer)
            except FAILURES as error:
                self._log.debug("stream ended", protocol=protocol, error=str(error))
            except asyncio.CancelledError:
                return  # the peer stops; asyncio of Python 3.11 prints a cancelled handler as an error of its own
            finally:
                writer.close()

        wanted = p2pd_pb2.StreamHandlerRequest(
            addr=self._daemon.p2p.listening(protocol, handle), proto=[protocol], balanced=False
        )
        try:
            await self._daemon.ask(p2pd_pb2.Request.STREAM_HANDLER, STREAM_OPEN_SECONDS_MAX, streamHandler=wanted)
        except FAILURES as error:
            why = await self._daemon.p2p.end() or (in_words(error) if str(error) else "it stands still")
            raise NetworkError(f"the libp2p daemon takes no streams of {protocol}: {why}") from error

    async def open(self, remote: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to the peer with this public key; NetworkError if the peer cannot be reached."""
        target = peer_id(remote)
        try:
            async with asyncio.timeout(STREAM_OPEN_SECONDS_MAX):
                stream = await self._open(target, protocol)
        except FAILURES as error:
            if isinstance(error, TimeoutError):
                self._stuck[target] = self._stuck.get(target, 0) + 1
                if self._stuck[target] >= OPENS_STUCK_MAX:
                    self._tasks.spawn(self._renew(target))
            raise NetworkError(f"peer {target} cannot be reached: {in_words(error)}") from error
        self._stuck.pop(target, None)
        return stream

    async def _renew(self, target: str) -> None:
        """Drop a connection on which no stream opens: the next stream dials again."""
        self._stuck.pop(target, None)
        self._log.info("no stream opens on the connection; dropping it to dial again", to=target[-8:])
        await self._links.drop(target)

    async def _open(self, remote: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        wanted = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(remote).to_bytes(), proto=[protocol])
        response, reader, writer = await self._daemon.open(
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted)
        )
        try:
            raise_if_failed(response)
        except P2PDaemonError:
            writer.close()
            raise
        return reader, writer
