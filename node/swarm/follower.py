"""Follows the coordinator's stream, through lost sessions and from one coordinator to the next.

Ticks and notices become events for the training thread; `entries` puts log entries in order. Refuses ticks and entries without
the coordinator's signature. Gives up when the coordinator has been silent for longer than the peer's patience.
"""

from __future__ import annotations

import asyncio
import time

from node.link import client
from node.link.client import CoordinatorClient
from node.overlay.connections import Connections
from node.swarm.announcements import Announcements
from node.swarm.entries import Entries
from node.swarm.facts import (
    Agreed,
    AgreedSnapshots,
    Ended,
    Failed,
    Finished,
    NotCounted,
    Opened,
    Resync,
    Waiting,
    snapshot_of,
)
from node.swarm.membership import Membership, Neighbours
from node.swarm.outbox import Outbox
from node.swarm.publication import Publication, Reporter
from node.swarm.runtime import Runtime, View
from node.swarm.vote_sums import Aggregator, Auditor
from protos import limits
from protos.assignment import assign
from protos.calls import BehindError, SessionLostError
from protos.clocks import Again, Waits
from protos.envelope import Kind, parse
from protos.errors import NetworkError, Refusal, RefusedError, SwarmentumError
from protos.orders import open_end
from protos.text import printable
from protos.tick import open_tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

# The door of the run's topic: sorts each message by its kind, and counts the messages that are refused.
#
# Refuses a message that is neither a log entry nor another peer's announcement.


class Listener:
    """One peer's; `public_key` is its own."""

    def __init__(self, public_key: bytes, entries: Entries, announcements: Announcements, runtime: Runtime) -> None:
        self._public_key = public_key
        self._entries, self._announcements, self._runtime = entries, announcements, runtime

    def hear(self, data: bytes) -> None:
        """A message of the run's topic, unverified."""
        try:
            envelope = parse(envelope_pb2.SignedEnvelope, data)
            if envelope.kind == Kind.KIND_LOG_ENTRY:
                self._entries.receive_gossiped(data)
            elif envelope.public_key != self._public_key:
                self._announcements.offer(data)
        except Refusal as refusal:
            self._runtime.refused(refusal)


