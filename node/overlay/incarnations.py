"""A connection belongs to one life of a peer: each start of the overlay draws a number, and peers that meet tell theirs.

A killed process closes no connection. The process's TCP connections end at once, but other peers keep its QUIC connections for
some 30 s. A p2pd with such a connection uses it first. If the killed peer comes back with its identity, gossip and streams to
it go into a connection that nobody reads.

So a peer that receives another peer's new number drops its connections to the old life, and the peer that asked dials again. A
stranger's false number costs at most the stranger's own connection. ADR 20.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from protos.errors import NetworkError, OperatorError
from protos.identity import public_key_of

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
    """One peer's. `open` opens a stream to a public key, `drop` ends all connections to a peer id, `dial` makes a new one."""

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
