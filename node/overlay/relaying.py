"""How much this peer relays for others: counted by p2pd, bounded by a bucket. ADR 50.

p2pd has no limit of a rate. So the bound is one of the mean: a peer that has relayed more than its owner gives stops being a
relay until it has caught up. Refuses to guess: bytes that p2pd does not tell do not count, and where they are bounded, a p2pd
that has told nothing for SILENT_SECONDS relays no more (its port for figures may be another program's).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from protos.errors import NetworkError

LOOK_SECONDS = 2.0
ANSWER_SECONDS_MAX = 2.0
SILENT_SECONDS = 30.0
ANSWER_BYTES_MAX = 4 << 20
# A bucket holds so many seconds of the owner's rate. A peer that has stopped relaying begins again once it is full: each change
# of p2pd's settings ends all of its connections.
BUCKET_SECONDS = 300.0
BITS_A_BYTE = 8
_RELAYED = re.compile(rb"^libp2p_relaysvc_data_transferred_bytes_total (\d+(?:\.\d+)?(?:e\+\d\d)?)$", re.MULTILINE)


class Bucket:
    """Bytes that may be relayed now. `rate`: bytes a second that flow in. Pure: the time is given, in seconds."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self._at = rate, now
        self._left = self._most
        self.is_open = rate > 0

    @property
    def _most(self) -> float:
        return self.rate * BUCKET_SECONDS

    def empty(self, now: float) -> None:
        """Close until it is full again: nobody knows how much was relayed."""
        self._left, self._at, self.is_open = 0.0, now, False

    def take(self, size: int, now: float) -> bool:
        """So many bytes were relayed since the last call. Returns whether this peer may relay now."""
        self._left = min(self._left + (now - self._at) * self.rate, self._most) - size
        self._at = now
        if self._left <= 0:
            self.is_open = False
        elif self._left >= self._most:
            self.is_open = self.rate > 0
        return self.is_open


async def relayed_bytes(port: int) -> int | None:
    """The bytes that the p2pd with its figures at this port has relayed since its start; None: it does not say.

    The whole answer has ANSWER_SECONDS_MAX: the port may be another program's, which never ends its answer. With HTTP 1.0 the
    answer ends where the connection does.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
                await reader.readexactly(ANSWER_BYTES_MAX)
            finally:
                writer.close()
    except asyncio.IncompleteReadError as ended:
        found = _RELAYED.search(ended.partial)
        return None if found is None else int(float(found[1]))
    except (OSError, TimeoutError):
        return None
    return None


class Relaying:
    """Of one peer. `port`: of the present p2pd's figures; `turn` has p2pd relay, or not; `wanted`: see
    `limit`."""

    def __init__(
        self,
        port: Callable[[], int | None],
        turn: Callable[[bool], Awaitable[None]],
        log: Any,
        wanted: float | None = None,
        read: Callable[[int], Awaitable[int | None]] = relayed_bytes,
    ) -> None:
        self._port, self._turn, self._log, self._read = port, turn, log, read
        self._bucket: Bucket | None = None
        self._wanted = wanted
        self._seen: tuple[int | None, int] = (None, 0)
        self._told_at: float | None = None
        self._on = wanted != 0
        self.total = 0
        """Bytes relayed since the start of this peer; each came in once and went out once."""

    def limit(self, bytes_a_second: float | None) -> None:
        """From now on, relay so much on average; None: no limit, 0: nothing."""
        self._wanted = bytes_a_second

    async def keep_forever(self) -> None:
        """Look every LOOK_SECONDS, and have p2pd relay or not."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look(asyncio.get_running_loop().time())
            except NetworkError as error:
                self._log.warning("the overlay is not back", error=str(error))

    async def look(self, now: float) -> None:
        """Once. Raises NetworkError if p2pd does not come back with its new settings."""
        port = self._port()
        new = await self._relayed_since(port)
        self.total += new or 0
        if self._wanted is None:
            self._bucket = None
        elif self._bucket is None or self._bucket.rate != self._wanted:
            self._bucket = Bucket(self._wanted, now)
        if port is None or new is not None or self._told_at is None:
            self._told_at = now
        elif self._bucket is not None and now - self._told_at >= SILENT_SECONDS:
            self._log.warning(
                "the libp2p daemon does not tell what it relays, so the limit closes", seconds=SILENT_SECONDS
            )
            self._bucket.empty(now)
            self._told_at = now
        may = self._bucket is None or self._bucket.take(new or 0, now)
        if may != self._on:
            self._on = may
            mbit = (self._wanted or 0) * BITS_A_BYTE / 1e6
            self._log.info(
                "relaying for others" if may else "relaying no more for now", relay_mbit=mbit, relayed=self.total
            )
            await self._turn(may)

    async def _relayed_since(self, port: int | None) -> int | None:
        """Bytes since the last look; a new p2pd counts from 0."""
        size = None if port is None else await self._read(port)
        if size is None:
            return None
        before = self._seen[1] if self._seen[0] == port else 0
        self._seen = port, size
        return max(size - before, 0)
