"""Blob streams to holders, kept between transfers, and how long each holder takes to open one and to answer.

A new stream costs a round trip, and p2pd leaks memory for each stream that it closes over QUIC (ADR 6). Knows no blobs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from node.blobs.blobs import PROTOCOL
from node.overlay.host import Host

STREAMS_KEPT_MAX = 4
# Holders whose times are remembered.
TIMES_KEPT = 1024


@dataclass
class Stream:
    """An open blob stream to a holder; `used`: it was kept from an earlier transfer, which took `previous_ms`."""

    holder: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False
    previous_ms: int = 0


class Times:
    """How long something last took with each holder, in seconds; 0 for a holder without a measurement."""

    def __init__(self) -> None:
        self._of: dict[bytes, float] = {}

    def note(self, holder: bytes, seconds: float) -> None:
        """A measurement, in seconds."""
        self._of.pop(holder, None)
        self._of[holder] = seconds
        if len(self._of) > TIMES_KEPT:
            del self._of[next(iter(self._of))]

    def note_longer(self, holder: bytes, seconds: float) -> None:
        """The fetcher stopped waiting after so many seconds, so the holder takes longer than that."""
        self.note(holder, max(seconds, self.usual(holder)))

    def usual(self, holder: bytes) -> float:
        """The last measurement, in seconds."""
        return self._of.get(holder, 0.0)


class HolderStreams:
    """Blob streams to holders; at most STREAMS_KEPT_MAX of each holder are kept between transfers."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.kept: dict[bytes, list[Stream]] = {}
        self.opening, self.answering = Times(), Times()

    async def acquire(self, holder: bytes) -> Stream:
        """A kept stream, or a new one. NetworkError if the holder cannot be reached."""
        kept = self.kept.get(holder, [])
        while kept:
            stream = kept.pop()
            if not stream.reader.at_eof():
                return Stream(holder, stream.reader, stream.writer, used=True, previous_ms=stream.previous_ms)
            stream.writer.close()
        return await self.open(holder)

    async def open(self, holder: bytes) -> Stream:
        """A new stream. NetworkError if the holder cannot be reached."""
        began_at = asyncio.get_running_loop().time()
        reader, writer = await self._host.open(holder, PROTOCOL)
        self.opening.note(holder, asyncio.get_running_loop().time() - began_at)
        return Stream(holder, reader, writer)

    def keep(self, stream: Stream) -> None:
        """The next transfer from this holder may use the stream."""
        kept = self.kept.setdefault(stream.holder, [])
        if len(kept) < STREAMS_KEPT_MAX:
            kept.append(stream)
        else:
            stream.writer.close()

    def drop(self, holder: bytes) -> None:
        """Close the kept streams of a holder."""
        for stream in self.kept.pop(holder, []):
            stream.writer.close()

    def close(self) -> None:
        """Close every kept stream."""
        for holder in list(self.kept):
            self.drop(holder)
