"""The log, read: from an engine and threads that the clock does not use, and from a cache of pages.

Peers that follow and strangers have a thread each, so neither waits for the other, and the clock's writes wait for none.
Refuses strangers' reads beyond READS_WAITING_MAX.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from coordinator.clock.effects import SnapshotFact
from coordinator.clock.state import Peer, PeerPhase, Run
from coordinator.store.journal import Journal
from protos.address import Address, Network, shown, usable
from protos.errors import SwarmentumError
from protos.identity import peer_id
from protos.limits import STATES_MAX
from protos.log import open_entry
from protos.start import StartingState
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
