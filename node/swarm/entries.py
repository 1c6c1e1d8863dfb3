"""The entries of the log, in order and each once, from the coordinator or from gossip, to the training thread.

An entry moves the head when it comes. The module delivers the entry once this peer has all its payloads. ENTRIES_AHEAD_MAX
entries may wait for their payloads, and fewer if their votes are large (`Budget`). Two entries that cannot be in
one log end the peer. The peer first sends both to all connected peers. `Witness` keeps the newest verified entries for this,
and writes two entries that exclude each other to a file, as a proof for anyone.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from node.swarm.announcements import Announcements, Topic
from node.swarm.collector import Collector
from node.swarm.facts import Committed, Failed
from node.swarm.outbox import Outbox
from node.swarm.publication import Publication
from node.swarm.runtime import Runtime, View
from node.swarm.vote_sums import Auditor
from protos.disk import replace_bytes
from protos.errors import DivergedError, Refusal, RefusedError
from protos.limits import ENTRIES_PAGE_MAX, REQUEST_BYTES_MAX
from protos.log import SignedEntry, with_payloads

ENTRIES_KEPT_MAX = 1024
ENTRIES_KEPT_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class FollowedEntry:
    """An entry that this peer follows. Of the entry that this peer started after, it may know the hash alone."""

    step: int
    hash: bytes
    envelope: bytes = b""


class Witness:
    """The newest entries by step, bounded in number and bytes. Not thread-safe."""

    def __init__(self, run_id: bytes, coordinator: bytes, folder: Path) -> None:
        self._run_id, self._coordinator, self._folder = run_id, coordinator, folder
        self._told: OrderedDict[int, FollowedEntry] = OrderedDict()
        self._bytes = 0

    def start(self, step: int, head: bytes) -> None:
        """The log continues after this step, whose entry has this hash (step 0: the run id)."""
        if step not in self._told:
            self._keep(FollowedEntry(step, head))

    def saw(self, signed: SignedEntry) -> None:
        """This peer follows this entry."""
        before = self._told.pop(signed.entry.step, None)
        self._bytes -= len(before.envelope) if before else 0
        self._keep(FollowedEntry(signed.entry.step, signed.hash, signed.envelope))

    def _keep(self, told: FollowedEntry) -> None:
        self._told[told.step] = told
        self._bytes += len(told.envelope)
        while len(self._told) > ENTRIES_KEPT_MAX or (self._bytes > ENTRIES_KEPT_BYTES_MAX and len(self._told) > 2):
            self._bytes -= len(self._told.popitem(last=False)[1].envelope)

    def after(self, step: int, bytes_max: int) -> list[bytes]:
        """The kept entries after a step, without gaps: at most a page, and at most `bytes_max`, except for the first."""
        found: list[bytes] = []
        while len(found) < ENTRIES_PAGE_MAX and (told := self._told.get(step + len(found) + 1)) and told.envelope:
            bytes_max -= len(told.envelope)
            if found and bytes_max < 0:
                break
            found.append(told.envelope)
        return found

    def entry(self, step: int) -> bytes:
        """The entry of a step; empty if it is not kept."""
        told = self._told.get(step)
        return b"" if told is None else told.envelope

    def contradiction(self, signed: SignedEntry) -> FollowedEntry | None:
        """The entry that this peer follows and that cannot be in one log with `signed`; None if there is none."""
        step = signed.entry.step
        same, before = self._told.get(step), self._told.get(step - 1)
        if same is not None and same.hash != signed.hash:
            return same
        if before is not None and before.hash != signed.entry.parent_hash:
            return before
        return None

    def accuse(self, told: FollowedEntry, signed: SignedEntry) -> DivergedError:
        """Keep both entries as evidence. Returns the error that stops this peer."""
        step = signed.entry.step
        what = (
            f"two entries for step {step}"
            if told.step == step
            else f"an entry {step} that does not follow its {told.step}"
        )
        path = self._folder / f"equivocation-{step}.json"
        evidence = {
            "run": self._run_id.hex(),
            "coordinator": self._coordinator.hex(),
            "what": f"the coordinator signed {what}",
            "entries": [
                {"step": told.step, "hash": told.hash.hex(), "envelope": told.envelope.hex()},
                {"step": step, "hash": signed.hash.hex(), "envelope": signed.envelope.hex()},
            ],
        }
        try:
            replace_bytes(path, (json.dumps(evidence, indent=1) + "\n").encode())
            kept = f"both, signed by the coordinator, are in {path}"
        except OSError as error:
            kept = f"the evidence could not be written to {path}: {error.strerror}"
        return DivergedError(
            f"the coordinator signed {what}, so this run has two logs, and this peer cannot tell which one counts; {kept}. "
            "Show it to the run's operator: two coordinators with one key on two databases, or a restored backup, do this"
        )


# The budget bounds the bytes of votes that wait for the training thread. Entries take a share in order, and give it back.

WAITING_BYTES_MAX: Final = 512 << 20
"""The network side of a peer that replays the log is ahead of the training thread by at most so many bytes of entries."""


class Budget:
    """One following's. The first entry always has room, whatever its size."""

    def __init__(self, bytes_max: int = WAITING_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held: dict[int, int] = {}
        self._changed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Bytes of all entries that wait."""
        return sum(self._held.values())

    async def reserve(self, step: int, size: int) -> None:
        """Wait for room for the entry of `step`. For one caller at a time, in order of the steps."""
        while self._held and self.held_bytes + size > self._bytes_max:
            self._changed.clear()
            await self._changed.wait()
        self._held[step] = size

    def release(self, step: int) -> None:
        """The entry of `step` waits no more."""
        self._held.pop(step, None)
        self._changed.set()

    def clear(self) -> None:
        """Nothing waits any more."""
        self._held.clear()
        self._changed.set()


_Collecting: TypeAlias = "asyncio.Queue[asyncio.Task[Committed | None]]"

ENTRIES_AHEAD_MAX = 64
# A member of the roster gossips the entry of each step in a small swarm, else of one step for each so many members: an entry
# grows with the roster, and the hash of a later entry shows a difference in all earlier ones. ADR 8.
GOSSIPED_MEMBERS = 8
# Bytes of entries in one request: half of a request's limit. An entry has at most 0.7 of these bytes.
OFFER_BYTES_MAX = REQUEST_BYTES_MAX // 2


class Entries:
    """One peer's; `public_key` is its own."""

    def __init__(
        self,
        public_key: bytes,
        witness: Witness,
        collector: Collector,
        announcements: Announcements,
        auditor: Auditor,
        publication: Publication,
        outbox: Outbox,
        topic: Topic,
        view: View,
        runtime: Runtime,
    ) -> None:
        self._public_key = public_key
        self._witness, self._collector = witness, collector
        self._announcements, self._publication, self._outbox = announcements, publication, outbox
        self._auditor = auditor
        self._topic, self._view, self._runtime = topic, view, runtime
        # The queue of the present following. None between two followings, when the training thread loads a snapshot.
        self._collecting: _Collecting | None = None
        self._extending = asyncio.Lock()
        self._budget = Budget()
        self._gossiped: set[asyncio.Task[None]] = set()
        self._accusing = False

    @property
    def waiting(self) -> int:
        """The number of entries that wait for their payloads, or for their turn; at most ENTRIES_AHEAD_MAX."""
        return 0 if self._collecting is None else self._collecting.qsize()

    def start(self, step: int, head: bytes) -> None:
        """Continue after `step`, whose entry has this hash. Nothing of the last following enters this one."""
        self._collecting, self._budget = asyncio.Queue(ENTRIES_AHEAD_MAX), Budget()
        self._view.start(step, head)
        self._witness.start(step, head)
        self._announcements.move_head(step, head)
        self._outbox.move_head(step)
        self._publication.show_decided(step)

    def drop(self) -> list[asyncio.Task[Any]]:
        """Deliver nothing more, and take no entry until the next start. Returns the waiting tasks, for the caller to cancel."""
        tasks: list[asyncio.Task[Any]] = list(self._gossiped)
        queue, self._collecting = self._collecting, None
        self._budget.clear()
        while queue is not None and not queue.empty():
            tasks.append(queue.get_nowait())
        return tasks

    def release(self, step: int) -> None:
        """The training thread has the entry of a step."""
        self._budget.release(step)

    async def receive(self, data: bytes) -> None:
        """An entry from the coordinator's stream. Returns when the entry has its place in the queue."""
        try:
            signed = self._view.chain.open(data)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            return
        if self._compare(signed):
            await self._extend(signed, gossip=True)

    def lost(self, step: int) -> tuple[list[bytes], bytes]:
        """A page of the entries that a coordinator with head `step` has lost, and the newest entry; empty if not kept here."""
        newest = self._witness.entry(self._view.step)
        return (self._witness.after(step, OFFER_BYTES_MAX), newest) if newest else ([], b"")

    def agrees(self, data: bytes) -> bool:
        """Whether the coordinator's entry can be in one log with the entries that this peer follows. Raises `Refusal`."""
        return self._compare(self._view.chain.open(data))

    def receive_gossiped(self, data: bytes) -> None:
        """An entry that other peers gossip. Raises `Refusal`."""
        signed = self._view.chain.open(data)
        if self._compare(signed) and signed.entry.step == self._view.step + 1:
            task = self._runtime.spawn(self._extend(signed, gossip=False))
            self._gossiped.add(task)
            task.add_done_callback(self._gossiped.discard)

    async def deliver_forever(self) -> None:
        """Deliver entries in order, each once its payloads are here. Ends when this peer has asked for a re-sync."""
        queue = self._collecting
        assert queue is not None, "start first"
        while True:
            task = await queue.get()
            committed = await task
            if committed is None:
                return  # the collector has asked for a re-sync
            await self._runtime.emit(committed)

    async def _extend(self, signed: SignedEntry, *, gossip: bool) -> None:
        """The next entry, from the coordinator or from gossip: the first that comes counts."""
        queue = self._collecting
        async with self._extending:  # the queue may be full: an entry that waits for room keeps its place
            if queue is not None and queue is self._collecting:
                await self._extend_in_order(signed, queue, gossip=gossip)

    async def _extend_in_order(self, signed: SignedEntry, queue: _Collecting, *, gossip: bool) -> None:
        step = signed.entry.step
        # This peer has the entry already, or it comes again in order; or the coordinator has signed another one meanwhile.
        if step != self._view.step + 1 or not self._compare(signed):
            return
        self._view.chain.accept(signed)
        self._witness.saw(signed)
        for exclusion in signed.entry.exclusions:
            self._outbox.excluded(exclusion.public_key)
            # An exclusion from before the head at which the coordinator admitted this peer does not count any more.
            if exclusion.public_key == self._public_key and step > self._view.admitted_at_step:
                await self._runtime.emit(Failed(RefusedError(exclusion.reason)))
        self._view.committed_step = step
        self._publication.show_decided(step)
        said, by_range = self._said(signed), self._view.by_range(step)
        signed = with_payloads(signed, {self._public_key: self._publication.announced_in(step)})
        for envelope in self._announcements.disputed(signed.entry):
            self._runtime.spawn(self._topic.say(envelope))
        self._announcements.move_head(step, signed.hash)
        self._auditor.saw(signed, by_range)
        self._outbox.move_head(step)
        await self._budget.reserve(step, self._collector.bytes_of(signed))
        if queue is not self._collecting:
            return  # the training thread dropped the queue while this entry waited for room
        task = self._runtime.spawn(self._collector.collect(signed, said, by_range))
        try:
            await queue.put(task)
        except asyncio.CancelledError:
            task.cancel()  # the task is in no queue, so `drop` cannot end it
            raise
        if queue is not self._collecting:
            task.cancel()  # the training thread dropped the queue while this task waited for room in it
        if gossip and self._publishes(step):
            self._runtime.spawn(self._topic.say(signed.envelope))

    def _said(self, signed: SignedEntry) -> dict[bytes, bytes]:
        """Announcements of an entry's payloads, by author. Call it before the head moves, because that forgets them."""
        said, own = self._announcements.named_in(signed.entry), self._publication.named_in(signed.entry)
        return said if own is None else said | {self._public_key: own}

    def _publishes(self, step: int) -> bool:
        """Whether this peer gossips the entry. Members do in turn, for listeners and to compare logs (GOSSIPED_MEMBERS)."""
        roster = self._view.roster
        turn, rest = divmod(step, -(-len(roster) // GOSSIPED_MEMBERS) or 1)
        return not rest and bool(roster) and self._public_key == roster[turn % len(roster)]

    def _compare(self, signed: SignedEntry) -> bool:
        """Whether a verified entry can be in one log with the entries that this peer follows. If not, the peer stops."""
        told = self._witness.contradiction(signed)
        if told is None:
            return True
        if not self._accusing:
            self._accusing = True
            self._runtime.spawn(self._accuse(told, signed))
        return False

    async def _accuse(self, told: FollowedEntry, signed: SignedEntry) -> None:
        """Send both entries to all connected peers before this peer stops, so that peers of either log see both."""
        error = self._witness.accuse(told, signed)
        self._runtime.log.error("the coordinator signed two logs", step=signed.entry.step, why=str(error))
        for envelope in filter(None, (told.envelope, signed.envelope)):
            await self._topic.publish_to_each(envelope)
        await self._runtime.emit(Failed(error))
