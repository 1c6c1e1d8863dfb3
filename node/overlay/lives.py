"""Which life of a peer a connection belongs to: each start of the overlay draws a number, and peers that meet say theirs.

A process that is killed says no goodbye. Its TCP connections end at once, but its QUIC connections stay for some 30 s at
whoever was connected to it, and a p2pd that has one uses it first: when the peer comes back with its identity, gossip for
it and streams to it go into a connection that nobody reads. So who hears a peer's new number drops what it had with the
old life, and the one who asked dials again. What a stranger says here costs at most its own connection. ADR 20.
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
# How long the other side has for reading our answer before its connections are dropped, and we for seeing them gone.
DROP_SECONDS = 0.1
REDIAL_SECONDS = 0.3

Opener = Callable[[bytes, str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Lives:
    """One peer's. `open` opens a stream to a public key, `drop` ends all connections to a peer id, `dial` makes a new one."""

    def __init__(
        self, open_stream: Opener, drop: Callable[[str], Awaitable[None]], dial: Callable[[str], Awaitable[None]]
    ) -> None:
        self._open, self._drop, self._dial = open_stream, drop, dial
        self._own = secrets.token_bytes(LIFE_BYTES)
        self._known: dict[str, bytes] = {}
        self._met: set[str] = set()

    def begin(self) -> None:
        """The overlay was started (again): nobody has met this life."""
        self._own = secrets.token_bytes(LIFE_BYTES)
        self._met = set()

    async def meet(self, here: set[str]) -> None:
        """Tell this life to those of the connected peers that have not heard it on this connection; bounded in time."""
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
        """Hear a peer's life and tell ours. Whether the peer had another life before: its connections are to be dropped."""
        async with asyncio.timeout(SECONDS_MAX):
            new = self._is_new(remote, await reader.readexactly(LIFE_BYTES))
            writer.write(self._own + bytes([new]))
            await writer.drain()
        return new

    def _is_new(self, remote: str, life: bytes) -> bool:
        """Whether we had to do with another life of this peer. Remembers the newest KNOWN_MAX peers."""
        before = self._known.pop(remote, None)
        self._known[remote] = life
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        return before not in (None, life)
