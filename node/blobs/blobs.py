"""Blobs by hash: the protocol on a stream, and its serving side; `fetcher.py` is the asking side.

Waits here end with `asyncio.timeout`, because `wait_for` of Python 3.11 swallows a cancellation that comes with its result.
Framing: uint32 big-endian length + protobuf BlobRequest; the same + BlobResponse, then the raw bytes; then the next request.
Knows no payloads or snapshots: the peer that asked for a blob checks its meaning.

The pace of a direction (`FlowDirection`): at most so many bytes a second, and none at all while it is shut. Bytes of members
of the open step go before a stranger's. Refuses to hold bytes: a sender waits before it writes, and a puller before it asks.

`HolderStreams` are those of the asking side: kept between transfers, with how long each holder takes to open one and to
answer. A new stream costs a round trip, and p2pd leaks memory for each stream that it closes over QUIC (ADR 6).
"""

from __future__ import annotations

import asyncio
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from node.blobs.turns import Audience, ServedStream
from protos.envelope import parse
from protos.errors import Reason, Refusal
from protos.limits import HASH_BYTES
from protos.v1 import update_pb2

if TYPE_CHECKING:
    from node.overlay.host import Host

BURST_SECONDS = 0.25
"""A direction that was quiet may send so much at once, beside the bytes that it is asked for."""
RELAYED_SECONDS_MAX = 5.0
LOOK_SECONDS = 1.0
"""A direction that is shut, or whose limit is lifted, is looked at so often."""


class FlowDirection:
    """One direction. `rate` gives the limit as it is now, in bytes a second; None: no limit."""

    def __init__(self, rate: Callable[[], float | None] = lambda: None) -> None:
        self.shut = False
        """Whether the month's bytes are used up. `ResourceLimits` writes it, from another thread."""
        self._rate = rate
        self._free_at = 0.0
        self._relayed = 0
        self._urgent = 0
        self._lock, self._urgent_lock = asyncio.Lock(), asyncio.Lock()

    @property
    def limited(self) -> bool:
        """Whether the owner gives this direction a limit."""
        return self._rate() is not None

    async def take(self, size: int, *, urgent: bool = False) -> None:
        """Wait until so many bytes may go. `urgent`: before those that are not."""
        if self._rate() is None:
            return
        self._urgent += urgent
        try:
            async with self._urgent_lock if urgent else self._lock:
                while (rate := self._rate()) is not None:
                    now = _now()
                    wait = self._free_at - now
                    if wait <= 0 and (urgent or not self._urgent):
                        self._free_at = max(self._free_at, now - BURST_SECONDS) + size / rate
                        return
                    await asyncio.sleep(min(max(wait, 0.001), LOOK_SECONDS))
        finally:
            self._urgent -= urgent

    def relayed(self, total: int) -> None:
        """So many bytes in all went in this direction for others, past this lane. What is new comes off the rate, at most
        RELAYED_SECONDS_MAX of it: own votes wait no longer for them."""
        new, self._relayed = total - self._relayed, total
        if new > 0 and (rate := self._rate()) is not None:
            now = _now()
            due = max(self._free_at, now - BURST_SECONDS) + new / rate
            self._free_at = max(self._free_at, min(due, now + RELAYED_SECONDS_MAX))

    def give_back(self, size: int) -> None:
        """So many bytes did not go after all."""
        if (rate := self._rate()) is not None:
            self._free_at -= size / rate

    async def opened(self) -> None:
        """Wait while the direction is shut."""
        while self.shut:  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(LOOK_SECONDS)


STREAM_IDLE_SECONDS_MAX = 20.0
PATIENT_BYTES_A_SECOND = 2_000
# A server keeps an idle blob stream for this long. `turns.py` bounds those of a server, `HolderStreams` those of a client.
STREAM_KEPT_SECONDS = 900.0
# Pullers report how long a blob took. These are the blobs that a server remembers, and the reports on each.
ARRIVALS_MAX = 64
ARRIVAL_REPORTS_MAX = 64

PROTOCOL = "/swarmentum/blob/1"
FRAME_BYTES_MAX = 256
CHUNK_BYTES = 1 << 16

Lookup = Callable[[bytes], bytes | None]


@dataclass
class WireBytes:
    """Bytes on blob streams, framing included, and the bytes of blobs among them. `up` and `down` are their pace."""

    sent: int = 0
    received: int = 0
    blob_sent: int = 0
    blob_received: int = 0
    up: FlowDirection = field(default_factory=FlowDirection)
    down: FlowDirection = field(default_factory=FlowDirection)

    def relayed(self, total: int) -> int:
        """So many bytes in all came in and went out for others; returns them."""
        for lane in (self.up, self.down):
            lane.relayed(total)
        return total


