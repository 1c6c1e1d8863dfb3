"""Server-sent events: one message is made once, and every reader of a run gets the same bytes.

Readers are bounded. A reader that does not read in time is dropped: its connection ends, and its browser connects again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

READERS_MAX: Final = 1024
READER_MESSAGES_MAX: Final = 16
"""Messages that wait for one reader."""
SEND_SECONDS_MAX: Final = 10.0
"""A reader whose connection takes no bytes for so long is dropped."""
KEEP_ALIVE_SECONDS: Final = 15.0
"""A silent stream gets a comment this often, so that proxies keep it open."""
KEEP_ALIVE = b": still here\n\n"
END = b""

Send = Callable[[bytes], Any]


def message(event: str, data: Any) -> bytes:
    """One event. The data is one line of JSON, so no text in it can begin another event."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"event: {event}\ndata: {text}\n\n".encode("ascii")


class Reader:
    """One open stream."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(READER_MESSAGES_MAX)
        self.dropped = False

    def put(self, data: bytes) -> bool:
        """Whether there was room."""
        try:
            self._waiting.put_nowait(data)
        except asyncio.QueueFull:
            self.dropped = True
        return not self.dropped

    async def messages(self) -> AsyncIterator[bytes]:
        """Messages until the channel ends the stream; a comment if there is none for a while."""
        while not self.dropped:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    data = await self._waiting.get()
            except TimeoutError:
                data = KEEP_ALIVE
            if data == END:
                return
            yield data

    def end(self) -> None:
        """End the stream, also if messages wait."""
        self.dropped = True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(END)


class Channels:
    """The readers of each run, and of the list (under the empty name)."""

    def __init__(self, readers_max: int = READERS_MAX) -> None:
        self._readers: dict[str, set[Reader]] = {}
        self._readers_max = readers_max
        self._closed = False

    @property
    def count(self) -> int:
        """Open streams."""
        return sum(map(len, self._readers.values()))

    def enter(self, name: str) -> Reader | None:
        """A new reader; None if there are too many, or the process stops."""
        if self._closed or self.count >= self._readers_max:
            return None
        reader = Reader()
        self._readers.setdefault(name, set()).add(reader)
        return reader

    def leave(self, name: str, reader: Reader) -> None:
        """The reader has gone; safe to call twice."""
        readers = self._readers.get(name, set())
        readers.discard(reader)
        if not readers:
            self._readers.pop(name, None)

    def watched(self, name: str) -> bool:
        """Whether anybody reads."""
        return name in self._readers

    def publish(self, name: str, data: bytes) -> None:
        """Give a message to each reader; those that have no room are dropped."""
        for reader in list(self._readers.get(name, ())):
            if not reader.put(data):
                reader.end()
                self.leave(name, reader)

    def end(self, name: str) -> None:
        """End the streams of one run."""
        for reader in self._readers.pop(name, set()):
            reader.end()

    def close(self) -> None:
        """End all streams, and take no new reader."""
        self._closed = True
        for readers in list(self._readers.values()):
            for reader in readers:
                reader.end()
        self._readers.clear()


async def stream(reader: Reader, send: Send) -> bool:
    """Send the reader's messages. False if the other side took no bytes in time, or was dropped."""
    async for data in reader.messages():
        try:
            async with asyncio.timeout(SEND_SECONDS_MAX):
                await send(data)
        except TimeoutError:
            return False
    return not reader.dropped
