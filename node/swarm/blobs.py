"""Blobs by hash: serve what this peer holds, pull what it lacks from any holder; resumable, bounded, each blob once.

Framing on a stream: uint32 big-endian length + protobuf BlobRequest; the same + BlobResponse, then the raw bytes; then the
next request. Streams are kept and used again: opening one costs a round trip, and p2pd leaks something of every stream that it
closes over QUIC (ADR 6). Knows no payloads or snapshots: what a blob means is checked by those who asked for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass
class WireBytes:
    """Bytes on blob streams, framing included, and the part of them that is blob."""

    sent: int = 0
    received: int = 0
    blob_sent: int = 0
    blob_received: int = 0


class Arrivals:
    """How long blobs of ours took to arrive, as those who pulled them say: nobody else can tell. Bounded."""

    def __init__(self) -> None:
        self._took: OrderedDict[bytes, list[int]] = OrderedDict()

    def add(self, sha256: bytes, milliseconds: int) -> None:
        """One puller's word on one blob."""
        reports = self._took.setdefault(sha256, [])
        if len(reports) < limits.ARRIVAL_REPORTS_MAX:
            reports.append(milliseconds)
        if len(self._took) > limits.ARRIVALS_MAX:
            self._took.popitem(last=False)

    def milliseconds(self, sha256: bytes) -> float | None:
        """The median of the pullers' words: one who is slow himself, or lies, does not decide. None: nobody said."""
        reports = self._took.get(sha256)
        return statistics.median(list(reports)) if reports else None


@dataclass
class Stream:
    """An open blob stream to a holder; `used`: it was kept from an earlier transfer, which took `previous_ms`."""

    holder: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False
    previous_ms: int = 0


async def _write_frame(writer: asyncio.StreamWriter, data: bytes) -> int:
    writer.write(len(data).to_bytes(4, "big") + data)
    await asyncio.wait_for(writer.drain(), limits.STREAM_IDLE_SECONDS_MAX)
    return 4 + len(data)


async def _read_frame(reader: asyncio.StreamReader, wait_seconds: float = limits.STREAM_IDLE_SECONDS_MAX) -> bytes:
    """One frame; it may take `wait_seconds` to begin."""
    size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), wait_seconds), "big")
    if size > FRAME_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"frame of {size} bytes, at most {FRAME_BYTES_MAX}")
    return await asyncio.wait_for(reader.readexactly(size), limits.STREAM_IDLE_SECONDS_MAX)


