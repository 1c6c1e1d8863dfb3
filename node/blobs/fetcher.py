"""The fetcher pulls blobs by hash from any holder: resumable, bounded, each blob once. A silent holder delays no other.

Refuses bytes that do not have the hash. `blobs.py` has the protocol, `turns.py` decides which holder is asked when, and
`HolderStreams` keeps the streams.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from node.blobs import blobs, turns
from node.blobs.blobs import CHUNK_BYTES, HolderStreams, Stream, WireBytes, read_frame, write_frame
from node.blobs.turns import Attempt, Turns
from node.overlay.host import Host
from protos.envelope import parse
from protos.errors import NetworkError, Reason, Refusal, in_words
from protos.identity import peer_id, short
from protos.v1 import update_pb2

# PULLS_MAX pulls share the downlink. A pull gives its turn to the next one if nothing comes for PULL_TURN_SECONDS, or if it
# takes longer than with a full share of IMPATIENT_BYTES_A_SECOND. Such a pull continues beside the next one.
PULLS_MAX = 8
PULL_TURN_SECONDS = 3.0
# Pulls of so many bytes are votes more often than pieces of a snapshot: they go first if the owner limits the download.
URGENT_BYTES_MAX = 1 << 18
# The fetcher asks a holder that it could not reach last for this long, or until the holder answers.
AWAY_SECONDS = 30.0
# The fetcher checks so often whether two holders send; if so, one of them stops.
LOOK_SECONDS = 0.1

_FAILURES = (NetworkError, Refusal, OSError, asyncio.IncompleteReadError, TimeoutError)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _patience(size: int) -> float:
    """Seconds that a holder has for so many bytes, at most."""
    return blobs.STREAM_IDLE_SECONDS_MAX + size / blobs.PATIENT_BYTES_A_SECOND


class BlobFetcher:
    """One peer's. Concurrent requests for one blob share one pull; PULLS_MAX have their turn at once."""

    def __init__(self, host: Host, wire: WireBytes, refused: Callable[[Refusal], None]) -> None:
        self._host = host
        self._refused = refused
        self._wire = wire
        self._slots = asyncio.Semaphore(PULLS_MAX)
        self._running: dict[bytes, _Shared] = {}
        self._away: dict[bytes, float] = {}
        self.streams = HolderStreams(host)

    async def fetch(
        self, sha256: bytes, size: int, holders: Sequence[bytes], size_max: int | None = None, *, hasty: bool = False
    ) -> bytes:
        """The blob with this hash, of exactly `size` bytes or, with `size_max`, of another length up to that.

        `hasty`: most peers hold the blob, so the fetcher soon asks other holders beside a silent one. Raises NetworkError if no
        holder has the blob now. The pull ends when nobody waits for it any more.
        """
        await self._wire.down.opened()
        shared = self._running.get(sha256)
        if shared is None:
            haste: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            pulling = self._pull(sha256, size, size_max, holders, haste)
            shared = _Shared(asyncio.get_running_loop().create_task(pulling), haste)
            # All callers may be gone, so this reads the result of the task.
            shared.task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._running[sha256] = shared
        shared.waiting += 1
        if hasty and not shared.haste.done():
            shared.haste.set_result(None)
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                shared.task.cancel()
                if self._running.get(sha256) is shared:
                    del self._running[sha256]

    def close(self) -> None:
        """Close every kept stream."""
        self.streams.close()

    async def _pull(
        self, sha256: bytes, size: int, size_max: int | None, holders: Sequence[bytes], haste: asyncio.Future[None]
    ) -> bytes:
        # The owner's limit counts before the request: p2pd takes what a holder sends, however slowly this process reads.
        await self._wire.down.take(size, urgent=size <= URGENT_BYTES_MAX)
        await self._slots.acquire()
        asking = Asking(sha256, size_max, self.streams, self._wire)
        pull = _Pull(sha256, size, self._in_order(holders), asking, self._refused, haste)
        turn = _Turn(self._slots, pull)
        try:
            return await pull.run()
        except NetworkError:
            self._wire.down.give_back(size)
            raise
        finally:
            turn.end()
            self._away |= dict.fromkeys(pull.away, _now() + AWAY_SECONDS)
            for holder in pull.answered:
                self._away.pop(holder, None)

    def _in_order(self, holders: Sequence[bytes]) -> list[bytes]:
        """Holders that answer come first, and before them none that only a relay reaches: its bandwidth is shared by all.

        A holder that was just away comes last: it may be the only one with the blob.
        """
        now = _now()
        self._away = {key: until for key, until in self._away.items() if until > now}
        others = [key for key in holders if key != self._host.identity.public_key]
        relayed = self._host.relayed
        return sorted(others, key=lambda key: (key in self._away, peer_id(key) in relayed))


class Said(Enum):
    """A holder's answer."""

    WHOLE = "sent as many bytes as it named"
    LACKS = "does not hold it"
    OTHER_LENGTH = "names another length than the senders of the first bytes"


