"""libp2p streams over the daemon: protocols that this peer answers, and streams that it opens.

Refuses to wait: an open has STREAM_OPEN_SECONDS_MAX. A connection on which no stream opens any more is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from node.overlay.daemon import FAILURES, Daemon
from node.overlay.links import Links
from node.overlay.tasks import Tasks
from protos.errors import NetworkError
from protos.identity import peer_id

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
        """Answer streams of a protocol from now on."""
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

        await self._daemon.p2p.add_binary_stream_handler(protocol, handle)

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
            raise NetworkError(f"peer {target} cannot be reached: {str(error) or type(error).__name__}") from error
        self._stuck.pop(target, None)
        return stream

    async def _renew(self, target: str) -> None:
        """Drop a connection on which no stream opens: the next stream dials again."""
        self._stuck.pop(target, None)
        self._log.info("no stream opens on the connection; dropping it to dial again", to=target[-8:])
        await self._links.drop(target)

    async def _open(self, remote: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """hivemind's own call leaves its connection to p2pd open when the stream is refused or the wait is cancelled."""
        target = PeerID.from_base58(remote)
        reader, writer = await self._daemon.connection()
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
