"""Blobs by hash: serve what this peer holds, pull what it lacks from any holder; resumable, bounded, each blob once.

Framing on a stream: uint32 big-endian length + protobuf BlobRequest; the same + BlobResponse, then the raw bytes.
Knows no payloads or snapshots: what a blob means is checked by those who asked for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from node.swarm import settings as limits
from node.swarm.host import Host
from protos.envelope import parse
from protos.errors import NetworkError, Reason, Refusal
from protos.identity import short
from protos.limits import HASH_BYTES
from protos.v1 import update_pb2

PROTOCOL = "/swarmentum/blob/1"
FRAME_BYTES_MAX = 256
CHUNK_BYTES = 1 << 16

Lookup = Callable[[bytes], bytes | None]
_Reader: TypeAlias = asyncio.StreamReader
_Writer: TypeAlias = asyncio.StreamWriter


@dataclass
class WireBytes:
    """Bytes on blob streams, framing included, and the part of them that is blob."""

    sent: int = 0
    received: int = 0
    blob_sent: int = 0
    blob_received: int = 0


async def _write_frame(writer: asyncio.StreamWriter, data: bytes) -> int:
    writer.write(len(data).to_bytes(4, "big") + data)
    await asyncio.wait_for(writer.drain(), limits.STREAM_IDLE_SECONDS_MAX)
    return 4 + len(data)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), limits.STREAM_IDLE_SECONDS_MAX), "big")
    if size > FRAME_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"frame of {size} bytes, at most {FRAME_BYTES_MAX}")
    return await asyncio.wait_for(reader.readexactly(size), limits.STREAM_IDLE_SECONDS_MAX)


class BlobServer:
    """Answers blob requests from `lookup`. At most SERVES_MAX at once; a silent reader is cut off."""

    def __init__(self, lookup: Lookup, wire: WireBytes, refused: Callable[[Refusal], None]) -> None:
        self._lookup = lookup
        self._wire = wire
        self._refused = refused
        self._slots = asyncio.Semaphore(limits.SERVES_MAX)

    async def handle(self, _remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream: one request, one answer."""
        async with self._slots:
            try:
                frame = await _read_frame(reader)
                request = parse(update_pb2.BlobRequest, frame)
                if len(request.sha256) != HASH_BYTES:
                    raise Refusal(Reason.MALFORMED, f"hash of {len(request.sha256)} bytes")
            except Refusal as refusal:
                self._refused(refusal)
                return
            self._wire.received += 4 + len(frame)
            await self._answer(request, writer)
            # When either side closes its socket, p2pd closes and then resets the stream, and over QUIC a reset drops what is
            # still under way (measured: 8 % of blobs cut short). So the side that receives closes first.
            await asyncio.wait_for(reader.read(1), limits.STREAM_IDLE_SECONDS_MAX)

    async def _answer(self, request: update_pb2.BlobRequest, writer: asyncio.StreamWriter) -> None:
        blob = self._lookup(request.sha256)
        rest = memoryview(blob or b"")[request.offset :]
        response = update_pb2.BlobResponse(
            found=blob is not None, total_bytes=len(blob or b""), remaining_bytes=len(rest)
        )
        self._wire.sent += await _write_frame(writer, response.SerializeToString())
        for start in range(0, len(rest), CHUNK_BYTES):
            part = rest[start : start + CHUNK_BYTES]
            writer.write(bytes(part))
            await asyncio.wait_for(writer.drain(), limits.STREAM_IDLE_SECONDS_MAX)
            self._wire.sent += len(part)
            self._wire.blob_sent += len(part)


