"""A peer sends its announcement to each peer that needs it, with the payload if that is small: no gossip, and no round trip for
a request. The receiver pulls a larger payload.

An author keeps one stream to each connected peer. In each step it sends its announcement and the payload on the stream, and
the receiver answers with one byte. A peer that has answered needs no gossip, and neither does one whose log is at another
step: gossip meets the same door. ADR 8.

Refuses a payload that its sender did not announce itself, and a sender that is not in the open step's roster. Refuses payloads
beyond PUSHED_BYTES_MAX, more than one each PUSH_MS, and more than PUSHERS_MAX streams at a time. An announcement that the
inbox refuses ends the stream before the receiver reads the payload. Members of the open step's roster come first: all other
peers share STRANGERS_MAX places, and lose one after STRANGER_SECONDS_MAX of silence, or to a member.

On the stream, per push: uint32 + announcement (a SignedEnvelope), uint32 + payload (no bytes: the receiver pulls it); then one
byte back: TAKEN, or a code of REFUSED before the stream ends. The author keeps the reason for its owner, who asks why votes do
not count.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from node.blobs import blobs
from node.blobs.blobs import Arrivals, WireBytes, drained
from node.blobs.turns import Audience, ServedStream, StreamLimits
from node.overlay import links
from node.overlay.host import Host
from node.swarm.announcements import Announcements, Topic
from node.swarm.runtime import View
from protos import limits as contract
from protos.disk import DiskError
from protos.equivocation import BYTES_MAX as ANNOUNCEMENT_BYTES_MAX
from protos.errors import NetworkError, OperatorError, Reason, Refusal
from protos.identity import peer_id, public_key_of, short
from protos.limits import RateLimiter
from protos.slices import blobs_of, list_bytes, open_list, with_slices
from protos.tick import Tick

# Payloads up to PUSHED_BYTES_MAX travel with their announcement: a round trip less, and no gossip. `Pusher.publish` waits for
# answers for PUSH_PATIENCE_SECONDS before it looks which pushes failed. A push fails after STREAM_OPEN_SECONDS_MAX.
# A peer takes PUSHERS_MAX streams of pushes in all (for a connected swarm, and joiners), and PUSHES_A_PEER_MAX of one author.
PUSHED_BYTES_MAX = 64 * 1024
PUSH_PATIENCE_SECONDS = 0.5
PUSHERS_MAX = 256
PUSHES_A_PEER_MAX = 2
# A peer that is not in the open step's roster can push nothing yet: it waits at most until the next tick.
STRANGERS_MAX = 16
STRANGER_SECONDS_MAX = 10.0
# One author may send PUSHES_MAX_AT_ONCE pushes at once, and one more each PUSH_MS.
PUSHES_MAX_AT_ONCE = 32
PUSH_MS = 20

PROTOCOL = "/swarmentum/push-votes/1"
TAKEN = b"\x01"
REFUSED = {bytes([number]): reason for number, reason in enumerate(Reason, 0x80)}
"""Reasons by their code, in the order of `Reason`: new ones come last. Before them, a receiver said nothing."""
_CODES = {reason: code for code, reason in REFUSED.items()}
_OTHER_STEP = frozenset({Reason.WRONG_STEP, Reason.WRONG_PARENT})
DOORS_KEPT = 64
_FAILURES = (NetworkError, OSError, asyncio.IncompleteReadError, TimeoutError)


class PushServer:
    """The receiving side of pushes. `keep` keeps a payload of a step by its hash."""

    def __init__(
        self,
        announcements: Announcements,
        view: View,
        keep: Callable[[int, bytes, bytes], None],
        wire: WireBytes,
        refused: Callable[[Refusal], None],
    ) -> None:
        self._announcements, self._view, self._keep = announcements, view, keep
        self._wire, self._refused = wire, refused
        self._audience = Audience(frozenset(), StreamLimits(PUSHES_A_PEER_MAX, 1, STRANGERS_MAX, PUSHERS_MAX))
        self._tick: Tick | None = None
        self._rate = RateLimiter(PUSHES_MAX_AT_ONCE, PUSH_MS, contract.ROSTER_PEERS_MAX)

    async def handle(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One author's stream, until the author closes it, is silent for too long, or sends something wrong."""
        try:
            author = public_key_of(remote)
        except OperatorError:
            return  # the remote has no Ed25519 key, so it is no peer of a run
        audience = self._of_now()
        seat = audience.admit(author.hex(), writer.transport.abort, _now())
        if seat is None:
            self._refused(Refusal(Reason.TOO_MANY, f"one more stream of pushes of {remote[-8:]}"))
            return
        try:
            while True:
                await self._next(author, seat, reader)
                writer.write(TAKEN)
                await drained(writer)
                self._wire.sent += len(TAKEN)
        except Refusal as refusal:
            self._refused(refusal)
            writer.write(_CODES[refusal.reason])  # best effort: the author may not read it before the end of the stream
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the author closed the stream, or this peer gave its place to a member
        except DiskError:
            pass  # the author's announcement comes again; the pull of its votes meets the full disk in a task that may say so
        except TimeoutError:
            writer.transport.abort()
            raise
        finally:
            audience.leave(seat)

    def _of_now(self) -> Audience:
        """The places, with the members of the step that is open now."""
        if self._view.tick is not self._tick:
            self._tick = self._view.tick
            self._audience.members = frozenset(key.hex() for key in self._view.roster)
        return self._audience

    async def _next(self, author: bytes, seat: ServedStream, reader: asyncio.StreamReader) -> None:
        """Wait for one push, and take it. A stranger is waited for until the next tick or so, a member for minutes."""
        seat.waits_since = _now()
        member = self._of_now().is_member(seat.remote)
        async with asyncio.timeout(blobs.STREAM_KEPT_SECONDS if member else STRANGER_SECONDS_MAX):
            first = await reader.readexactly(4)
        seat.waits_since = None
        async with asyncio.timeout(blobs.STREAM_IDLE_SECONDS_MAX):
            await self._one(author, int.from_bytes(first, "big"), reader)

    async def _one(self, author: bytes, size: int, reader: asyncio.StreamReader) -> None:
        """One announcement and its payload. A push that this peer refuses ends the stream before its payload is read."""
        if size > ANNOUNCEMENT_BYTES_MAX:
            raise Refusal(Reason.TOO_LARGE, f"pushed announcement of {size} bytes, at most {ANNOUNCEMENT_BYTES_MAX}")
        envelope = await reader.readexactly(size)
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > PUSHED_BYTES_MAX:
            raise Refusal(Reason.TOO_LARGE, f"pushed payload of {length} bytes, at most {PUSHED_BYTES_MAX}")
        if not self._rate.allow(author, 1000 * asyncio.get_running_loop().time()):
            raise Refusal(Reason.TOO_MANY, "too many pushes of one author: one or two a step are expected")
        if self._wire.down.shut:
            raise Refusal(Reason.TOO_MANY, "a push while the owner's download of the month is used up")
        if author not in self._view.roster:
            raise Refusal(Reason.UNKNOWN_SIGNER, "a push by a peer that is not in the open step's roster")
        with self._announcements.pushed(envelope, author) as announced:
            if announced is not None and length and self._view.ranges == 1 and announced.payload_bytes != length:
                text = f"pushed payload of {length} bytes, announced with {announced.payload_bytes}"
                raise Refusal(Reason.OUT_OF_RANGE, text)
            data = await reader.readexactly(length)
            self._wire.received += 8 + size + length
            await self._wire.down.take(8 + size + length, urgent=True)
            if announced is None or not length:
                return
            found = blobs_of(data, self._view.ranges, self._announcements.takes(announced.step))
            if found[0][0] != announced.payload_sha256:
                raise Refusal(Reason.HASH_MISMATCH, "a pushed payload has other bytes than its announcement names")
            self._wire.blob_received += length
            for sha256, blob in found:
                self._keep(announced.step, sha256, blob)


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class _Kept:
    """The stream to one peer. The stream carries one push after the other."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Pusher:
    """Pushes a peer's own payload to its neighbours in the run. Gossips the announcement for peers that it cannot push to.

    `publish` waits for answers, so the training thread must not wait for it. Its calls may overlap: the last one counts.

    `arrivals` gets the time that each payload takes to the receiver's answer, an owner's limit included: a `vote_size` that
    follows the lines needs it. `doors` gets the peers that refuse the last payload, and why.
    """

    def __init__(
        self, host: Host, view: View, wire: WireBytes, topic: Topic, arrivals: Arrivals, doors: dict[str, str]
    ) -> None:
        self._host, self._view, self._wire, self._topic, self._arrivals = host, view, wire, topic, arrivals
        self._doors = doors
        self._kept: dict[bytes, _Kept] = {}
        self._closes = 0
        self._has: set[bytes] = set()  # the peers that have the last pushed announcement
        self._last = b""
        self._elsewhere: set[bytes] = set()  # the peers whose log was at another step when the last push came
        self._pushing: dict[bytes, asyncio.Task[bool]] = {}

    async def publish(self, envelope: bytes, payload: bytes | None) -> None:
        """Push to every neighbour that lacks it, or to the step's aggregators alone. Gossip, too, for those that are not
        connected, or whose push failed."""
        if envelope != self._last:
            for task in self._pushing.values():
                task.cancel()
            self._last, self._has, self._elsewhere, self._pushing = envelope, set(), set(), {}
            self._doors.clear()
        for key in [key for key, kept in self._kept.items() if kept.reader.at_eof() or kept.reader.exception()]:
            self._kept.pop(key).writer.close()
        self._has &= self._kept.keys()  # a later life of a peer has nothing
        if payload is None:
            await self._topic.say(envelope)
            return
        name = self._named(payload)
        audience = {*self._view.aggregators(self._view.step + 1)}
        here = audience - {self._host.identity.public_key} if audience else await self._topic.neighbours()
        if envelope != self._last:
            return  # a later announcement came meanwhile, and must not count as pushed with this one
        for key in sorted(here - self._has - self._pushing.keys()):
            self._pushing[key] = asyncio.get_running_loop().create_task(
                self._push(key, envelope, self._for(key, payload), name)
            )
        if self._pushing:
            await asyncio.wait(self._pushing.values(), timeout=PUSH_PATIENCE_SECONDS)
        if envelope != self._last:
            return
        for key, task in list(self._pushing.items()):
            if task.done():
                del self._pushing[key]
                if not task.cancelled() and task.result():
                    self._has.add(key)
        # A push under way to a slow peer or over a slow link arrives before any gossip would.
        served = self._has | self._elsewhere | self._pushing.keys()
        wanted = audience or here | set(self._view.roster)
        lacking = wanted - served - {self._host.identity.public_key}
        if lacking or not (served or audience):
            await self._topic.say(envelope)

    def _named(self, payload: bytes) -> bytes:
        """The payload's name, under which every report on its slices counts."""
        head = payload[: list_bytes(self._view.ranges)]
        if not head:
            return hashlib.sha256(payload).digest()
        name = hashlib.sha256(head).digest()
        self._arrivals.travels_as(name, (it.sha256 for it in open_list(head)))
        return name

    def _for(self, key: bytes, payload: bytes) -> bytes:
        """What a peer takes of a payload, as far as it is small: all of it, or the slices of its ranges; else it pulls that."""
        own = with_slices(payload, self._view.ranges, self._view.ranges_of(self._view.step + 1, key))
        return own if len(own) <= PUSHED_BYTES_MAX else b""

    def close(self) -> None:
        """Close every stream, and end every push. After a new start of p2pd there are others."""
        self._closes += 1
        for task in self._pushing.values():
            task.cancel()
        for kept in self._kept.values():
            kept.writer.close()
        self._kept.clear()

    def _refused(self, key: bytes, reason: Reason | None) -> None:
        if reason in _OTHER_STEP:
            self._elsewhere.add(key)
        if reason is not None and len(self._doors) < DOORS_KEPT:
            self._doors[short(key)] = reason.value

    @contextmanager
    def _on_its_way(self, key: bytes, name: bytes, payload: bytes, began: float) -> Iterator[None]:
        """What the next payload overtakes has taken so long at least: else the slowest peers would never be heard of."""
        try:
            yield
        except asyncio.CancelledError:
            if payload:
                self._arrivals.add(name, round(1000 * (time.monotonic() - began)), peer_id(key))
            raise

    async def _push(self, key: bytes, envelope: bytes, payload: bytes, name: bytes) -> bool:
        """Whether the peer took what it is to have of the payload `name`. If a kept stream has died, the author opens it once
        more."""
        self._elsewhere.discard(key)
        if self._wire.up.shut:
            return False
        began = time.monotonic()  # what waits for the owner's limit is on its way, too
        with self._on_its_way(key, name, payload, began):
            await self._wire.up.take(8 + len(envelope) + len(payload), urgent=True)
        for _ in range(2):
            kept, closes = self._kept.pop(key, None), self._closes
            fresh = kept is None
            done = False
            try:
                async with asyncio.timeout(links.STREAM_OPEN_SECONDS_MAX):
                    if kept is None:
                        kept = _Kept(*await self._host.open(key, PROTOCOL))
                    size = len(envelope).to_bytes(4, "big"), len(payload).to_bytes(4, "big")
                    with self._on_its_way(key, name, payload, began):
                        kept.writer.write(size[0] + envelope + size[1] + payload)
                        await kept.writer.drain()
                        answer = await kept.reader.readexactly(len(TAKEN))
                    done = answer == TAKEN
                    self._refused(key, REFUSED.get(answer))
                    self._wire.sent += 8 + len(envelope) + len(payload)
                    self._wire.blob_sent += len(payload)
                    self._wire.received += len(TAKEN)
                    # the first answer on a stream may wait for the receiver to learn of the stream
                    if done and payload and not fresh:
                        self._arrivals.add(name, round(1000 * (time.monotonic() - began)), peer_id(key))
                    return done
            except _FAILURES as error:
                if fresh or isinstance(error, TimeoutError):
                    return False
            finally:
                if done and kept is not None and closes == self._closes:
                    self._kept[key] = kept
                elif kept is not None:
                    kept.writer.close()
        return False
