"""How fast a machine uploads (ADR 50): it sends a bounded number of bytes to a peer of the run, which counts and forgets them.

`swarmentum doctor` asks. A peer takes test bytes only if its owner lets it carry bytes of others, and gives no limit in Mbit/s.
Refuses a second measurement at the same time, and more than a few a minute: identities are free, and an owner pays for bytes.

On the stream: one byte of the taker (1: send, 0: not now), then bytes of the sender. The taker answers each CHUNK_BYTES of
them with one byte. The sender knows its rate from the times of these answers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from node.blobs.blobs import WireBytes, drained
from node.overlay.host import Host
from protos.address import site
from protos.errors import NetworkError
from protos.limits import RateLimiter

PROTOCOL = "/swarmentum/test-bytes/1"
CHUNK_BYTES = 1 << 15
BYTES_MAX = 2 << 20
CHUNKS_MAX = BYTES_MAX // CHUNK_BYTES
SEND_SECONDS = 4.0
"""A sender writes no more after so long; then it waits for the answers to what is under way."""
TAKE_SECONDS_MAX = 15.0
ANSWER_SECONDS_MAX = 5.0
# All measurements together: 35 kB a second on average. One network address has one in five minutes.
ALL_BURST, ALL_EACH_MS = 3, 60_000.0
SITE_BURST, SITE_EACH_MS = 2, 300_000.0
SITES_KEPT = 1024
YES, NO = b"\x01", b"\x00"

Open = Callable[[bytes, str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True)
class Upload:
    """So many bytes went, in so many seconds."""

    size: int
    seconds: float


class Taker:
    """Takes test bytes, as far as the owner of the host gives bytes for others. `wire` counts them."""

    def __init__(self, host: Host, wire: WireBytes) -> None:
        self._host, self._wire = host, wire
        self._all = RateLimiter(ALL_BURST, ALL_EACH_MS, 1)
        self._sites = RateLimiter(SITE_BURST, SITE_EACH_MS, SITES_KEPT)
        self._busy = False

    async def handle(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One measurement, at most BYTES_MAX and TAKE_SECONDS_MAX."""
        if not await self._may(remote):
            writer.write(NO)
            await drained(writer)
            return
        self._busy = True
        try:
            async with asyncio.timeout(TAKE_SECONDS_MAX):
                writer.write(YES)
                await drained(writer)
                await self._take(reader, writer)
        finally:
            self._busy = False

    async def _may(self, remote: str) -> bool:
        wire = self._wire
        if self._busy or wire.down.shut or wire.down.limited or not self._host.gives_bytes:
            return False
        ip, now_ms = await self._host.seen_at(remote), 1000 * time.monotonic()
        if ip is None or self._busy:  # a relayed connection measures the relay
            return False
        return self._sites.allow(site(ipaddress.ip_address(ip)), now_ms) and self._all.allow("", now_ms)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(CHUNKS_MAX):
            try:
                await reader.readexactly(CHUNK_BYTES)
            except asyncio.IncompleteReadError:
                return
            self._wire.received += CHUNK_BYTES
            writer.write(YES)
            await drained(writer)


async def measure(open_stream: Open, key: bytes) -> Upload | None:
    """Send test bytes to the peer with this public key. None: it takes none, or nothing arrived. Ends within 25 s."""
    try:
        reader, writer = await open_stream(key, PROTOCOL)
    except NetworkError:
        return None
    try:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            if await reader.readexactly(1) != YES:
                return None
        sending = asyncio.ensure_future(_send(writer))
        try:
            return await _answered(reader, sending)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    except (OSError, EOFError, TimeoutError):
        return None
    finally:
        writer.close()


async def _send(writer: asyncio.StreamWriter) -> int:
    """Write chunks until SEND_SECONDS or BYTES_MAX; returns their number."""
    until, sent = time.monotonic() + SEND_SECONDS, 0
    chunk = bytes(range(256)) * (CHUNK_BYTES // 256)
    while sent < CHUNKS_MAX and time.monotonic() < until:
        writer.write(chunk)
        sent += 1
        await writer.drain()
    return sent


async def _answered(reader: asyncio.StreamReader, sending: asyncio.Future[int]) -> Upload | None:
    """The rate between the first answer and the last one: the first chunk also waits for a round trip."""
    times: list[float] = []
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(TAKE_SECONDS_MAX):
            while len(times) < CHUNKS_MAX and (not sending.done() or len(times) < sending.result()):
                if not await reader.read(1):
                    break
                times.append(time.monotonic())
    if len(times) < 2:
        return None
    return Upload((len(times) - 1) * CHUNK_BYTES, times[-1] - times[0])
