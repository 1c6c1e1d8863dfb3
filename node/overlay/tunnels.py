"""Local ports that lead through the HTTP proxy of a network that lets nothing else out, because p2pd itself knows no proxy.

p2pd dials 127.0.0.1, and this process asks the proxy for the relay (CONNECT). Only for addresses that do not answer directly,
and that the proxy lets through: most proxies allow port 443 alone. libp2p proves who answers, so a proxy is not trusted.
Refuses to listen at any address but 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from protos.address import Address, usable
from protos.errors import in_words
from protos.http_proxy import DIRECT_SECONDS_MAX, HttpProxy, proxy_for

HERE = "127.0.0.1"
HTTPS_PORT = 443
TRIED_MAX = 16
TUNNELS_MAX = 8
CONNECTIONS_MAX = 16
CONNECT_SECONDS_MAX = 10.0
# p2pd's connections say something every 30 s (yamux): one that is silent for longer is dead.
SILENT_SECONDS_MAX = 300.0
CHUNK_BYTES = 64 << 10

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Tunnels:
    """One peer's, over all starts of its p2pd."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._open: dict[asyncio.StreamWriter, list[asyncio.StreamWriter]] = {}
        # Its own: a proxy that is silent would else take all threads that aggregation and publication wait for.
        self._threads = ThreadPoolExecutor(CONNECTIONS_MAX, "http-proxy")
        self._told: list[str] = []
        self._left: list[str] = []

    async def ways(self, addresses: Sequence[str]) -> list[str]:
        """These multiaddresses as p2pd has to dial them in this network. Without a proxy they stay as they are, at once."""
        candidates = [it for it in usable(addresses, most=len(addresses)) if it.transport == "tcp/" and not it.relay]
        candidates.sort(key=lambda it: _port(it) != HTTPS_PORT)
        with_proxy = [(it, proxy) for it in candidates if (proxy := proxy_for(it.host)) is not None][:TRIED_MAX]
        if not with_proxy:
            return list(addresses)
        through = await asyncio.gather(*(self._needs(it, proxy) for it, proxy in with_proxy))
        local: dict[str, str] = {}
        for (it, proxy), needs in zip(with_proxy, through, strict=True):
            if needs and (port := await self._listen(it, proxy)):
                local[it.text] = f"/ip4/{HERE}/tcp/{port}/p2p/{it.peer}"
        left = [it.text for (it, _), needs in zip(with_proxy, through, strict=True) if needs and it.text not in local]
        if left and left != self._left:
            self._left = left
            self._log.warning(
                "this peer has no way to these: few go through the HTTP proxy, each with an IP address",
                addresses=left,
                most=TUNNELS_MAX,
            )
        if local and list(local) != self._told:
            self._told = list(local)
            self._log.info(
                "these peers are reached through the HTTP proxy", proxy=with_proxy[0][1].at, addresses=self._told
            )
        return [_through(address, local) for address in addresses]

    def real(self, address: str) -> str:
        """The multiaddress behind a local port of ours; every other multiaddress stays."""
        for (host, port), server in self._servers.items():
            if address == f"/ip4/{HERE}/tcp/{_local_port(server)}":
                return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"
        return address

    async def close(self) -> None:
        """End all of them."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for writers in self._open.values():
            for writer in writers:
                writer.close()
        self._threads.shutdown(wait=False)

    async def _needs(self, it: Address, proxy: HttpProxy) -> bool:
        """Whether the proxy leads there, and the direct way does not. What needed the proxy before is asked there first: a
        firewall that drops packets costs seconds."""
        if (it.host, _port(it)) in self._servers and await self._leads(it, proxy):
            return True
        return not await _answers(it) and await self._leads(it, proxy)

    async def _leads(self, it: Address, proxy: HttpProxy) -> bool:
        try:
            opened = await self._connect(proxy, it.host, _port(it))
        except OSError:
            return False
        opened.close()
        return True

    async def _connect(self, proxy: HttpProxy, host: str, port: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, proxy.connect, host, port, CONNECT_SECONDS_MAX)

    async def _listen(self, it: Address, proxy: HttpProxy) -> int:
        """The local port that leads there; 0 if there are TUNNELS_MAX already."""
        there = it.host, _port(it)
        if there not in self._servers:
            if it.ip is None or len(self._servers) >= TUNNELS_MAX:
                return 0

            async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._pass_on((reader, writer), proxy, there)

            self._servers[there] = await asyncio.start_server(pass_on, HERE, 0)
        return _local_port(self._servers[there])

    async def _pass_on(self, near: _Streams, proxy: HttpProxy, there: tuple[str, int]) -> None:
        """Pass bytes on, both ways, until one side ends."""
        if len(self._open) >= CONNECTIONS_MAX or not self._servers:
            near[1].close()
            return
        writers = self._open[near[1]] = [near[1]]
        try:
            far = await asyncio.open_connection(sock=await self._connect(proxy, *there))
            writers.append(far[1])
            ways = [asyncio.ensure_future(_copy(near[0], far[1])), asyncio.ensure_future(_copy(far[0], near[1]))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError as error:
            self._log.info(
                "the HTTP proxy does not connect", proxy=proxy.at, to=f"{there[0]}:{there[1]}", why=in_words(error)
            )
        finally:
            del self._open[near[1]]
            for writer in writers:
                writer.close()


def _through(address: str, local: dict[str, str]) -> str:
    """An address that leads to a peer, or on through that peer as a relay."""
    for real, here in local.items():
        if address == real or address.startswith(f"{real}/"):
            return here + address[len(real) :]
    return address


async def _answers(it: Address) -> bool:
    try:
        async with asyncio.timeout(DIRECT_SECONDS_MAX):
            _, writer = await asyncio.open_connection(it.host, _port(it))
    except OSError:
        return False
    writer.close()
    return True


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while True:
            async with asyncio.timeout(SILENT_SECONDS_MAX):
                data = await reader.read(CHUNK_BYTES)
                if not data:
                    return
                writer.write(data)
                await writer.drain()


def _port(it: Address) -> int:
    return int(it.text.split("/")[4])


def _local_port(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])