class Asking:
    """A request to one holder for the blob with this hash. With `total_max`, the puller takes other lengths than the named."""

    def __init__(self, sha256: bytes, total_max: int | None, streams: HolderStreams, wire: WireBytes) -> None:
        self._sha256, self._total_max = sha256, total_max
        self.streams, self._wire = streams, wire

    async def ask(self, attempt: Attempt) -> Said:
        """Fill the attempt's buffer. Raises one of _FAILURES; bytes that have come by then stay in the buffer."""
        stream = await self.streams.acquire(attempt.holder)
        attempt.opened, attempt.progress_at = True, _now()
        attempt.usual_seconds = self.streams.answering.usual(attempt.holder)
        try:
            return await self._ask_on(stream, attempt)
        except (OSError, asyncio.IncompleteReadError, NetworkError) as error:
            if isinstance(error, TimeoutError) or not stream.used or len(attempt.buffer) > attempt.resumed:
                raise
        # A kept stream had died unnoticed, and so have the other kept streams to this holder. The holder may still be there.
        self.streams.drop(attempt.holder)
        return await self._ask_on(await self.streams.open(attempt.holder), attempt)

    async def _ask_on(self, stream: Stream, attempt: Attempt) -> Said:
        clean = False
        try:
            async with asyncio.timeout(_patience(attempt.missing)) as deadline:
                said = await self.transfer(stream, attempt, deadline)
            clean = said is not Said.OTHER_LENGTH  # the holder's further bytes fit nothing
            return said
        finally:
            if clean:
                self.streams.keep(stream)
            else:
                stream.writer.close()

    async def transfer(self, stream: Stream, attempt: Attempt, deadline: asyncio.Timeout) -> Said:
        """Append the missing bytes. If the puller takes another length, the deadline follows that length."""
        buffer, began_at = attempt.buffer, _now()
        request = update_pb2.BlobRequest(sha256=self._sha256, offset=len(buffer), previous_ms=stream.previous_ms)
        stream.previous_ms = 0
        self._wire.sent += await write_frame(stream.writer, request.SerializeToString())
        frame = await read_frame(stream.reader)
        attempt.answered, attempt.progress_at = True, _now()
        self.streams.answering.note(stream.holder, attempt.progress_at - began_at)
        self._wire.received += 4 + len(frame)
        response = parse(update_pb2.BlobResponse, frame)
        if not response.found:
            return Said.LACKS
        if response.total_bytes != attempt.total:
            if self._total_max is None or not 0 < response.total_bytes <= self._total_max:
                raise Refusal(Reason.OUT_OF_RANGE, f"offers {response.total_bytes} bytes, expected {attempt.total}")
            if buffer:
                return Said.OTHER_LENGTH
            attempt.total = response.total_bytes
            deadline.reschedule(_now() + _patience(attempt.missing))
        if response.remaining_bytes != attempt.missing:
            offers = f"offers {response.remaining_bytes} bytes, {attempt.missing} are missing"
            raise Refusal(Reason.OUT_OF_RANGE, offers)
        while attempt.missing:
            async with asyncio.timeout(blobs.STREAM_IDLE_SECONDS_MAX):
                part = await stream.reader.read(min(CHUNK_BYTES, attempt.missing))
            if not part:
                raise NetworkError("the stream ended early")
            buffer += part
            attempt.progress_at = _now()
            self._wire.received += len(part)
            self._wire.blob_received += len(part)
        if not attempt.resumed:
            stream.previous_ms = max(1, round((_now() - began_at) * 1000))
        return Said.WHOLE


@dataclass
class _Shared:
    """A pull, and the number of its callers. `haste` is done once one of them knows that most peers hold the blob."""

    task: asyncio.Task[bytes]
    haste: asyncio.Future[None]
    waiting: int = 0


