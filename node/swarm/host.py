"""This peer on the overlay: go-libp2p through hivemind's P2P daemon (p2pd), with our Ed25519 identity and GossipSub.

Offers addresses, connections, streams and gossip, all as bytes. Starts the daemon again with the same identity if it dies,
and registers everything again: hivemind itself does not notice (OVERLAY.md). Refuses messages beyond the gossip limit.
p2pd runs no GossipSub over relayed connections: peers that are reached through a relay only get each message on a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import (
    P2PDaemonError,
    raise_if_failed,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from node.swarm import guard, lives
from node.swarm import settings as limits
from node.swarm.settings import OverlaySettings
from protos.address import usable
from protos.errors import NetworkError, OperatorError, Reason, Refusal
from protos.identity import Identity, peer_id, peer_id_bytes, public_key_of
from protos.limits import GOSSIP_MESSAGE_BYTES_MAX
from protos.rate import Rate

StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
MessageHandler = Callable[[bytes], None]
DAEMON_RESTARTS_MAX = 100
PUSH_PROTOCOL = "/swarmentum/push/1"
CIRCUIT = "/p2p-circuit"
_FAILURES = (P2PDaemonError, OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, TimeoutError)


class _Daemon(P2P):  # type: ignore[misc]
    """p2pd with GossipSub, without looking for relays in strangers' tables, and that never outlives this process."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        made: list[str] = P2P._make_process_args(*args, pubsub=1, relayDiscovery=0, **kwargs)
        return [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *made]

    @classmethod
    async def started(cls, **options: Any) -> P2P:
        """As `create`, and no p2pd is left running where its start breaks off: hivemind forgets a child that is cancelled."""
        made: list[P2P] = []

        class Remembered(cls):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                made.append(self)

        try:
            return await Remembered.create(**options)
        except BaseException:
            for daemon in made:
                await daemon.shutdown()
            raise