class BlobFetcher:
    """Pulls blobs. Concurrent requests for one blob share one transfer; a broken one resumes from another holder."""

    def __init__(self, host: Host, wire: WireBytes) -> None:
        self._host = host
        self._wire = wire
        self._slots = asyncio.Semaphore(limits.PULLS_MAX)
        self._running: dict[bytes, asyncio.Task[bytes]] = {}
        self._away: dict[bytes, float] = {}
        self.poisoned: dict[bytes, int] = {}

    async def fetch(self, sha256: bytes, size: int, holders: Sequence[bytes]) -> bytes:
        """The blob of exactly `size` bytes with this hash. NetworkError if no holder has it now."""
        task = self._running.get(sha256)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._pull(sha256, size, list(dict.fromkeys(holders))))
            self._running[sha256] = task
            task.add_done_callback(lambda done: self._ended(sha256, done))
        return await asyncio.shield(task)

    def _ended(self, sha256: bytes, task: asyncio.Task[bytes]) -> None:
        """Its failure belongs to those who wait; if they were all cancelled, nobody needs it."""
        self._running.pop(sha256, None)
        if not task.cancelled():
            task.exception()

    async def _pull(self, sha256: bytes, size: int, holders: list[bytes]) -> bytes:
        buffer, problems = bytearray(), list[str]()
        async with self._slots:
            left = self._in_order(holders)
            while left and (stream := await self._open_first(left, problems)) is not None:
                holder, reader, writer = stream
                left.remove(holder)
                try:
                    await self._transfer(reader, writer, sha256, size, buffer)
                except (NetworkError, Refusal, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                    problems.append(f"{short(holder)}: {error or type(error).__name__}")
                    continue
                finally:
                    writer.close()
                if hashlib.sha256(buffer).digest() == sha256:
                    return bytes(buffer)
                self.poisoned[holder] = self.poisoned.get(holder, 0) + 1
                problems.append(f"{short(holder)}: other bytes than it named")
                buffer.clear()
        raise NetworkError(f"no holder gave blob {sha256.hex()[:16]}: {'; '.join(problems) or 'nobody to ask'}")

    async def _open_first(self, left: list[bytes], problems: list[str]) -> tuple[bytes, _Reader, _Writer] | None:
        """A stream to the first holder of `left` that answers; each gets HEDGE_SECONDS before the next is asked too.

        A dead peer costs a second, not a dial's whole timeout. Who does not answer is taken out of `left`.
        """
        asked: dict[asyncio.Task[tuple[_Reader, _Writer]], bytes] = {}
        waiting = list(left)
        try:
            while waiting or asked:
                if waiting:
                    holder = waiting.pop(0)
                    asked[asyncio.get_running_loop().create_task(self._host.open(holder, PROTOCOL))] = holder
                hedge = limits.HEDGE_SECONDS if waiting else None  # the last ones have the open's own deadline
                done, _ = await asyncio.wait(asked, timeout=hedge, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    holder = asked[task]
                    if task.exception() is None:
                        del asked[task]
                        self._away.pop(holder, None)
                        return holder, *task.result()
                    del asked[task]
                    left.remove(holder)
                    self._away[holder] = time.monotonic() + limits.AWAY_SECONDS
                    problems.append(f"{short(holder)}: {task.exception()}")
            return None
        finally:
            await self._give_up(asked)

    async def _give_up(self, asked: dict[asyncio.Task[tuple[_Reader, _Writer]], bytes]) -> None:
        for task, holder in asked.items():
            task.cancel()
            self._away[holder] = time.monotonic() + limits.AWAY_SECONDS
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                outcome[1].close()

    def _in_order(self, holders: list[bytes]) -> list[bytes]:
        """Those that answer first; who was just found away last (it may be the only one that has it)."""
        now = time.monotonic()
        self._away = {key: until for key, until in self._away.items() if until > now}
        others = [key for key in holders if key != self._host.identity.public_key]
        return sorted(others, key=lambda key: key in self._away)

    async def _transfer(self, reader: _Reader, writer: _Writer, sha256: bytes, size: int, buffer: bytearray) -> None:
        """Append what is missing; what arrived stays in `buffer` when the stream breaks."""
        request = update_pb2.BlobRequest(sha256=sha256, offset=len(buffer))
        self._wire.sent += await _write_frame(writer, request.SerializeToString())
        frame = await _read_frame(reader)
        self._wire.received += 4 + len(frame)
        response = parse(update_pb2.BlobResponse, frame)
        if not response.found:
            raise NetworkError("does not hold it")
        if response.total_bytes != size or response.remaining_bytes != size - len(buffer):
            raise Refusal(Reason.OUT_OF_RANGE, f"offers {response.total_bytes} bytes, expected {size}")
        while len(buffer) < size:
            part = await asyncio.wait_for(
                reader.read(min(CHUNK_BYTES, size - len(buffer))), limits.STREAM_IDLE_SECONDS_MAX
            )
            if not part:
                raise NetworkError("the stream ended early")
            buffer += part
            self._wire.received += len(part)
            self._wire.blob_received += len(part)