class Follower:
    """One peer's; `public_key` is its own."""

    def __init__(
        self,
        public_key: bytes,
        client: CoordinatorClient,
        entries: Entries,
        announcements: Announcements,
        aggregator: Aggregator,
        auditor: Auditor,
        listener: Listener,
        membership: Membership,
        neighbours: Neighbours,
        connections: Connections,
        outbox: Outbox,
        publication: Publication,
        reporter: Reporter,
        snapshots: AgreedSnapshots,
        patience_seconds: float,
        view: View,
        runtime: Runtime,
    ) -> None:
        self._public_key, self._client = public_key, client
        self._entries, self._announcements, self._listener = entries, announcements, listener
        self._aggregator, self._auditor, self._membership = aggregator, auditor, membership
        self._neighbours, self._connections = neighbours, connections
        self._outbox, self._reporter, self._snapshots = outbox, reporter, snapshots
        self._publication = publication
        self._patience_seconds = patience_seconds
        self._view, self._runtime = view, runtime
        self._fresh = True  # this stream has not yet told whether a step is open
        self._agreed = 0
        """The newest snapshot that the training thread knows to be agreed, by step."""

    async def follow_forever(self) -> None:
        """Follow the acting coordinator's stream, and open it again after each end. Gives up after the configured patience."""
        waits, heard, again = Waits(), time.monotonic(), Again()
        lost = away = behind = False
        while True:
            self._reporter.pause()
            try:
                lost = (away and await self._client.move()) or lost
                away = False
                if lost:
                    await self._membership.join()
                    lost = False
                if behind:
                    behind = False
                    await self._give_back()
                self._fresh = True
                async for event in self._client.follow(self._view.step):
                    if not self._membership.used_twice:
                        waits.reset()
                    heard, self._view.away = time.monotonic(), ""
                    await self._handle(event)
                problem: SwarmentumError = NetworkError("the coordinator ended the stream")
                away = True
            except SessionLostError as error:
                problem, lost = error, True
                if not self._membership.used_twice:
                    waits.reset()  # the coordinator is there: no long wait as for an absent one
            except BehindError as error:
                problem, behind = error, True
            except NetworkError as error:
                problem, away = await self._client.explained(error), True
            except RefusedError as error:
                await self._runtime.emit(Failed(error))
                return
            silent = time.monotonic() - heard
            if silent > self._patience_seconds:
                why = f"the coordinator was silent for longer than this peer's patience: {problem}"
                await self._runtime.emit(Failed(NetworkError(why)))
                return
            self._view.away = str(problem)
            if again.worth(f"{self._view.step} {problem}", time.monotonic()):
                self._runtime.log.info("coordinator away; trying again", step=self._view.step, why=str(problem))
            soon = self._client.several and silent < client.TAKE_OVER_SECONDS_MAX
            await asyncio.sleep(waits.next(client.TAKE_OVER_RETRY_SECONDS_MAX if soon else None))

    async def _give_back(self) -> None:
        """The coordinator's journal has lost its end: give it the entries after its head, as far as this peer keeps them.

        Raises NetworkError while the coordinator lacks more entries, because another peer may have them. Two logs end this
        peer in `entries`.
        """
        _, head = await self._client.entries(self._view.step)
        first, step = head, self._view.step
        if head:
            page, _ = await self._client.entries(head)
            if page and not self._entries.agrees(page[0]):
                raise NetworkError("the coordinator has another log")
        while head < step:
            entries, newest = self._entries.lost(head)
            if not entries:
                raise NetworkError(
                    f"the coordinator's journal lost the entries after step {head}, and this peer has not kept all of them up "
                    f"to step {step}; another peer may have them, or the operator may have a newer journal"
                )
            before, head = head, await self._client.offer(entries, newest)
            if head <= before:
                raise NetworkError(f"the coordinator takes no entry after step {head} back")
        log = self._runtime.log
        log.warning(
            "the coordinator's journal had lost its end: this peer gave entries back", step=step, entries=head - first
        )

    async def _handle(self, event: pb.FollowResponse) -> None:
        what = event.WhichOneof("event")
        if what == "entry":
            await self._entries.receive(event.entry.SerializeToString(deterministic=True))
            return
        self._reporter.resume()
        fresh, self._fresh = self._fresh, self._fresh and what == "announcement"
        if what == "tick":
            await self._handle_tick(event.tick, fresh=fresh)
        elif what == "announcement":
            data = event.announcement.SerializeToString(deterministic=True)
            if event.announcement.public_key != self._public_key:
                self._listener.hear(data)  # it contradicts a payload that this peer holds: taken as if it were gossiped
                return
            try:
                await self._publication.take_back(data)
            except Refusal as refusal:
                self._runtime.refused(refusal)
        elif what == "sum":
            try:
                self._aggregator.asked(event.sum)
            except Refusal as refusal:
                self._runtime.refused(refusal)
        elif what == "notice":
            await self._handle_notice(event.notice)

    async def _handle_tick(self, event: pb.TickEvent, *, fresh: bool) -> None:
        data, chain = event.envelope.SerializeToString(deterministic=True), self._view.chain
        try:
            tick = open_tick(data, run_id=chain.run_id, coordinator=chain.coordinator)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            return
        if tick.step <= chain.step:
            return
        if fresh:
            seen = 0 if self._view.tick is None else self._view.tick.step
            self._membership.met_open(tick, self._public_key, self._publication.last_step, seen)
        self._view.tick = tick
        self._neighbours.expect_roster()
        self._outbox.open_step(tick)
        self._announcements.open_step(tick)
        if event.aggregators and self._public_key in tick.places:
            most = max(limits.ADDRESSES_MAX * limits.AGGREGATORS_MAX, len(tick.aggregators))
            self._runtime.spawn(self._connections.meet(list(event.aggregators[:most])))
        ranges = assign(tick.pool, tick.roster).get(self._public_key)
        await self._runtime.emit(Opened(tick, ranges, event.deadline_ms))

    async def _handle_end(self, data: bytes) -> None:
        """Each notice of an ended run has the end. The training thread gets it once a session of following."""
        chain = self._view.chain
        try:
            end = open_end(data, run_id=chain.run_id, coordinator=chain.coordinator, operators=self._view.operators)
        except Refusal as refusal:
            self._runtime.refused(refusal)
            return
        await self._runtime.emit(Ended(end, data))

    async def _handle_notice(self, notice: pb.Notice) -> None:
        if notice.HasField("end"):
            await self._handle_end(notice.end.SerializeToString(deterministic=True))
        snapshot = snapshot_of(notice.snapshot) if notice.HasField("snapshot") else None
        self._snapshots.withdraw(notice.withdrawn)
        if snapshot is not None:
            self._snapshots.remember(snapshot)
        if notice.kind == pb.NoticeKind.NOTICE_KIND_SNAPSHOT and snapshot is not None:
            self._agreed = snapshot.step
            await self._runtime.emit(Agreed(snapshot))
        elif notice.kind == pb.NoticeKind.NOTICE_KIND_RESYNC:
            await self._runtime.emit(Resync(snapshot, notice.reason, step=notice.step))
        elif notice.kind == pb.NoticeKind.NOTICE_KIND_FINISHED:
            if snapshot is not None and snapshot.step > self._agreed:  # the run agreed on it while this peer was away
                self._agreed = snapshot.step
                await self._runtime.emit(Agreed(snapshot))
            await self._runtime.emit(Finished(notice.reason))
        elif notice.kind == pb.NoticeKind.NOTICE_KIND_DOUBTED:
            self._auditor.doubted(notice.step, notice.range)
        elif notice.kind == pb.NoticeKind.NOTICE_KIND_VOTE:
            await self._runtime.emit(NotCounted(notice.step, printable(notice.reason)))
        else:
            await self._runtime.emit(Waiting(notice.reason))