def check_port_free(host: str, port: int) -> None:
    """p2pd takes a busy TCP port silently (SO_REUSEPORT): look before it leaps. OperatorError if it is in use."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OperatorError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another port"
            ) from error


def is_public(address: str) -> bool:
    """Whether anybody can dial a multiaddress: neither through a relay nor in a private network."""
    words = address.split("/")
    if CIRCUIT in address or len(words) < 3:
        return False
    try:
        return words[1].startswith("dns") or ipaddress.ip_address(words[2]).is_global
    except ValueError:
        return False


class Host:
    """One p2pd. `peer_ids` and addresses are text; everything raises NetworkError in bounded time."""

    def __init__(self, identity: Identity, identity_path: Path, settings: OverlaySettings) -> None:
        self.identity = identity
        self._path = identity_path
        self._settings = settings
        self._p2p: Any = None
        self._handlers: dict[str, StreamHandler] = {}
        self._topics: dict[str, MessageHandler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pushes, self._takes = asyncio.Semaphore(limits.PUSHES_MAX), asyncio.Semaphore(limits.PUSHES_MAX)
        self._heard: dict[bytes, bool] = {}
        self._stuck: dict[str, int] = {}
        self._members: frozenset[bytes] = frozenset()
        self._rate = Rate(limits.ORIGIN_MESSAGES_MAX, limits.ORIGIN_MESSAGE_MS, limits.ORIGINS_KEPT)
        self.on_refusal: Callable[[Refusal], None] = lambda refusal: None
        self._lives = lives.Lives(self.open, self._drop, self._redial)
        self._closing = False
        self.restarts = 0
        self.on_restart: Callable[[], Awaitable[None]] | None = None
        self._log = structlog.get_logger("overlay").bind(step="-", peer=identity.peer_id[-8:])

    @property
    def peer_id(self) -> str:
        """This peer's libp2p id."""
        return self.identity.peer_id

    @property
    def p2p(self) -> P2P:
        """The live daemon's handle, for hivemind's DHT."""
        assert self._p2p is not None, "the host is not started"
        return self._p2p

    async def start(self, bootstrap: tuple[str, ...] = ()) -> None:
        """Start p2pd and connect to the bootstrap peers that answer. Raises NetworkError or OperatorError.

        `bootstrap` is what others say: p2pd ends at once over an address that is none, so such ones are left out.
        """
        check_port_free(self._settings.listen_host, self._settings.listen_port)
        told = [address.text for address in usable(bootstrap, most=limits.BOOTSTRAP_MAX)]
        if len(told) < len(set(bootstrap)):
            self._log.warning("addresses that are none are left out", count=len(set(bootstrap)) - len(told))
        self._bootstrap = tuple(dict.fromkeys([*self._settings.bootstrap, *told]))
        self._handlers[PUSH_PROTOCOL] = self._on_push
        self._handlers[lives.PROTOCOL] = self._on_life
        await self._launch()

    async def _launch(self) -> None:
        initial = [address for address in self._bootstrap if not address.endswith(self.peer_id)]
        private = self._settings.reachability == "private"
        options: dict[str, Any] = {
            "host_maddrs": self._settings.listen(),
            "announce_maddrs": list(self._settings.announce) or None,
            "identity_path": str(self._path),
            "check_if_identity_free": False,  # hivemind's check reads RSA keys only
            "nat_port_map": not self._settings.loopback,
            "use_auto_relay": bool(self._settings.relays),
            "trusted_relays": list(self._settings.relays) or None,
            "force_reachability": None if self._settings.reachability == "auto" else self._settings.reachability,
        }
        try:
            # A dial can fail once for a lost packet or a busy relay; a private peer is nowhere without one.
            self._p2p = await self._daemon(options, initial, limits.BOOTSTRAP_TRIES if private else 1)
        except NetworkError:
            if not initial or private:
                raise
            # Every bootstrap peer is dead: start alone; those who come later find us through the coordinator.
            self._log.warning("no bootstrap peer answers; starting alone", bootstrap=initial)
            self._p2p = await self._daemon(options)
        self._lives.begin()
        for protocol in self._handlers:
            await self._register(protocol)
        for topic in self._topics:
            self._spawn(self._listen(topic))
        self._spawn(self._watch(self._p2p))

    async def _daemon(self, options: dict[str, Any], initial: Sequence[str] = (), tries: int = 1) -> P2P:
        """A running p2pd that is connected to one of `initial`. Raises NetworkError after so many tries."""
        delay = limits.RETRY_SECONDS_MIN
        for left in reversed(range(tries)):
            try:
                return await _Daemon.started(initial_peers=list(initial) or None, **options)
            except P2PDaemonError as error:
                if not left:
                    raise NetworkError(f"the libp2p daemon did not start: {error}") from error
                self._log.info("the libp2p daemon did not start; trying again", tries_left=left, error=str(error))
            await asyncio.sleep(delay)
            delay = min(2 * delay, limits.RETRY_SECONDS_MAX)
        raise AssertionError("no try was allowed")

    async def _watch(self, p2p: Any) -> None:
        """p2pd's death is an event here; hivemind's own handle stays "alive"."""
        await p2p._child.wait()
        if self._closing or p2p is not self._p2p:
            return
        self._log.warning("the libp2p daemon died; starting it again", restarts=self.restarts)
        with suppress(*_FAILURES):
            await p2p.shutdown()  # closes what the dead daemon left
        delay = limits.RETRY_SECONDS_MIN
        while not self._closing and self.restarts < DAEMON_RESTARTS_MAX:
            self.restarts += 1
            try:
                await self._launch()
            except (NetworkError, *_FAILURES) as error:
                self._log.warning("the libp2p daemon does not start", error=str(error))
                await asyncio.sleep(delay)
                delay = min(delay * 2, limits.RETRY_SECONDS_MAX)
                continue
            if self.on_restart is not None:
                await self.on_restart()
            return

    async def stop(self) -> None:
        """Stop p2pd and every task; nothing is left running."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._p2p is not None:
            await self._p2p.shutdown()

    # ---- addresses and connections -----------------------------------------------------------------------------------

    async def addresses(self) -> list[str]:
        """Where others can reach this peer, relayed addresses included; loopback only if there is nothing else."""
        try:
            found = [str(address) for address in await asyncio.wait_for(self.p2p.get_visible_maddrs(latest=True), 5)]
        except (ValueError, *_FAILURES):
            return []
        outside = [address for address in found if "/127.0.0.1/" not in address and "/::1/" not in address]
        return outside or found

    async def connected(self) -> dict[str, bool]:
        """Peer ids that this peer has a connection to, and whether it is direct (False: through a relay only)."""
        try:
            peers = await asyncio.wait_for(self.p2p.list_peers(), limits.CONNECT_SECONDS_MAX)
        except _FAILURES:
            return {}
        found: dict[str, bool] = {}
        for peer in peers:
            direct = any(CIRCUIT not in str(address) for address in peer.addrs)
            found[peer.peer_id.to_base58()] = found.get(peer.peer_id.to_base58(), False) or direct
        return found

    async def connect(self, addresses: list[str]) -> bool:
        """Dial one peer at its addresses (all ending in the same /p2p/<id>). False if none answers, or none is any."""
        target = addresses[0].rpartition("/p2p/")[2]
        try:
            maddrs = [Multiaddr(it.text.rpartition("/p2p/")[0]) for it in usable(addresses, target)]
            call = self.p2p._client.connect(PeerID.from_base58(target), maddrs)
            await asyncio.wait_for(call, limits.CONNECT_SECONDS_MAX)
        except (ValueError, *_FAILURES):
            return False
        return True

    async def straighten(self, remote: str, addresses: list[str]) -> bool:
        """Change a relayed connection into a direct one to these public addresses; whether it is direct now.

        p2pd takes a relayed connection for a connection and dials no other, so it is closed first: streams on it break.
        The other side may dial back through the relay before our dial is done, so it is tried a few times.
        """
        for _ in range(limits.STRAIGHTEN_TRIES):
            disconnect = self.p2p._client.disconnect(PeerID.from_base58(remote))
            try:
                await asyncio.wait_for(disconnect, limits.CONNECT_SECONDS_MAX)
            except (ValueError, *_FAILURES):
                return False
            await self.connect(addresses)
            if (await self.connected()).get(remote, False):
                return True
        return False

    async def meet(self) -> None:
        """Make sure that those who are connected talk to this life of the peer, not to one before (see `lives`)."""
        await self._lives.meet(set(await self.connected()))

    async def _on_life(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await self._lives.answer(remote, reader, writer):
            self._log.info("a peer has come back; dropping its old connections", to=remote[-8:])
            self._spawn(self._drop_soon(remote))

    async def _drop_soon(self, remote: str) -> None:
        await asyncio.sleep(lives.DROP_SECONDS)
        await self._drop(remote)

    async def _drop(self, remote: str) -> None:
        """End all connections to a peer, best effort; the next stream dials again."""
        with suppress(*_FAILURES):
            await asyncio.wait_for(self.p2p._client.disconnect(PeerID.from_base58(remote)), limits.CONNECT_SECONDS_MAX)

    async def _redial(self, remote: str) -> None:
        """Connect at the addresses that p2pd remembers, best effort."""
        with suppress(ValueError, *_FAILURES):
            await asyncio.wait_for(self.p2p._client.connect(PeerID.from_base58(remote), []), limits.CONNECT_SECONDS_MAX)

    # ---- streams -----------------------------------------------------------------------------------------------------

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Answer streams of a protocol; the handler gets the remote's peer id."""
        self._handlers[protocol] = handler
        await self._register(protocol)

    async def _register(self, protocol: str) -> None:
        handler = self._handlers[protocol]

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(info.peer_id.to_base58(), reader, writer)
            except _FAILURES as error:
                self._log.debug("stream ended", protocol=protocol, error=str(error))
            finally:
                writer.close()

        await self.p2p.add_binary_stream_handler(protocol, handle)

    async def open(self, remote: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to the peer with this public key; NetworkError if it cannot be reached."""
        target = peer_id(remote)
        try:
            async with asyncio.timeout(limits.STREAM_OPEN_SECONDS_MAX):
                stream = await self._open(target, protocol)
        except _FAILURES as error:
            if isinstance(error, TimeoutError):
                self._stuck[target] = self._stuck.get(target, 0) + 1
                if self._stuck[target] >= limits.OPENS_STUCK_MAX:
                    self._spawn(self._renew(target))
            raise NetworkError(f"peer {target} cannot be reached: {str(error) or type(error).__name__}") from error
        self._stuck.pop(target, None)
        return stream

    async def _renew(self, target: str) -> None:
        """A connection on which no stream opens any more is no connection: the next stream dials again."""
        self._stuck.pop(target, None)
        self._log.info("no stream opens; dialling again", to=target[-8:])
        await self._drop(target)

    async def _open(self, remote: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """hivemind's own call leaves its connection to p2pd open when the stream is refused or the wait is cancelled."""
        target = PeerID.from_base58(remote)
        reader, writer = await DaemonConnector(self.p2p.daemon_listen_maddr).open_connection()
        try:
            wanted = p2pd_pb2.StreamOpenRequest(peer=target.to_bytes(), proto=[protocol])
            await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted))
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            raise_if_failed(response)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    # ---- gossip ------------------------------------------------------------------------------------------------------

    def expect(self, members: Iterable[bytes]) -> None:
        """These public keys are expected to gossip: each has an allowance of its own."""
        self._members = frozenset(peer_id_bytes(key) for key in members)

    async def subscribe(self, topic: str, handler: MessageHandler) -> None:
        """Hand every message of a topic to `handler`, also after a restart of the daemon."""
        self._topics[topic] = handler
        self._spawn(self._listen(topic))

    async def _listen(self, topic: str) -> None:
        reader, writer = await DaemonConnector(self.p2p.daemon_listen_maddr).open_connection()
        try:
            subscribe = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.SUBSCRIBE, topic=topic)
            await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=subscribe))
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            while True:
                message = p2pd_pb2.PSMessage()
                await read_pbmsg_safe(reader, message)
                if len(message.data) <= GOSSIP_MESSAGE_BYTES_MAX:
                    self._hear(topic, getattr(message, "from"), message.data, pushed=False)
        except _FAILURES:
            return  # the daemon is gone; _watch starts it and listens again
        finally:
            writer.close()

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip a small message. NetworkError if the daemon does not take it."""
        assert len(data) <= GOSSIP_MESSAGE_BYTES_MAX, f"{len(data)} bytes are not for gossip"
        self._spawn(self._push_to_relayed(topic, data))
        try:
            await asyncio.wait_for(self._publish(topic, data), limits.GOSSIP_SECONDS_MAX)
        except _FAILURES as error:
            raise NetworkError(f"gossip failed: {str(error) or type(error).__name__}") from error

    async def _publish(self, topic: str, data: bytes) -> None:
        reader, writer = await DaemonConnector(self.p2p.daemon_listen_maddr).open_connection()
        try:
            publish = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=topic, data=data)
            await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=publish))
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise NetworkError(f"gossip failed: {response.error.msg}")
        finally:
            writer.close()

    async def _push_to_relayed(self, topic: str, data: bytes) -> None:
        here = await self.connected()
        await asyncio.gather(*(self._push(remote, topic, data) for remote, direct in here.items() if not direct))

    async def insist(self, topic: str, data: bytes) -> None:
        """Gossip, and a stream to every connected peer besides: for words that have to arrive before this peer leaves."""
        ways = [self._push(remote, topic, data) for remote in await self.connected()]
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.GOSSIP_SECONDS_MAX):
                await asyncio.gather(self.publish(topic, data), *ways, return_exceptions=True)

    async def _push(self, remote: str, topic: str, data: bytes) -> None:
        """One message to one peer that gossip does not reach; best effort, as gossip is."""
        name = topic.encode()
        with suppress(NetworkError, OperatorError, *_FAILURES):  # OperatorError: no Ed25519 peer, none of ours
            async with self._pushes:
                reader, writer = await self.open(public_key_of(remote), PUSH_PROTOCOL)
                try:
                    writer.write(len(name).to_bytes(2, "big") + name + len(data).to_bytes(4, "big") + data)
                    await asyncio.wait_for(writer.drain(), limits.GOSSIP_SECONDS_MAX)
                    await asyncio.wait_for(reader.read(1), limits.GOSSIP_SECONDS_MAX)  # it closes first, see blobs.py
                finally:
                    writer.close()

    async def _on_push(self, remote: str, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        """A pushed message goes through the same door as a gossiped one; the stream is closed on return."""
        async with asyncio.timeout(limits.GOSSIP_SECONDS_MAX), self._takes:
            name = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > GOSSIP_MESSAGE_BYTES_MAX:
                return
            data = await reader.readexactly(size)
        topic = name.decode(errors="replace")
        if topic in self._topics:
            self._hear(topic, PeerID.from_base58(remote).to_bytes(), data, pushed=True)

    def _hear(self, topic: str, origin: bytes, data: bytes, *, pushed: bool) -> None:
        """A message may come both ways: the second way is no repetition. Repetitions on one way are for the door to judge.

        `origin` is the peer that said it first, as p2pd has verified. Too many of it go no further: not even their hash
        is computed. All that are not `members` share one allowance, or new identities would give new ones.
        """
        if not self._rate.may(origin if origin in self._members else b"", 1000 * time.monotonic()):
            self.on_refusal(Refusal(Reason.TOO_MANY, f"gossip of {origin.hex()[-16:]}"))
            return
        key = hashlib.sha256(data).digest()
        first = self._heard.setdefault(key, pushed)
        while len(self._heard) > limits.HEARD_MAX:
            del self._heard[next(iter(self._heard))]
        if first == pushed:
            self._topics[topic](data)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Our own mistakes are logged with their traceback."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("the overlay failed", exc_info=error)
