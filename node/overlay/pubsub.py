"""Gossip over the daemon's GossipSub, and to peers that GossipSub does not reach.

p2pd runs no GossipSub over relayed connections, so a peer that is connected through a relay only gets each message on a stream.
Refuses messages beyond GOSSIP_MESSAGE_BYTES_MAX, and messages of an origin that sends too many.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import p2pd_pb2

from node.overlay.daemon import FAILURES, Daemon, Tasks
from node.overlay.links import Links, OverlayStreams
from protos.errors import NetworkError, OperatorError, Reason, Refusal, in_words
from protos.identity import peer_id_bytes, public_key_of
from protos.limits import GOSSIP_MESSAGE_BYTES_MAX, RateLimiter

GOSSIP_SECONDS_MAX = 5.0
# How many messages a peer sends at once to peers behind relays, and how many hashes of messages it remembers.
PUSHES_MAX = 64
# Streams of peers that are no members, which may be silent: a message of theirs waits for one of these places.
STRANGERS_PUSHES_MAX = 16
HEARD_MAX = 4096
# Gossip of one member of the roster (and of all other peers together): so many messages at once, and one more each so many ms.
# A peer publishes one or two messages a step.
ORIGIN_MESSAGES_MAX = 1000
ORIGIN_MESSAGE_MS = 10
ORIGINS_KEPT = 4096
PUSH_PROTOCOL = "/swarmentum/push/1"

MessageHandler = Callable[[bytes], None]


class Pubsub:
    """One peer's. `refused` counts messages beyond an origin's allowance."""

    def __init__(
        self, daemon: Daemon, links: Links, streams: OverlayStreams, tasks: Tasks, refused: Callable[[Refusal], None]
    ) -> None:
        self._daemon, self._links, self._streams = daemon, links, streams
        self._tasks, self._refused = tasks, refused
        self._topics: dict[str, MessageHandler] = {}
        self._pushes, self._takes = asyncio.Semaphore(PUSHES_MAX), asyncio.Semaphore(PUSHES_MAX)
        self._takes_of_strangers = asyncio.Semaphore(STRANGERS_PUSHES_MAX)
        self._heard: dict[bytes, bool] = {}
        self._members: frozenset[bytes] = frozenset()
        self._rate = RateLimiter(ORIGIN_MESSAGES_MAX, ORIGIN_MESSAGE_MS, ORIGINS_KEPT)
        streams.answer(PUSH_PROTOCOL, self._on_push)

    def expect(self, members: Iterable[bytes]) -> None:
        """These public keys are expected to gossip: each has an allowance of its own."""
        self._members = frozenset(peer_id_bytes(key) for key in members)

    async def subscribe(self, topic: str, handler: MessageHandler) -> None:
        """Hand every message of a topic to `handler`, also after a restart of the daemon."""
        self._topics[topic] = handler
        self._tasks.spawn(self._listen(topic))

    def register(self) -> None:
        """Subscribe to every topic at a new daemon."""
        for topic in self._topics:
            self._tasks.spawn(self._listen(topic))

    async def _listen(self, topic: str) -> None:
        subscribe = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.SUBSCRIBE, topic=topic)
        try:
            async with self._asked(subscribe) as (_, reader):
                while True:
                    message = p2pd_pb2.PSMessage()
                    await read_pbmsg_safe(reader, message)
                    if len(message.data) <= GOSSIP_MESSAGE_BYTES_MAX:
                        self._hear(topic, getattr(message, "from"), message.data, pushed=False)
        except FAILURES:
            return  # the daemon died; `Daemon` starts the next one, and `register` subscribes again

    @asynccontextmanager
    async def _asked(
        self, request: p2pd_pb2.PSRequest
    ) -> AsyncIterator[tuple[p2pd_pb2.Response, asyncio.StreamReader]]:
        """The daemon's answer to a request on a connection of its own, and what comes after the answer."""
        asked = p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=request)
        response, reader, writer = await self._daemon.open(asked)
        try:
            yield response, reader
        finally:
            writer.close()

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip a small message. NetworkError if the daemon does not take it."""
        assert len(data) <= GOSSIP_MESSAGE_BYTES_MAX, f"{len(data)} bytes are not for gossip"
        self._tasks.spawn(self._push_to_relayed(topic, data))
        try:
            await asyncio.wait_for(self.publish_unchecked(topic, data), GOSSIP_SECONDS_MAX)
        except FAILURES as error:
            raise NetworkError(f"gossip failed: {in_words(error)}") from error

    async def publish_unchecked(self, topic: str, data: bytes) -> None:
        """One message of any size to GossipSub only, without a deadline."""
        publish = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=topic, data=data)
        async with self._asked(publish) as (response, _):
            if response.type == p2pd_pb2.Response.ERROR:
                raise NetworkError(f"gossip failed: {response.error.msg}")

    async def subscribers(self, topic: str) -> set[str]:
        """Ids of the directly connected peers that listen to a topic. Empty if the daemon does not say: it starts again."""
        listed = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.LIST_PEERS, topic=topic)
        try:
            async with asyncio.timeout(GOSSIP_SECONDS_MAX), self._asked(listed) as (response, _):
                return {PeerID(peer).to_base58() for peer in response.pubsub.peerIDs}
        except FAILURES:
            return set()

    async def publish_to_each(self, topic: str, data: bytes) -> None:
        """Gossip a message, and send it on a stream to every connected peer: it has to arrive before this peer stops."""
        ways = [self._push(remote, topic, data) for remote in await self._links.connected()]
        with suppress(TimeoutError):
            async with asyncio.timeout(GOSSIP_SECONDS_MAX):
                await asyncio.gather(self.publish(topic, data), *ways, return_exceptions=True)

    async def _push_to_relayed(self, topic: str, data: bytes) -> None:
        here = await self._links.connected()
        await asyncio.gather(*(self._push(remote, topic, data) for remote, direct in here.items() if not direct))

    async def _push(self, remote: str, topic: str, data: bytes) -> None:
        """Send one message to one peer that gossip does not reach; best effort, as gossip is."""
        name = topic.encode()
        with suppress(
            NetworkError, OperatorError, *FAILURES
        ):  # OperatorError: a key that is not Ed25519, so no peer of a run
            async with self._pushes:
                reader, writer = await self._streams.open(public_key_of(remote), PUSH_PROTOCOL)
                try:
                    writer.write(len(name).to_bytes(2, "big") + name + len(data).to_bytes(4, "big") + data)
                    await asyncio.wait_for(writer.drain(), GOSSIP_SECONDS_MAX)
                    await asyncio.wait_for(
                        reader.read(1), GOSSIP_SECONDS_MAX
                    )  # the receiver closes first, see blobs.py
                finally:
                    writer.close()

    async def _on_push(self, remote: str, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        """A pushed message goes through the same door as a gossiped one; the stream is closed on return."""
        origin = PeerID.from_base58(remote).to_bytes()
        places = self._takes if origin in self._members else self._takes_of_strangers
        async with asyncio.timeout(GOSSIP_SECONDS_MAX), places:
            name = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > GOSSIP_MESSAGE_BYTES_MAX:
                return
            data = await reader.readexactly(size)
        topic = name.decode(errors="replace")
        if topic in self._topics:
            self._hear(topic, origin, data, pushed=True)

    def _hear(self, topic: str, origin: bytes, data: bytes, *, pushed: bool) -> None:
        """Pass a message on, unless it has come the other way already. The inbox decides about repetitions on one way.

        `origin` is the peer that published it, as p2pd has verified. Messages beyond its allowance are refused before their
        hash is computed. Peers that are not `members` share one allowance, because new identities are free.
        """
        if not self._rate.allow(origin if origin in self._members else b"", 1000 * time.monotonic()):
            self._refused(Refusal(Reason.TOO_MANY, f"gossip of {origin.hex()[-16:]}"))
            return
        key = hashlib.sha256(data).digest()
        first = self._heard.setdefault(key, pushed)
        while len(self._heard) > HEARD_MAX:
            del self._heard[next(iter(self._heard))]
        if first == pushed:
            self._topics[topic](data)
