"""What the followers of a run get: the log, read in pages, and a stream of events for each follower.

Pages come from an engine and threads that the clock does not use, and from a cache. Peers that follow and strangers have a
thread each, so neither waits for the other, and the clock's writes wait for none. Refuses strangers' reads beyond
READS_WAITING_MAX.

A stream has what its follower is told of the run's state, as messages. Refuses to let a slow follower fill the memory: beyond
FOLLOWER_EVENTS_MAX events its stream ends, and the peer reads the journal instead. Decides nothing about a peer.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from coordinator.clock.effects import NoticeKind, SendAnnouncement, SendNotice, SendSumRequest, SendTick, SnapshotFact
from coordinator.clock.state import Peer, PeerPhase, Run
from coordinator.store.journal import Journal
from protos import limits
from protos.address import Address, Network, shown, usable
from protos.calls import BYTES_MIN, pack
from protos.changes import settings_body
from protos.errors import SwarmentumError
from protos.identity import Identity, peer_id
from protos.limits import STATES_MAX
from protos.log import contributions_body, open_entry
from protos.orders import seal_end
from protos.start import StartingState
from protos.tick import seal_tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

# The states of a run that a fork can begin at: its agreed snapshots, with what the log says of their steps. ADR 5.
#
# Reads the journal. Refuses step 0, which follows from a seed, and an entry that this coordinator did not sign.


def states(
    journal: Journal, run_id: bytes, coordinator: bytes, agreed_digests: Mapping[int, bytes]
) -> list[StartingState]:
    """Oldest first, at most the newest STATES_MAX. `agreed_digests`: by step, of steps that no entry follows yet.

    Raises JournalError, or Refusal for an entry that this coordinator did not sign.
    """
    facts = [fact for fact in journal.agreed_snapshots(run_id) if fact.step]
    found = (_state(journal, run_id, coordinator, fact, agreed_digests) for fact in facts[-STATES_MAX:])
    return [state for state in found if state is not None]


def _state(
    journal: Journal, run_id: bytes, coordinator: bytes, fact: SnapshotFact, agreed_digests: Mapping[int, bytes]
) -> StartingState | None:
    """None for a step whose entry this journal has lost."""
    envelopes = journal.entries(run_id, fact.step, 2)
    signed = [open_entry(data, run_id=run_id, coordinator=coordinator) for data in envelopes]
    if not signed or signed[0].entry.step != fact.step:
        return None
    digest = signed[1].entry.parent_state_digest if len(signed) > 1 else b""
    return StartingState(
        run_id,
        coordinator,
        fact.step,
        signed[0].hash,
        fact.root,
        fact.total_bytes,
        digest or agreed_digests.get(fact.step, b""),
        signed[0].entry.next_sample,
    )


READS_WAITING_MAX = 64
PAGES_CACHED_BYTES_MAX = 64 << 20
Page: TypeAlias = "tuple[envelope_pb2.SignedEnvelope, ...]"
_Key: TypeAlias = tuple[bytes, int, int]


class ReadersBusyError(SwarmentumError):
    """Too many strangers read the log at the moment: try again in a second."""


class LogPages:
    """Pages of signed entries of every run. The page of one place in the log is read once, even if many callers want it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._followers = ThreadPoolExecutor(1, thread_name_prefix="read-followers")
        self._strangers = ThreadPoolExecutor(1, thread_name_prefix="read-strangers")
        self._waiting: dict[tuple[_Key, int, bool], asyncio.Future[Page]] = {}
        self._cached: OrderedDict[_Key, tuple[int, int, Page]] = OrderedDict()  # (head, bytes, page)
        self._bytes = 0

    async def page(self, run_id: bytes, first: int, count: int, head: int, *, follows: bool) -> Page:
        """At most `count` entries from step `first` on, of a log whose head is `head`. JournalError, ReadersBusyError."""
        if first > head:
            return ()
        key = (run_id, first, count)
        if key in self._cached and (len(self._cached[key][2]) == count or self._cached[key][0] == head):
            self._cached.move_to_end(key)
            return self._cached[key][2]
        task = self._waiting.get((key, head, follows))
        if task is None:
            if not follows and sum(not lane for _, _, lane in self._waiting) >= READS_WAITING_MAX:
                raise ReadersBusyError("too many strangers read the log; try again in a second")
            task = asyncio.ensure_future(self._read(key, head, follows))
            self._waiting[key, head, follows] = task
            task.add_done_callback(lambda done: self._done(key, head, follows, done))
        return await asyncio.shield(task)

    async def states(
        self, run_id: bytes, coordinator: bytes, agreed_digests: Mapping[int, bytes]
    ) -> list[StartingState]:
        """The states that a fork can begin at. JournalError, Refusal."""
        read = partial(states, self._journal, run_id, coordinator, agreed_digests)
        return await asyncio.get_running_loop().run_in_executor(self._strangers, read)

    async def _read(self, key: _Key, head: int, follows: bool) -> Page:
        lane = self._followers if follows else self._strangers
        rows = await asyncio.get_running_loop().run_in_executor(lane, self._journal.entries, *key)
        page = tuple(envelope_pb2.SignedEnvelope.FromString(row) for row in rows)
        self._keep(key, head, sum(map(len, rows)), page)
        return page

    def _done(self, key: _Key, head: int, follows: bool, done: asyncio.Future[Page]) -> None:
        del self._waiting[key, head, follows]
        if not done.cancelled():
            done.exception()  # a caller that hung up does not read it, and asyncio would log it

    def _keep(self, key: _Key, head: int, size: int, page: Page) -> None:
        self._bytes += size - self._cached.pop(key, (0, 0, ()))[1]
        self._cached[key] = head, size, page
        while self._bytes > PAGES_CACHED_BYTES_MAX and self._cached:
            self._bytes -= self._cached.popitem(last=False)[1][1]

    def close(self) -> None:
        """Release threads and database."""
        for lane in (self._followers, self._strangers):
            lane.shutdown(wait=True, cancel_futures=True)
        self._journal.close()