class BlobServer:
    """Answers blob requests from `lookup`, one after the other on each stream. At most SERVES_MAX at once."""

    def __init__(self, lookup: Lookup, wire: WireBytes, refused: Callable[[Refusal], None]) -> None:
        self._lookup = lookup
        self._wire = wire
        self._refused = refused
        self.arrivals = Arrivals()
        self._slots = asyncio.Semaphore(limits.SERVES_MAX)
        self._streams: dict[str, int] = {}

    async def handle(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream, until the other side closes it, says nothing for long, or says something wrong."""
        if self._streams.get(remote, 0) >= limits.STREAMS_A_PEER_MAX:
            return
        self._streams[remote] = self._streams.get(remote, 0) + 1
        whole = b""  # the blob that this stream carried last, from its first byte
        try:
            while True:
                frame = await _read_frame(reader, limits.STREAM_KEPT_SECONDS)
                request = parse(update_pb2.BlobRequest, frame)
                if len(request.sha256) != HASH_BYTES:
                    raise Refusal(Reason.MALFORMED, f"hash of {len(request.sha256)} bytes")
                self._wire.received += 4 + len(frame)
                if whole and request.previous_ms:
                    self.arrivals.add(whole, request.previous_ms)
                async with self._slots:
                    found = await self._answer(request, writer)
                whole = request.sha256 if found and not request.offset else b""
        except Refusal as refusal:
            self._refused(refusal)
        finally:
            self._streams[remote] -= 1
            if not self._streams[remote]:
                del self._streams[remote]

    async def _answer(self, request: update_pb2.BlobRequest, writer: asyncio.StreamWriter) -> bool:
        """Whether the blob is here."""
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
        return blob is not None


def _patience(size: int, *, impatient: bool) -> float:
    """Seconds that a holder has for so many bytes."""
    rate = limits.IMPATIENT_BYTES_A_SECOND if impatient else limits.PATIENT_BYTES_A_SECOND
    return (limits.IMPATIENT_SECONDS if impatient else limits.STREAM_IDLE_SECONDS_MAX) + size / rate


class OtherLengthError(Exception):
    """A holder names another length than the one that the buffer was begun with."""


class Begun:
    """A blob that is under way. Its length is the one that was named or, if others are taken, that a holder offers."""

    def __init__(self, total: int, total_max: int | None) -> None:
        self.buffer, self.total = bytearray(), total
        self._total_max = total_max
        self._tried: set[int] = set()

    @property
    def missing(self) -> int:
        """Bytes."""
        return self.total - len(self.buffer)

    def offered(self, total: int) -> None:
        """Go by another length. Raises Refusal if none is taken, `OtherLengthError` if the buffer has to go first.

        Each length is begun with once: of two holders that contradict each other for ever, one is not asked again.
        """
        if self._total_max is None or not 0 < total <= self._total_max or total in self._tried:
            raise Refusal(Reason.OUT_OF_RANGE, f"offers {total} bytes, expected {self.total}")
        self._tried.add(total)
        self.total = total
        if self.buffer:
            self.buffer.clear()
            raise OtherLengthError


class BlobFetcher:
    """Pulls blobs. Concurrent requests for one blob share one transfer; a broken one resumes from another holder."""

    def __init__(self, host: Host, wire: WireBytes, refused: Callable[[Refusal], None]) -> None:
        self._host = host
        self._refused = refused
        self._wire = wire
        self._slots = asyncio.Semaphore(limits.PULLS_MAX)
        self._running: dict[bytes, asyncio.Task[bytes]] = {}
        self._away: dict[bytes, float] = {}
        self._kept: dict[bytes, list[Stream]] = {}

    async def fetch(self, sha256: bytes, size: int, holders: Sequence[bytes], size_max: int | None = None) -> bytes:
        """The blob with this hash, of exactly `size` bytes or, with `size_max`, of another length up to that.

        NetworkError if no holder has it now.
        """
        task = self._running.get(sha256)
        if task is None:
            task = asyncio.get_running_loop().create_task(
                self._pull(sha256, Begun(size, size_max), list(dict.fromkeys(holders)))
            )
            self._running[sha256] = task
            task.add_done_callback(lambda done: self._ended(sha256, done))
        return await asyncio.shield(task)

    def _ended(self, sha256: bytes, task: asyncio.Task[bytes]) -> None:
        """Its failure belongs to those who wait; if they were all cancelled, nobody needs it."""
        self._running.pop(sha256, None)
        if not task.cancelled():
            task.exception()

    async def _pull(self, sha256: bytes, blob: Begun, holders: list[bytes]) -> bytes:
        buffer, problems, resumed = blob.buffer, list[str](), False
        async with self._slots:
            left, slow = self._in_order(holders), set[bytes]()
            while left and (stream := await self._open_first(left, problems)) is not None:
                began, why = len(buffer), "other bytes than it named"
                impatient = len(left) > 1 and stream.holder not in slow
                try:
                    async with asyncio.timeout(_patience(blob.missing, impatient=impatient)) as deadline:
                        found = await self._transfer(stream, sha256, blob, deadline, impatient=impatient)
                except OtherLengthError:
                    stream.writer.close()  # what it goes on to send does not fit; it is asked again, from the start
                    self._drop(stream.holder)
                    continue
                except (NetworkError, Refusal, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                    stream.writer.close()
                    if isinstance(error, Refusal):
                        self._refused(error)
                    if deadline.expired():
                        self._drop(stream.holder)
                        self._away[stream.holder] = time.monotonic() + limits.AWAY_SECONDS
                        if impatient:  # the others first; what it sent stays, and so does its turn
                            slow.add(stream.holder)
                            left.append(stream.holder)
                    elif stream.used and len(buffer) == began:
                        self._drop(stream.holder)  # it had died unnoticed: that says nothing about the holder
                        continue
                    why = str(error) or type(error).__name__
                else:
                    self._keep(stream)
                    if hashlib.sha256(buffer).digest() == sha256:
                        return bytes(buffer)
                    if not found:
                        why = "does not hold it"
                    elif began and not resumed:
                        resumed = True  # what somebody else had sent before may be the bad part: again, from the start
                        buffer.clear()
                        continue
                    else:
                        self._refused(Refusal(Reason.HASH_MISMATCH, f"blob from {short(stream.holder)}: {why}"))
                        buffer.clear()
                left.remove(stream.holder)
                problems.append(f"{short(stream.holder)}: {why}")
        raise NetworkError(f"no holder gave blob {sha256.hex()[:16]}: {'; '.join(problems) or 'nobody to ask'}")

    # ---- streams -----------------------------------------------------------------------------------------------------

    async def _stream(self, holder: bytes) -> Stream:
        """One that is kept, or a new one."""
        kept = self._kept.get(holder, [])
        while kept:
            stream = kept.pop()
            if not stream.reader.at_eof():
                return Stream(holder, stream.reader, stream.writer, used=True, previous_ms=stream.previous_ms)
            stream.writer.close()
        reader, writer = await self._host.open(holder, PROTOCOL)
        return Stream(holder, reader, writer)

    def _keep(self, stream: Stream) -> None:
        kept = self._kept.setdefault(stream.holder, [])
        if len(kept) < limits.STREAMS_KEPT_MAX:
            kept.append(stream)
        else:
            stream.writer.close()

    def _drop(self, holder: bytes) -> None:
        for stream in self._kept.pop(holder, []):
            stream.writer.close()

    def close(self) -> None:
        """Close every kept stream."""
        for holder in list(self._kept):
            self._drop(holder)

    async def _open_first(self, left: list[bytes], problems: list[str]) -> Stream | None:
        """A stream to the first holder of `left` that answers; each gets HEDGE_SECONDS before the next is asked too.

        A dead peer costs a second, not a dial's whole timeout. Who does not answer is taken out of `left`.
        """
        asked: dict[asyncio.Task[Stream], bytes] = {}
        waiting = list(left)
        try:
            while waiting or asked:
                if waiting:
                    holder = waiting.pop(0)
                    asked[asyncio.get_running_loop().create_task(self._stream(holder))] = holder
                hedge = limits.HEDGE_SECONDS if waiting else None  # the last ones have the open's own deadline
                done, _ = await asyncio.wait(asked, timeout=hedge, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    holder = asked[task]
                    error = task.exception()
                    del asked[task]
                    if error is None:
                        self._away.pop(holder, None)
                        return task.result()
                    left.remove(holder)
                    self._away[holder] = time.monotonic() + limits.AWAY_SECONDS
                    problems.append(f"{short(holder)}: {error}")
            return None
        finally:
            await self._give_up(asked)

    async def _give_up(self, asked: dict[asyncio.Task[Stream], bytes]) -> None:
        for task, holder in asked.items():
            task.cancel()
            self._away[holder] = time.monotonic() + limits.AWAY_SECONDS
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, Stream):
                self._keep(outcome)

    def _in_order(self, holders: list[bytes]) -> list[bytes]:
        """Those that answer first; who was just found away last (it may be the only one that has it)."""
        now = time.monotonic()
        self._away = {key: until for key, until in self._away.items() if until > now}
        others = [key for key in holders if key != self._host.identity.public_key]
        return sorted(others, key=lambda key: key in self._away)

    async def _transfer(
        self, stream: Stream, sha256: bytes, blob: Begun, deadline: asyncio.Timeout, *, impatient: bool
    ) -> bool:
        """Append what is missing; False if the holder does not have it. What arrived stays when the stream breaks.

        Where another length is taken, the deadline follows it. Raises `OtherLengthError`, at most once for each length.
        """
        buffer = blob.buffer
        request = update_pb2.BlobRequest(sha256=sha256, offset=len(buffer), previous_ms=stream.previous_ms)
        began, stream.previous_ms = (time.monotonic(), len(buffer)), 0
        self._wire.sent += await _write_frame(stream.writer, request.SerializeToString())
        frame = await _read_frame(stream.reader)
        self._wire.received += 4 + len(frame)
        response = parse(update_pb2.BlobResponse, frame)
        if not response.found:
            return False
        if response.total_bytes != blob.total:
            blob.offered(response.total_bytes)
            deadline.reschedule(asyncio.get_running_loop().time() + _patience(blob.missing, impatient=impatient))
        if response.remaining_bytes != blob.missing:
            raise Refusal(Reason.OUT_OF_RANGE, f"offers {response.remaining_bytes} bytes, {blob.missing} are missing")
        while blob.missing:
            part = await asyncio.wait_for(
                stream.reader.read(min(CHUNK_BYTES, blob.missing)), limits.STREAM_IDLE_SECONDS_MAX
            )
            if not part:
                raise NetworkError("the stream ended early")
            buffer += part
            self._wire.received += len(part)
            self._wire.blob_received += len(part)
        if not began[1]:
            stream.previous_ms = max(1, round((time.monotonic() - began[0]) * 1000))
        return True