class _Pull:
    """One blob, from the first holder that sends it whole. `answered`: holders that answered; `away`: holders out of reach.

    Once `haste` is done, the pull asks further holders sooner.
    """

    def __init__(
        self,
        sha256: bytes,
        size: int,
        holders: list[bytes],
        asking: Asking,
        refused: Callable[[Refusal], None],
        haste: asyncio.Future[None],
    ) -> None:
        self._sha256, self._size = sha256, size
        self._turns, self._asking, self._refused = Turns(holders, random.random), asking, refused
        self._haste = haste
        self._running: dict[asyncio.Task[Said], Attempt] = {}
        self._come = bytearray()  # the longest run of bytes so far, from the first byte on
        self._anew: set[bytes] = set()  # holders to ask from the first byte on, because earlier bytes did not fit
        self._began_at = _now()
        self._problems: dict[bytes, str] = {}
        self._cut: list[asyncio.Task[Said]] = []
        self.away: set[bytes] = set()
        self.answered: set[bytes] = set()

    def is_stuck(self) -> bool:
        """Whether no holder sends, or the pull takes too long even for a link that PULLS_MAX blobs share."""
        now, senders = _now(), [attempt for attempt in self._running.values() if attempt.sends]
        share = turns.IMPATIENT_BYTES_A_SECOND / PULLS_MAX
        late = now > self._began_at + PULL_TURN_SECONDS + self._size / share
        return late or all(attempt.progress_at + PULL_TURN_SECONDS <= now for attempt in senders)

    async def run(self) -> bytes:
        """Pull the blob. Raises NetworkError if no holder has it now."""
        try:
            while self._begin():
                wakes_at = self._turns.wakes_at(self._running.values())
                seconds = None if wakes_at is None else max(wakes_at - _now(), 0)
                if len(self._running) > 1:  # two may begin to send
                    seconds = LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)
                awaited: set[asyncio.Future[Any]] = {*self._running}
                if not self._haste.done():
                    awaited.add(self._haste)
                await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._running if task.done()]:
                    attempt = self._running.pop(task)
                    if self._judge(attempt, task):
                        return bytes(attempt.buffer)
        finally:
            for task, attempt in self._running.items():
                self._stop(task, attempt)
            await asyncio.gather(*self._running, *self._cut, return_exceptions=True)
        why = "; ".join(f"{short(holder)}: {what}" for holder, what in self._problems.items()) or "nobody to ask"
        raise NetworkError(f"no holder gave blob {self._sha256.hex()[:16]}: {why}")

    def _begin(self) -> bool:
        """Ask the holder whose turn it is. Returns whether any attempt runs."""
        now = _now()
        if self._haste.done():
            self._turns.hasten(now)
        slow = self._turns.gives_way(now, self._running.values())
        for task in [task for task, attempt in self._running.items() if attempt is slow]:
            attempt = self._running.pop(task)
            self._stop(task, attempt)
            self._cut.append(task)
            self._problems[attempt.holder] = "too slow"
            self._save(attempt)
        holder = self._turns.next(now, self._running.values())
        if holder is not None:
            for other in self._running.values():
                self._save(other)
            begun = bytearray() if holder in self._anew else self._come[:]
            attempt = Attempt(holder, self._size, now, begun, self._asking.streams.opening.usual(holder))
            self._running[asyncio.get_running_loop().create_task(self._asking.ask(attempt))] = attempt
        return bool(self._running)

    def _stop(self, task: asyncio.Task[Said], attempt: Attempt) -> None:
        """End an attempt, because others were faster. A silent connection may be dead, so its streams are not used again."""
        task.cancel()
        streams, waited = self._asking.streams, _now() - attempt.progress_at
        if not attempt.answered:
            (streams.answering if attempt.opened else streams.opening).note_longer(attempt.holder, waited)
        if attempt.silent_at <= _now():
            streams.drop(attempt.holder)
            if not attempt.opened:
                self.away.add(attempt.holder)

    def _save(self, attempt: Attempt) -> None:
        """Keep the attempt's bytes if they are the most so far: the next holder continues after them."""
        if len(self._come) < len(attempt.buffer) < attempt.total == self._size:
            self._come = attempt.buffer[:]

    def _judge(self, attempt: Attempt, task: asyncio.Task[Said]) -> bool:
        """Whether the blob has come. If not, note the holder's problem."""
        holder, error = attempt.holder, task.exception()
        if isinstance(error, _FAILURES):
            if isinstance(error, Refusal):
                self._refused(error)
            else:
                broke = attempt.opened and not isinstance(error, TimeoutError)
                if not broke:
                    self.away.add(holder)
                    self._asking.streams.drop(holder)
                if broke or attempt.silent_at > _now():  # it may start p2pd again, and be back while others are silent
                    self._turns.lacks(holder, _now())
            self._save(attempt)
            self._problems[holder] = in_words(error)
            return False
        said = task.result()
        self.answered.add(holder)
        if said is Said.WHOLE and hashlib.sha256(attempt.buffer).digest() == self._sha256:
            return True
        if said is Said.LACKS:
            self._turns.lacks(holder, _now())
            self._problems[holder] = "does not hold it"
        elif attempt.resumed:  # the bytes of other holders may be the wrong ones
            self._come = bytearray()
            self._anew.add(holder)
            self._turns.first(holder)
        else:
            self._problems[holder] = "other bytes than it named"
            self._refused(Refusal(Reason.HASH_MISMATCH, f"blob from {short(holder)}: other bytes than it named"))
        return False


class _Turn:
    """A pull's slot, until the pull ends or is stuck. So holders that died together delay only their own pulls."""

    def __init__(self, slots: asyncio.Semaphore, pull: _Pull) -> None:
        self._slots, self._pull, self._held = slots, pull, True
        self._watch()

    def end(self) -> None:
        """Let another pull begin. Safe to call twice."""
        self._timer.cancel()
        if self._held:
            self._held = False
            self._slots.release()

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PULL_TURN_SECONDS, self._look)

    def _look(self) -> None:
        if self._pull.is_stuck():
            self.end()
        else:
            self._watch()