# The addresses of connected peers that a peer gets to start from. Pure.
#
# The run's own bootstrap addresses come first. Then come connected peers in random order, those with accepted votes first,
# with two addresses each. A peer that joins first, or often, gets no more of the list than its share.

BOOTSTRAP_PEERS_MAX = 16
TENURED_DRAWN_FROM = 4
"""Peers with votes are drawn from the so many times BOOTSTRAP_PEERS_MAX that have most."""
BOOTSTRAP_ADDRESSES_MAX = 64


def bootstrap(run: Run, networks: Mapping[bytes, Network], to: Network, without: bytes, seed: bytes = b"") -> list[str]:
    """The addresses for a peer that comes from `to`. `networks`: where each peer of the run comes from."""
    draw = random.Random(run.head_hash + without + seed)  # noqa: S311 - a fair draw, no secret
    theirs = [
        address
        for peer in _drawn(run, without, draw)
        for address in shown(_addresses(peer), networks.get(peer.public_key), to)
    ]
    return list(dict.fromkeys([*run.config.overlay.bootstrap, *theirs]))[:BOOTSTRAP_ADDRESSES_MAX]


def _drawn(run: Run, without: bytes, draw: random.Random) -> Sequence[Peer]:
    here = [
        p for p in run.peers.values() if p.phase is not PeerPhase.ABSENT and p.public_key != without and p.addresses
    ]
    here.sort(key=lambda p: (not p.anchor, -p.votes_accepted, p.public_key))
    tenured = [p for p in here if p.anchor or p.votes_accepted][: TENURED_DRAWN_FROM * BOOTSTRAP_PEERS_MAX]
    others = [p for p in here if not p.anchor and not p.votes_accepted]
    chosen = draw.sample(tenured, min(len(tenured), BOOTSTRAP_PEERS_MAX))
    return chosen + draw.sample(others, min(len(others), BOOTSTRAP_PEERS_MAX - len(chosen)))


def _addresses(peer: Peer) -> list[Address]:
    return usable(peer.addresses, peer_id(peer.public_key))


