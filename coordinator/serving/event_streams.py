"""The event streams of one run's followers: which stream is a peer's newest, and which events wait in it.

Refuses to let a slow follower fill the memory: beyond FOLLOWER_EVENTS_MAX events its stream ends, and the peer reads the
journal instead. Decides nothing about a peer.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from protos.errors import SwarmentumError
from protos.packing import BYTES_MIN, pack
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

FOLLOWER_EVENTS_MAX = 256

Events: TypeAlias = "asyncio.Queue[bytes | None]"
"""The serialised events that one follower has not read; None ends its stream."""


class NotJoinedError(SwarmentumError):
    """The peer that wants to follow is not admitted (any more): it has to join again."""


class FullError(SwarmentumError):
    """The run has no place left for the peer that wants to follow: to join again changes nothing."""


class PeerAheadError(SwarmentumError):
    """The peer has more of the log than this coordinator, and can give the rest back."""


class EventStreams:
    """One run's streams. An event is serialised once for all followers."""

    def __init__(self) -> None:
        self.newest: dict[bytes, Events] = {}
        """The newest stream of each peer."""
        self.following: dict[bytes, Events] = {}
        """The streams among `newest` whose peer has read the whole log and gets events as they happen."""
        self._unsent: envelope_pb2.SignedEnvelope | None = None
        self._decided = b""
        """The newest Decided, serialised."""
        self._unpacking: set[bytes] = set()
        """Peers that unpack what is packed against the Decided before."""
        self._have: set[bytes] = set()
        """Those of them whose stream has `_decided`."""

    def open(self, key: bytes, *, unpacks: bool = False) -> Events:
        """A new stream of a peer; the peer's earlier stream ends. `unpacks`: the peer understands `decided_zstd`."""
        self.end(key)
        if unpacks:
            self._unpacking.add(key)
        self.newest[key] = asyncio.Queue(FOLLOWER_EVENTS_MAX)
        return self.newest[key]

    def is_newest(self, key: bytes, queue: Events) -> bool:
        """Whether no later stream of this peer replaced this one."""
        return self.newest.get(key) is queue

    def closed(self, key: bytes, queue: Events) -> bool:
        """A stream broke. True if it was the peer's newest one: then the peer follows no more."""
        if not self.is_newest(key, queue):
            return False
        del self.newest[key]
        self._unfollow(key)
        return True

    def end(self, key: bytes) -> None:
        """The peer's stream ends once the peer has read the events in it."""
        self.newest.pop(key, None)
        self._cut(key)

    def end_all(self) -> None:
        """Every stream ends."""
        for key in list(self.newest):
            self.end(key)

    def _cut(self, key: bytes) -> None:
        queue = self._unfollow(key)
        if queue is not None:
            queue.put_nowait(None)

    def _unfollow(self, key: bytes) -> Events | None:
        self._unpacking.discard(key)
        self._have.discard(key)
        return self.following.pop(key, None)

    def hold(self, entry: envelope_pb2.SignedEnvelope) -> None:
        """Keep an entry until the next event: if a tick follows at once, both are one message."""
        self._unsent = entry

    def flush(self) -> None:
        """Send the entry that no tick followed."""
        if self._unsent is not None:
            entry, self._unsent = self._unsent, None
            self.send(None, pb.FollowResponse(entry=entry))

    def send_tick(self, to: bytes | None, tick: pb.TickEvent) -> None:
        """Send a tick, with the entry that waits for it."""
        entry, self._unsent = self._unsent, None
        if entry is None:
            self.send(to, pb.FollowResponse(tick=tick))
        else:
            self._send_decided(pb.Decided(entry=entry, tick=tick))

    def _send_decided(self, decided: pb.Decided) -> None:
        """To all followers: packed to those that have the Decided before."""
        before, self._decided = self._decided, decided.SerializeToString(deterministic=True)
        plain, packed = pb.FollowResponse(decided=decided).SerializeToString(), b""
        if self._have and len(plain) >= BYTES_MIN:
            packed = pb.FollowResponse(decided_zstd=pack(self._decided, before)).SerializeToString()
        for key in list(self.following):
            self._put(key, packed if packed and key in self._have else plain)
        self._have = self._unpacking & self.following.keys()

    def send(self, to: bytes | None, event: pb.FollowResponse) -> None:
        """Send an event to one follower (None: to all). The stream of a follower with too many unread events ends."""
        self.flush()  # a waiting entry goes before any other event
        data = event.SerializeToString()
        for key in [to] if to is not None else list(self.following):
            self._put(key, data)

    def _put(self, key: bytes, data: bytes) -> None:
        queue = self.following.get(key)
        if queue is None:
            return
        if queue.qsize() >= FOLLOWER_EVENTS_MAX - 1:
            self._cut(key)
        else:
            queue.put_nowait(data)
