"""Requests to the process that started this one: lines on stdout, and the answers on stdin. Knows no key and no session.

A request is its number, a space, and JSON. An answer is JSON with that number. Requests that wait are bounded, and each has a
deadline. The end of stdin ends all of them, and then this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

WAITING_MAX: Final = 32
ANSWER_SECONDS_MAX: Final = 330.0
"""A model that is built takes up to 300 s (`coordinator/commands/planning.py`); all else takes seconds."""
WRITE_SECONDS_MAX: Final = 10.0
REQUEST_BYTES_MAX: Final = (1 << 20) - 64
LINE_BYTES_MAX: Final = 8 << 20
"""An answer: 512 peers and 512 invites, with their texts."""


@dataclass(frozen=True)
class PipeReply:
    """A status of HTTP, and JSON. `cookie`: a session begins."""

    status: int
    body: dict[str, Any]
    cookie: str = ""


class Asks(Protocol):
    """Where requests go."""

    async def ask(self, values: dict[str, Any]) -> PipeReply:
        """The answer to one request."""


class Pipe:
    """The two pipes. `run` reads the answers until stdin ends."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[PipeReply]] = {}
        self._next = 0
        self._out: asyncio.StreamWriter | None = None

    async def ask(self, values: dict[str, Any]) -> PipeReply:
        """The answer, or a status that says why there is none."""
        if self._out is None or len(self._waiting) >= WAITING_MAX:
            return PipeReply(503, {"error": "too many requests wait for the coordinator: try again in a moment"})
        number, self._next = self._next, self._next + 1
        line = json.dumps(values, ensure_ascii=True).encode("ascii")
        if len(line) > REQUEST_BYTES_MAX:
            return PipeReply(413, {"error": f"the request has more than {REQUEST_BYTES_MAX} bytes"})
        waits: asyncio.Future[PipeReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waits
        try:
            self._out.write(b"%d %b\n" % (number, line))
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await self._out.drain()
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                return await waits
        except (TimeoutError, ConnectionError):
            return PipeReply(504, {"error": "the coordinator did not answer in time: look whether the action was done"})
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Until stdin ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        )
        out, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop=loop), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        )
        self._out = asyncio.StreamWriter(out, protocol, None, loop)
        try:
            with suppress(ValueError):  # a line that is too long or is no answer ends the reading, and this process
                while line := await reader.readline():
                    self._take(json.loads(line))
        finally:
            self._out = None
            out.close()
            transport.close()
            for waits in self._waiting.values():
                waits.cancel()

    def _take(self, values: dict[str, Any]) -> None:
        waits = self._waiting.get(int(values["id"]))
        if waits is not None and not waits.done():
            waits.set_result(PipeReply(int(values["status"]), dict(values["body"]), str(values["cookie"])))