class Took(NamedTuple):
    """Milliseconds until the pullers had a blob."""

    typical: float
    slowest: float


class Arrivals:
    """How long this peer's blobs took to arrive, as their pullers report. Only a puller can measure it. Bounded."""

    def __init__(self) -> None:
        self._took: OrderedDict[bytes, dict[str, int]] = OrderedDict()
        self._whole: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()

    def travels_as(self, name: bytes, parts: Iterable[bytes]) -> None:
        """The payload `name` travels as a list of that hash and as these parts: what a part takes, in the same time as the
        others, is what the payload takes. Its list says nothing."""
        self._whole[name] = {name: b"", **dict.fromkeys(parts, name)}
        if len(self._whole) > ARRIVALS_MAX:
            self._whole.popitem(last=False)

    def pulled(self, sha256: bytes, milliseconds: int, remote: str) -> None:
        """One puller's report on one blob, which may be a part of a payload."""
        name = next((parts[sha256] for parts in self._whole.values() if sha256 in parts), sha256)
        if name:
            self.add(name, milliseconds, remote)

    def add(self, sha256: bytes, milliseconds: int, remote: str) -> None:
        """The peer `remote` took so long for a blob, or for its parts of a payload: the longest counts, once for each peer."""
        reports = self._took.setdefault(sha256, {})
        if remote in reports or len(reports) < ARRIVAL_REPORTS_MAX:
            reports[remote] = max(milliseconds, reports.get(remote, 0))
        if len(self._took) > ARRIVALS_MAX:
            self._took.popitem(last=False)

    def took(self, sha256: bytes) -> Took | None:
        """What the pullers reported: one slow or lying puller does not decide what is typical. None without a report."""
        reports = list(self._took.get(sha256, {}).copy().values())
        return Took(statistics.median(reports), max(reports)) if reports else None


async def drained(writer: asyncio.StreamWriter) -> None:
    """Wait until the writer has room for more."""
    async with asyncio.timeout(STREAM_IDLE_SECONDS_MAX):
        await writer.drain()


async def write_frame(writer: asyncio.StreamWriter, data: bytes) -> int:
    """Write one frame. Returns the frame's bytes on the stream."""
    writer.write(len(data).to_bytes(4, "big") + data)
    await drained(writer)
    return 4 + len(data)


async def read_frame(reader: asyncio.StreamReader, wait_seconds: float = STREAM_IDLE_SECONDS_MAX) -> bytes:
    """Read one frame, which may take `wait_seconds` to begin."""
    async with asyncio.timeout(wait_seconds):
        size = int.from_bytes(await reader.readexactly(4), "big")
    if size > FRAME_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"frame of {size} bytes, at most {FRAME_BYTES_MAX}")
    async with asyncio.timeout(STREAM_IDLE_SECONDS_MAX):
        return await reader.readexactly(size)