SNAPSHOT_HOLDERS_MAX = 16
_NOTICE_KINDS = {
    NoticeKind.SNAPSHOT: pb.NoticeKind.NOTICE_KIND_SNAPSHOT,
    NoticeKind.RESYNC: pb.NoticeKind.NOTICE_KIND_RESYNC,
    NoticeKind.FINISHED: pb.NoticeKind.NOTICE_KIND_FINISHED,
    NoticeKind.WAITING: pb.NoticeKind.NOTICE_KIND_WAITING,
    NoticeKind.VOTE: pb.NoticeKind.NOTICE_KIND_VOTE,
    NoticeKind.DOUBTED: pb.NoticeKind.NOTICE_KIND_DOUBTED,
}


def withdrawn_of(run: Run) -> list[pb.Withdrawn]:
    """Withdrawn steps, oldest first."""
    return [pb.Withdrawn(from_step=gone.from_step, to_step=gone.to_step) for gone in run.withdrawn]


def earlier_snapshots(run: Run) -> list[pb.SnapshotRef]:
    """The agreed ones before the newest, newest first."""
    return [snapshot_ref(run, fact) for fact in reversed(run.snapshots[:-1])]


def snapshot_ref(run: Run, fact: SnapshotFact) -> pb.SnapshotRef:
    """A snapshot with the connected peers that reported to store it: joiners ask only these for its pieces."""
    reports = run.reported_snapshots.get(fact.step, {})
    here = [peer.public_key for peer in run.peers.values() if peer.phase is not PeerPhase.ABSENT]
    stored = [key for key in here if (said := reports.get(key)) == fact and said is not None and said.kept]
    holders = stored[:SNAPSHOT_HOLDERS_MAX]
    return pb.SnapshotRef(step=fact.step, root=fact.root, total_bytes=fact.total_bytes, holders=holders)


def end_of(run: Run, identity: Identity) -> envelope_pb2.SignedEnvelope | None:
    """The signed end of a run that the operator ended; None for any other run."""
    return None if run.ended is None else seal_end(identity, run.run_id, run.ended)


def changed_of(run: Run) -> list[pb.ChangedSetting]:
    """Every change of a setting by the operator, oldest first."""
    return [
        pb.ChangedSetting(setting=setting, from_step=change.after_step + 1)
        for change in run.changes
        for setting in settings_body(change.settings)
    ]


def for_one(effect: SendSumRequest | SendAnnouncement) -> pb.FollowResponse:
    """The votes that an aggregator is to add up, or an announcement: its own, or another one than it has heard."""
    if isinstance(effect, SendAnnouncement):
        return pb.FollowResponse(announcement=envelope_pb2.SignedEnvelope.FromString(effect.envelope))
    votes = contributions_body(effect.contributions)
    return pb.FollowResponse(sum=pb.SumRequest(step=effect.step, attempt=effect.attempt, contributions=votes))


def tick_event(run: Run, effect: SendTick, identity: Identity) -> pb.TickEvent:
    """A signed tick with the time that is left, and where its aggregators can be dialled."""
    envelope = seal_tick(identity, run.run_id, effect.tick)
    several = [run.peers[key].addresses for key in effect.tick.aggregators if key in run.peers]
    most = max(1, limits.ADDRESSES_MAX * limits.AGGREGATORS_MAX // max(1, len(several)))
    addresses = [address for theirs in several for address in theirs[:most]]
    return pb.TickEvent(envelope=envelope, deadline_ms=max(effect.deadline_ms, 0), aggregators=addresses)


def notice(run: Run, effect: SendNotice, identity: Identity) -> pb.Notice:
    """A notice to followers, as a message."""
    snapshot = snapshot_ref(run, effect.snapshot) if effect.snapshot else None
    return pb.Notice(
        kind=_NOTICE_KINDS[effect.kind],
        reason=effect.reason,
        snapshot=snapshot,
        step=effect.step,
        range=effect.number,
        withdrawn=withdrawn_of(run),
        end=end_of(run, identity),
    )


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