class BlobServer:
    """The server answers blob requests from `lookup`, one after the other on each stream.

    The server holds a blob in memory once while it sends the blob, even to many peers. `audience` decides which peer is served
    when."""

    def __init__(
        self,
        lookup: Lookup,
        wire: WireBytes,
        refused: Callable[[Refusal], None],
        audience: Audience | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._lookup = lookup
        self._wire = wire
        self._refused = refused
        self.audience = Audience() if audience is None else audience
        self.arrivals = Arrivals() if arrivals is None else arrivals
        self._shared: dict[bytes, tuple[bytes, int]] = {}  # blobs that the server sends now, and to how many peers

    async def handle(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream, until the other side closes it, is silent for too long, or sends something wrong."""
        seat = self.audience.admit(remote, writer.transport.abort, _now())
        if seat is None:
            self._refused(Refusal(Reason.TOO_MANY, f"one more blob stream of {remote[-8:]}"))
            return
        whole = b""  # hash of the last blob, if this stream carried it from its first byte on
        try:
            while True:
                seat.waits_since = _now()
                frame = await read_frame(reader, STREAM_KEPT_SECONDS)
                seat.waits_since = None
                request = parse(update_pb2.BlobRequest, frame)
                if len(request.sha256) != HASH_BYTES:
                    raise Refusal(Reason.MALFORMED, f"hash of {len(request.sha256)} bytes")
                self._wire.received += 4 + len(frame)
                if whole and request.previous_ms and self.audience.is_member(remote):  # strangers are free, and as many
                    self.arrivals.pulled(whole, request.previous_ms, remote)
                found = await self._serve(request, seat, writer)
                whole = request.sha256 if found and not request.offset else b""
        except Refusal as refusal:
            self._refused(refusal)
        except TimeoutError:
            writer.transport.abort()  # bytes that the other side did not read would keep the transport open
            raise
        finally:
            self.audience.leave(seat)

    async def _serve(self, request: update_pb2.BlobRequest, seat: ServedStream, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Returns whether the blob is here."""
        blob = self._begin(request.sha256)
        try:
            self.audience.hold(seat, len(blob or b""))
            async with asyncio.timeout(STREAM_IDLE_SECONDS_MAX + len(blob or b"") / PATIENT_BYTES_A_SECOND):
                await self._answer(request, blob, seat, writer)
        finally:
            self.audience.hold(seat, 0)
            self._end(request.sha256)
        return blob is not None

    def _begin(self, sha256: bytes) -> bytes | None:
        blob, times = self._shared.get(sha256, (None, 0))
        if self._wire.up.shut:
            return None
        blob = self._lookup(sha256) if blob is None else blob
        if blob is not None:
            self._shared[sha256] = blob, times + 1
        return blob

    def _end(self, sha256: bytes) -> None:
        if sha256 in self._shared:
            blob, times = self._shared.pop(sha256)
            if times > 1:
                self._shared[sha256] = blob, times - 1

    async def _answer(
        self, request: update_pb2.BlobRequest, blob: bytes | None, seat: ServedStream, writer: asyncio.StreamWriter
    ) -> None:
        rest = memoryview(blob or b"")[request.offset :]
        response = update_pb2.BlobResponse(
            found=blob is not None, total_bytes=len(blob or b""), remaining_bytes=len(rest)
        )
        seat.waits_since = _now()
        self._wire.sent += await write_frame(writer, response.SerializeToString())
        skipped = len(blob or b"") - len(rest)  # the server has read and hashed these bytes, too
        for start in range(0, len(rest), CHUNK_BYTES) or (0,):
            part = rest[start : start + CHUNK_BYTES]
            seat.waits_since = None
            await asyncio.sleep(self.audience.delay(seat, len(part) + (0 if start else skipped), _now()))
            await self._wire.up.take(len(part), urgent=self.audience.is_member(seat.remote))
            seat.waits_since = _now()
            writer.write(bytes(part))
            await drained(writer)
            self._wire.sent += len(part)
            self._wire.blob_sent += len(part)


def _now() -> float:
    return asyncio.get_running_loop().time()


STREAMS_KEPT_MAX = 4
# Holders whose times are remembered.
TIMES_KEPT = 1024


@dataclass
class Stream:
    """An open blob stream to a holder; `used`: it was kept from an earlier transfer, which took `previous_ms`. `closes`: how
    often all streams had been closed before it was opened."""

    holder: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closes: int = 0
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
        self._closes = 0
        self.opening, self.answering = Times(), Times()

    async def acquire(self, holder: bytes) -> Stream:
        """A kept stream, or a new one. NetworkError if the holder cannot be reached."""
        kept = self.kept.get(holder, [])
        while kept:
            stream = kept.pop()
            if not stream.reader.at_eof():
                return replace(stream, used=True)
            stream.writer.close()
        return await self.open(holder)

    async def open(self, holder: bytes) -> Stream:
        """A new stream. NetworkError if the holder cannot be reached."""
        began_at, closes = asyncio.get_running_loop().time(), self._closes
        reader, writer = await self._host.open(holder, PROTOCOL)
        self.opening.note(holder, asyncio.get_running_loop().time() - began_at)
        return Stream(holder, reader, writer, closes)

    def keep(self, stream: Stream) -> None:
        """The next transfer from this holder may use the stream."""
        kept = self.kept.setdefault(stream.holder, [])
        if len(kept) < STREAMS_KEPT_MAX and stream.closes == self._closes:
            kept.append(stream)
        else:
            stream.writer.close()

    def drop(self, holder: bytes) -> None:
        """Close the kept streams of a holder."""
        for stream in self.kept.pop(holder, []):
            stream.writer.close()

    def close(self) -> None:
        """Close every kept stream, and keep none that a transfer has now. After a new start of p2pd there are others."""
        self._closes += 1
        for holder in list(self.kept):
            self.drop(holder)
