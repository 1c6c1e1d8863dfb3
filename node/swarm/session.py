"""One peer in one run, on the network thread: follows the log, exchanges payloads, tells the coordinator.

Emits events in order; an entry is emitted only with all its payloads at hand. Holds bytes, never tensors. Nothing from a
stranger gets further than `inbox`, `door` and `chain`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from node.swarm import settings as limits
from node.swarm.blobs import PROTOCOL, Arrivals, BlobFetcher, BlobServer, WireBytes
from node.swarm.client import CoordinatorClient, SessionLostError, software_version
from node.swarm.connections import Connections
from node.swarm.coordinators import Coordinators
from node.swarm.dht import Discovery
from node.swarm.events import (
    Agreed,
    Committed,
    Event,
    Failed,
    Finished,
    Opened,
    Resync,
    Snapshot,
    Waiting,
    Welcome,
)
from node.swarm.host import Host
from node.swarm.inbox import Announced, Inbox
from node.swarm.outbox import Outbox
from node.swarm.payloads import Payloads
from node.swarm.settings import OverlaySettings
from node.swarm.vow import Vow, Vowed
from node.swarm.witness import Told, Witness
from node.wire.codec import Update, payload_hash
from protos.assignment import assign
from protos.envelope import Kind, parse, seal
from protos.errors import NetworkError, Reason, Refusal, RefusedError, SwarmentumError
from protos.identity import Identity, peer_id, short
from protos.invite import Invite
from protos.log import Chain, Contribution, Equivocation, SignedEntry, Tick, Verdict, open_tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2, update_pb2

ENTRIES_AHEAD_MAX = 64
ENTRY_PUBLISHERS = 2


class Door(Protocol):
    """What decides whether payload bytes are valid votes of a step."""

    @property
    def bytes_max(self) -> int: ...

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Update: ...


@dataclass(frozen=True)
class About:
    """What a peer tells when it joins."""

    layout_digest: bytes
    parameters: int
    device: str


@dataclass(frozen=True)
class Outside:
    """What a session reaches the world through; the simulator (tests/sim) gives a world of its own."""

    host: Callable[[Identity, Path, OverlaySettings], Host] = Host
    client: Callable[[Invite, Identity], CoordinatorClient] = CoordinatorClient
    discovery: Callable[[Host, bytes], Discovery] = Discovery


@dataclass
class Counters:
    """Figures of the network side, read by other threads."""

    refused: dict[str, int] = field(default_factory=dict)
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    announcements: int = 0
    wire: WireBytes = field(default_factory=WireBytes)
    arrivals: Arrivals = field(default_factory=Arrivals)


def topic_of(run_id: bytes) -> str:
    """GossipSub topic of a run: signed envelopes of announcements and log entries."""
    return f"swarmentum/v1/{run_id.hex()}"


def snapshot_of(ref: pb.SnapshotRef) -> Snapshot:
    """From the wire."""
    return Snapshot(ref.step, ref.root, ref.total_bytes, tuple(ref.holders))


class Session:
    """See the module. All methods run on the network thread's loop."""

    def __init__(
        self,
        invite: Invite,
        identity: Identity,
        identity_path: Path,
        overlay: OverlaySettings,
        door: Door,
        pieces: Callable[[bytes], bytes | None],
        payloads: Payloads,
        emit: Callable[[Event], Awaitable[None]],
        outside: Outside = Outside(),
    ) -> None:
        self.counters = Counters()
        self.host = outside.host(identity, identity_path, overlay)
        self.client = outside.client(invite, identity)
        self.client.known = Coordinators(invite.coordinators, payloads.folder.parent / "coordinators.json")
        self.host.on_refusal = self._count
        self.fetcher = BlobFetcher(self.host, self.counters.wire, self._count)
        self.committed_step = 0
        self._admitted_at_step = 0
        self._invite, self._identity, self._overlay = invite, identity, overlay
        self._door, self._emit = door, emit
        self._payloads = payloads
        self._server = BlobServer(lambda sha256: self._shown(sha256) or pieces(sha256), self.counters.wire, self._count)
        self.counters.arrivals = self._server.arrivals
        self._inbox = Inbox(invite.run_id)
        self._chain = Chain(invite.run_id, invite.coordinator_public_key)
        self._witness = Witness(invite.run_id, invite.coordinator_public_key, payloads.folder.parent)
        self._accusing = False
        self._vow = Vow(payloads.folder.parent, invite.run_id, identity.public_key)
        self._withheld: Vowed | None = None
        self._commits_first = False
        self._outbox, self._dirty = Outbox(), asyncio.Event()
        self._tick: Tick | None = None
        self._snapshots: list[Snapshot] = []
        self._agreed_at: dict[int, float] = {}
        self._about: About | None = None
        self._entries: asyncio.Queue[asyncio.Task[Committed | None]] = asyncio.Queue(ENTRIES_AHEAD_MAX)
        self._extending = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._following: asyncio.Task[Any] | None = None
        self._telling = False
        self._log = structlog.get_logger("swarm").bind(peer=short(identity.public_key))
        self._connections = Connections(
            self.host,
            invite.run_id,
            moved=self._moved,
            wanted=self._roster_ids,
            ask=self._coordinators_addresses,
            discovery=outside.discovery,
            log=lambda event, **facts: self._log.info(event, step=self.committed_step, **facts),
        )

    # ---- life --------------------------------------------------------------------------------------------------------

    async def connect(self) -> pb.GetRunResponse:
        """Reach the coordinator and read the run's facts. RefusedError, before a model is built, if this peer is not admitted:
        excluded, not on the list, no place left, or with a ticket that admits nobody any more."""
        await self.client.connect()
        response, config = await self.client.get_run()
        await self.client.may_join()
        self._commits_first = config.trust.enabled
        return response

    async def start(self, about: About, bootstrap: Sequence[str]) -> Welcome:
        """Get on the overlay and join the run. Raises NetworkError, RefusedError or OperatorError."""
        self._about = about
        known = tuple(dict.fromkeys([*self._invite.bootstrap, *bootstrap]))
        await self.host.start(known)
        self.host.on_restart = self._overlay_again
        await self.host.serve(PROTOCOL, self._server.handle)
        await self.host.subscribe(topic_of(self._invite.run_id), self._on_gossip)
        await self._connections.start(list(known))
        self._outbox.addresses = tuple(await self.host.addresses())
        return await self._join()

    async def _join(self) -> Welcome:
        about = self._about
        assert about is not None
        body = pb.JoinBody(
            layout_digest=about.layout_digest,
            parameters=about.parameters,
            device=about.device,
            addresses=self._outbox.addresses,
            software_version=software_version(),
        )
        response = await self.client.join(body)
        self._admitted_at_step = response.head_step
        snapshot = snapshot_of(response.snapshot) if response.HasField("snapshot") else None
        if snapshot is not None:
            self._remember(snapshot)
        self._spawn(self._connections.connect_to(list(response.bootstrap)))
        return Welcome(snapshot)

    async def follow_from(self, step: int, head: bytes) -> None:
        """Follow the log from the state that the training thread has: after step `step`, whose entry has hash `head`."""
        self._chain = Chain(self._invite.run_id, self._invite.coordinator_public_key, step, head)
        self._witness.start(step, head)
        self._inbox.move_head(step, head)
        self._outbox.move_head(step)
        self._show_decided(step)
        self.committed_step, self._tick = step, None
        first = self._following is None
        self._following = self._spawn(self._follow_and_deliver())
        if first:
            self._spawn(self._report_forever())
            self._spawn(self._connections.keep_forever())
            self._spawn(self._gossip_again_forever())

    @property
    def latest_snapshot(self) -> Snapshot | None:
        """The newest agreed snapshot."""
        return self._snapshots[-1] if self._snapshots else None

    async def halt(self) -> None:
        """Stop following; payloads, connections and the session stay."""
        tasks: list[asyncio.Task[Any]] = [] if self._following is None else [self._following]
        while not self._entries.empty():
            tasks.append(self._entries.get_nowait())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._telling = False

    async def stop(self, *, leaving: bool) -> None:
        """Say goodbye (bounded), and stop everything."""
        if leaving and self._following is not None:
            try:
                await asyncio.wait_for(self.client.report(pb.ReportBody(leaving=True)), 2.0)
            except (SwarmentumError, TimeoutError):
                self._log.info("left without a goodbye: the coordinator does not answer", step=self.committed_step)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.fetcher.close()
        await self._connections.stop()
        await self.host.stop()
        await self.client.close()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Our own mistakes end the peer with their traceback, never silently."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, SwarmentumError):
            failure = error
            self._log.error("the network side failed", step=self.committed_step, why=str(error))
        else:
            failure = SwarmentumError(f"bug in the network side: {error!r}")
            failure.__cause__ = error
            self._log.error("the network side failed", step=self.committed_step, exc_info=error)
        self._spawn(self._emit(Failed(failure)))

    # ---- the training thread's words ---------------------------------------------------------------------------------

    async def publish(self, data: bytes, announcement: update_pb2.Announcement) -> None:
        """Offer this peer's payload of a step, and say so; or what was said before, if it was another one.

        Where peers check each other, nobody sees it before the coordinator has the announcement: who copies it is later.
        """
        if announcement.step <= self._chain.step:
            return  # decided without us while we computed
        vowed = self._vowed(data, announcement)
        if vowed is None:
            return
        again = self._outbox.announcement == (vowed.step, vowed.envelope)
        self._outbox.announcement = (vowed.step, vowed.envelope)
        self._outbox.holdings[self._identity.public_key, vowed.payload_sha256] = vowed.step
        if self._commits_first and not again:
            self._withheld = vowed
        self._dirty.set()
        if self._withheld is None:
            await self._gossip(vowed.envelope)

    def _shown(self, sha256: bytes) -> bytes | None:
        """A payload for whoever asks; not the one that the coordinator does not know of yet."""
        if self._withheld is not None and sha256 == self._withheld.payload_sha256:
            return None
        return self._payloads.get(sha256)

    def _show_decided(self, step: int) -> None:
        """Whoever needs the votes of a decided step has read their hash in the log."""
        if self._withheld is not None and self._withheld.step <= step:
            self._withheld = None

    async def _show(self, vowed: Vowed) -> None:
        """The coordinator has the announcement."""
        if self._withheld == vowed:
            self._withheld = None
            await self._gossip(vowed.envelope)

    def _vowed(self, data: bytes, announcement: update_pb2.Announcement) -> Vowed | None:
        """The one announcement that this peer ever signs for a step, with its payload kept; None if that is lost."""
        step, sha256, last = announcement.step, payload_hash(data), self._vow.last
        if last is not None and step <= last.step and (step, sha256) != (last.step, last.payload_sha256):
            held = step == last.step and self._payloads.get(last.payload_sha256) is not None
            what = "those are said again" if held else "they are not here: this peer sits the step out"
            self._log.info(f"votes were announced before; {what}", step=step, announced_step=last.step)
            return last if held else None
        if self._payloads.put(step, sha256, data):
            self.counters.payload_bytes_sent += len(data)
        if last is not None and step == last.step:
            return last
        announcement.payload_sha256, announcement.payload_bytes = sha256, len(data)
        envelope = seal(self._identity, Kind.KIND_ANNOUNCEMENT, self._invite.run_id, announcement)
        vowed = Vowed(step, sha256, envelope.SerializeToString(deterministic=True))
        self._vow.keep(vowed)
        return vowed

    async def applied(self, step: int, digest: bytes) -> None:
        """The training thread has reached a state."""
        self._outbox.add_applied(step, digest)
        self._dirty.set()

    async def found(self, verdicts: Sequence[Verdict]) -> None:
        """What checks of others' votes gave."""
        self._outbox.verdicts.update({(verdict.step, verdict.subject): verdict for verdict in verdicts})
        self._dirty.set()

    async def restarted(self) -> None:
        """The training thread starts again from a snapshot: earlier states do not count."""
        self._outbox.restart()

    async def stored(self, step: int, root: bytes, size: int) -> None:
        """The training thread has stored a snapshot in the piece store."""
        self._outbox.snapshots[step] = (root, size)
        self._dirty.set()

    async def fetch(self, sha256: bytes, size: int, holders: Sequence[bytes]) -> bytes:
        """A blob by hash from any of the holders."""
        return await self.fetcher.fetch(sha256, size, holders)

    # ---- following the log -------------------------------------------------------------------------------------------

    async def _follow_and_deliver(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_forever())
            group.create_task(self._deliver_forever())

    async def _follow_forever(self) -> None:
        """The coordinator's stream, again and again, from the one that acts; gives up after the configured patience."""
        delay, heard, lost, away = limits.RETRY_SECONDS_MIN, time.monotonic(), False, False
        while True:
            self._telling = False
            try:
                lost = (away and await self.client.move()) or lost
                away = False
                if lost:
                    await self._join()
                    lost = False
                async for event in self.client.follow(self._chain.step):
                    delay, heard = limits.RETRY_SECONDS_MIN, time.monotonic()
                    await self._take(event)
                problem: SwarmentumError = NetworkError("the coordinator ended the stream")
                away = True
            except SessionLostError as error:
                problem, lost = error, True
            except NetworkError as error:
                problem, away = error, True
            except RefusedError as error:
                await self._emit(Failed(error))
                return
            silent = time.monotonic() - heard
            if silent > self._overlay.patience_seconds:
                await self._emit(Failed(NetworkError(f"no word from the coordinator for too long: {problem}")))
                return
            self._log.info("coordinator away; trying again", step=self._chain.step, why=str(problem))
            await asyncio.sleep(delay)
            soon = self.client.several and silent < limits.TAKE_OVER_SECONDS_MAX
            delay = min(delay * 2, limits.TAKE_OVER_RETRY_SECONDS_MAX if soon else limits.RETRY_SECONDS_MAX)

    async def _take(self, event: pb.FollowResponse) -> None:
        what = event.WhichOneof("event")
        if what == "entry":
            try:
                signed = self._chain.open(event.entry.SerializeToString(deterministic=True))
            except Refusal as refusal:
                self._count(refusal)
                return
            if self._compare(signed):
                await self._extend(signed, gossip=True)
            return
        if not self._telling:
            self._telling = True
            self._outbox.everything_again()
            self._dirty.set()
        if what == "tick":
            await self._take_tick(event.tick)
        elif what == "announcement":  # of a payload that we hold another one for: as if it were gossiped
            self._on_gossip(event.announcement.SerializeToString(deterministic=True))
        elif what == "notice":
            await self._take_notice(event.notice)

    async def _take_tick(self, event: pb.TickEvent) -> None:
        data = event.envelope.SerializeToString(deterministic=True)
        try:
            tick = open_tick(data, run_id=self._invite.run_id, coordinator=self._invite.coordinator_public_key)
        except Refusal as refusal:
            self._count(refusal)
            return
        if tick.step <= self._chain.step:
            return
        self._tick = tick
        self.host.expect(share.public_key for share in tick.roster)
        self._outbox.announce_again()
        self._dirty.set()
        for announced in self._inbox.open_step(tick.step, (share.public_key for share in tick.roster)):
            if announced.author != self._identity.public_key:
                self._heard(announced)
        ranges = assign(tick.pool, tick.roster).get(self._identity.public_key)
        await self._emit(Opened(tick, ranges, event.deadline_ms))

    async def _take_notice(self, notice: pb.Notice) -> None:
        snapshot = snapshot_of(notice.snapshot) if notice.HasField("snapshot") else None
        if snapshot is not None:
            self._remember(snapshot)
        if notice.kind == pb.NoticeKind.NOTICE_KIND_SNAPSHOT and snapshot is not None:
            await self._emit(Agreed(snapshot))
        elif notice.kind == pb.NoticeKind.NOTICE_KIND_RESYNC:
            await self._emit(Resync(snapshot, notice.reason))
        elif notice.kind == pb.NoticeKind.NOTICE_KIND_FINISHED:
            await self._emit(Finished(notice.reason))
        else:
            await self._emit(Waiting(notice.reason))

    def _remember(self, snapshot: Snapshot) -> None:
        """Payloads before the newest snapshot that everybody had time to load are no longer needed by anyone."""
        now = time.monotonic()
        self._agreed_at.setdefault(snapshot.step, now)
        others = [known for known in self._snapshots if known.step != snapshot.step]
        self._snapshots = sorted([*others, snapshot], key=lambda known: known.step)[-2:]
        settled = [step for step, at in self._agreed_at.items() if now - at > limits.RETAIN_SECONDS]
        if settled:
            self._payloads.forget_until(max(settled))
            self._agreed_at = {step: at for step, at in self._agreed_at.items() if step >= max(settled)}

    async def newest_snapshot(self) -> Snapshot | None:
        """Ask the coordinator which snapshot is agreed now."""
        response, _ = await self.client.get_run()
        if response.HasField("snapshot"):
            self._remember(snapshot_of(response.snapshot))
        return self.latest_snapshot

    async def _extend(self, signed: SignedEntry, *, gossip: bool) -> None:
        """The next entry, from the coordinator or from gossip: whichever comes first."""
        async with self._extending:  # the queue may be full: whoever waits for room keeps its place
            await self._extend_in_order(signed, gossip=gossip)

    async def _extend_in_order(self, signed: SignedEntry, *, gossip: bool) -> None:
        step = signed.entry.step
        # had it already, or it comes again in order; or the coordinator said something else meanwhile
        if step != self._chain.step + 1 or not self._compare(signed):
            return
        self._chain.take(signed)
        self._witness.saw(signed)
        for exclusion in signed.entry.exclusions:
            self._outbox.excluded(exclusion.public_key)
            # What stands in the log up to where it was when the coordinator admitted us is over.
            if exclusion.public_key == self._identity.public_key and step > self._admitted_at_step:
                await self._emit(Failed(RefusedError(exclusion.reason)))
        self.committed_step = step
        self._show_decided(step)
        said = self._announcements(signed)
        self._inbox.move_head(step, signed.hash)
        self._outbox.move_head(step)
        await self._entries.put(self._spawn(self._collect(signed, said)))
        if gossip and self._publishes(step):
            self._spawn(self._gossip(signed.envelope))

    def _compare(self, signed: SignedEntry) -> bool:
        """Whether a verified entry can be in one log with those that this peer goes by; if not, the peer stops and says so."""
        told = self._witness.contradiction(signed)
        if told is None:
            return True
        if not self._accusing:
            self._accusing = True
            self._spawn(self._accuse(told, signed))
        return False

    async def _accuse(self, told: Told, signed: SignedEntry) -> None:
        """All shall notice, before we stop: those who were told the other entry hear ours, our own side hears theirs."""
        error = self._witness.accuse(told, signed)
        self._log.error("the coordinator signed two logs", step=signed.entry.step, why=str(error))
        for envelope in filter(None, (told.envelope, signed.envelope)):
            await self.host.insist(topic_of(self._invite.run_id), envelope)
        await self._emit(Failed(error))

    def _announcements(self, signed: SignedEntry) -> dict[bytes, bytes]:
        """What the authors of an entry's payloads said about them, by author: those that this peer heard."""
        entry, own = signed.entry, self._outbox.announcement
        said = {
            c.public_key: envelope
            for c in entry.contributions
            if (envelope := self._inbox.envelope_of(entry.step, c.public_key, c.payload_sha256)) is not None
        }
        mine = next((c for c in entry.contributions if c.public_key == self._identity.public_key), None)
        kept = mine is not None and (mine.public_key, mine.payload_sha256) in self._outbox.holdings
        if kept and own is not None and own[0] == entry.step:  # not a payload of an earlier life
            said[self._identity.public_key] = own[1]
        return said

    def _publishes(self, step: int) -> bool:
        """A few roster members, in turn, gossip each entry for those who only listen."""
        roster = self._tick.roster if self._tick is not None else ()
        turns = {roster[(step + i) % len(roster)].public_key for i in range(min(ENTRY_PUBLISHERS, len(roster)))}
        return self._identity.public_key in turns

    async def _deliver_forever(self) -> None:
        while True:
            task = await self._entries.get()
            committed = await task
            if committed is None:
                return  # a resync was asked for
            await self._emit(committed)

    async def _collect(self, signed: SignedEntry, said: dict[bytes, bytes]) -> Committed | None:
        """All payloads of an entry. What does not pass the door counts as nothing, on every replica alike."""
        step, updates, payloads = signed.entry.step, [], []
        by_author = self._tried(signed)
        pulls = [self._payload(c, step) for c in signed.entry.contributions]
        for contribution, data in zip(signed.entry.contributions, await asyncio.gather(*pulls), strict=True):
            if data is None:
                reason = f"the votes of step {step} are no longer held by anyone who answers"
                await self._emit(Resync(self._snapshots[-1] if self._snapshots else None, reason))
                return None
            payloads.append(data)
            try:
                updates.append(self._door.open(data, step, contribution.payload_bytes))
                by_author[contribution.public_key] = updates[-1]
            except Refusal as refusal:
                self._count(refusal)
                author = short(contribution.public_key)
                self._log.warning("an accepted payload is not valid and counts as nothing", step=step, author=author)
        return Committed(signed, tuple(updates), tuple(payloads), said, by_author)

    def _tried(self, signed: SignedEntry) -> dict[bytes, Update]:
        """Votes of peers on probation, as far as they are here: nobody needs them."""
        found = {}
        for trial in signed.entry.trials:
            data = self._payloads.get(trial.payload_sha256)
            if data is not None:
                try:
                    found[trial.public_key] = self._door.open(data, signed.entry.step, trial.payload_bytes)
                except Refusal as refusal:
                    self._count(refusal)
        return found

    async def _payload(self, contribution: Contribution, step: int) -> bytes | None:
        """One payload from the store or any holder; b"" if it cannot be valid; None if a snapshot has to do instead."""
        if contribution.payload_bytes > self._door.bytes_max:
            return b""
        give_up = time.monotonic() + self._overlay.patience_seconds
        delay, size_max = limits.RETRY_SECONDS_MIN, None
        while (data := self._payloads.get(contribution.payload_sha256)) is None:
            try:
                await self._pull(
                    step,
                    contribution.payload_sha256,
                    contribution.payload_bytes,
                    contribution.public_key,
                    size_max,
                )
            except NetworkError as error:
                newest = self._snapshots[-1].step if self._snapshots else -1
                if newest >= step or time.monotonic() > give_up:
                    return None
                self._log.info("payload missing; trying again", step=step, why=str(error))
                size_max = self._door.bytes_max  # its author may have named another length to the coordinator
                await asyncio.sleep(delay)
                delay = min(delay * 2, limits.RETRY_SECONDS_MAX)
        return data

    async def _pull(self, step: int, sha256: bytes, size: int, author: bytes, size_max: int | None = None) -> bytes:
        held = self._payloads.get(sha256)
        if held is not None:
            return held
        roster = [share.public_key for share in self._tick.roster] if self._tick is not None else []
        holders = [author, *roster, *(self._snapshots[-1].holders if self._snapshots else ())]
        if size_max is not None:  # the author last: it gains by holding others up
            holders = [*dict.fromkeys(key for key in holders if key != author), author]
        data = await self.fetcher.fetch(sha256, size, holders, size_max)
        if self._payloads.put(step, sha256, data):
            self.counters.payload_bytes_received += len(data)
        return data

    # ---- gossip ------------------------------------------------------------------------------------------------------

    def _on_gossip(self, data: bytes) -> None:
        """Everything that strangers say on the run's topic comes through here."""
        try:
            envelope = parse(envelope_pb2.SignedEnvelope, data)
            if envelope.kind == Kind.KIND_LOG_ENTRY:
                signed = self._chain.open(data)
                if self._compare(signed) and signed.entry.step == self._chain.step + 1:
                    self._spawn(self._extend(signed, gossip=False))
            elif envelope.public_key != self._identity.public_key:
                announced = self._inbox.offer(data, self._door.bytes_max)
                self.counters.announcements += 1
                if self._inbox.may_pull(announced):
                    self._heard(announced)
        except Refusal as refusal:
            self._count(refusal)

    def _heard(self, announced: Announced) -> None:
        """A roster member's announcement: its payload is pulled, or it is evidence against its author."""
        first = self._inbox.contradicted(announced)
        if first is None:
            self._spawn(self._hold(announced))
            return
        step, author = announced.step, announced.author
        self._count(Refusal(Reason.EQUIVOCATED, f"two payloads for step {step} by {short(author)}"))
        if self._outbox.accuse(author, Equivocation(first.envelope, announced.envelope)):
            self._log.warning("a peer announced two payloads for one step", step=step, author=short(author))
            self._dirty.set()

    async def _hold(self, announced: Announced) -> None:
        """Pull an announced payload, check it, and report that we hold it. Others' faults end here."""
        step = announced.step
        try:
            data = await self._pull_announced(announced)
            self._door.open(data, step, announced.payload_bytes)
        except Refusal as refusal:
            self._count(refusal)
            self._log.warning("refused a payload", step=step, author=short(announced.author), why=str(refusal))
            return
        except NetworkError as error:
            self._log.info("announced payload not pulled", step=step, why=str(error))
            return
        if step > self._chain.step:
            self._outbox.holdings[announced.author, announced.payload_sha256] = step
            self._dirty.set()

    async def _pull_announced(self, announced: Announced) -> bytes:
        """Try while the step is open, a bounded number of times; afterwards the entry says whether it matters."""
        delay = limits.RETRY_SECONDS_MIN
        for _ in range(limits.FETCH_ROUNDS_MAX - 1):
            try:
                return await self._pull(
                    announced.step, announced.payload_sha256, announced.payload_bytes, announced.author
                )
            except NetworkError as error:
                if announced.step <= self._chain.step:
                    raise
                self._log.debug("pulling again", step=announced.step, why=str(error))
                await asyncio.sleep(delay)
                delay = min(delay * 2, limits.RETRY_SECONDS_MAX)
        return await self._pull(announced.step, announced.payload_sha256, announced.payload_bytes, announced.author)

    async def _gossip(self, raw: bytes) -> None:
        """Best effort: who misses a message learns of the payload from the entry."""
        try:
            await self.host.publish(topic_of(self._invite.run_id), raw)
        except NetworkError as error:
            self._log.info("gossip failed", step=self._chain.step, why=str(error))

    async def _gossip_again_forever(self) -> None:
        """Say our announcement again, ever less often, until its step is decided."""
        said, delay = 0, limits.GOSSIP_AGAIN_SECONDS_MIN
        while True:
            await asyncio.sleep(delay)
            announcement = self._outbox.announcement
            if announcement is None or self._withheld is not None:
                delay = limits.GOSSIP_AGAIN_SECONDS_MIN
                continue
            step, raw = announcement
            if step == said:
                await self._gossip(raw)
            delay = min(delay * 2, limits.GOSSIP_AGAIN_SECONDS_MAX) if step == said else limits.GOSSIP_AGAIN_SECONDS_MIN
            said = step

    def _count(self, refusal: Refusal) -> None:
        name = refusal.reason.value
        self.counters.refused[name] = self.counters.refused.get(name, 0) + 1
        self._log.debug("refused", step=self._chain.step, why=str(refusal))

    # ---- telling the coordinator -------------------------------------------------------------------------------------

    async def _report_forever(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            report = self._outbox.take() if self._telling else None
            if report is None:
                continue
            body, facts = report
            try:
                response = await self.client.tell(body)
            except NetworkError as error:
                self._log.info("report not taken; telling again", step=self._chain.step, why=str(error))
                await asyncio.sleep(limits.RETRY_SECONDS_MIN)
                self._dirty.set()
                continue
            except RefusedError as error:
                await self._emit(Failed(error))
                return
            withheld = self._withheld
            said = [f for f in facts if withheld is not None and self._outbox.says(f, withheld.envelope)]
            if withheld is not None and said and response.announcement_taken:
                self._spawn(self._show(withheld))
            elif said:  # it was not heard: until it is, or the step is decided, nobody sees the votes
                facts = [fact for fact in facts if fact not in said]
                self._spawn(self._tell_again())
            self._outbox.sent(facts)
            for refusal in response.refusals:
                self._log.info("the coordinator did not take something", step=self._chain.step, why=refusal)

    async def _tell_again(self) -> None:
        await asyncio.sleep(limits.RETRY_SECONDS_MIN)
        self._dirty.set()

    # ---- the overlay -------------------------------------------------------------------------------------------------

    def _moved(self, addresses: tuple[str, ...]) -> None:
        if addresses != self._outbox.addresses:
            self._outbox.addresses = addresses
            self._dirty.set()

    def _roster_ids(self) -> set[str]:
        """Peer ids of the open step's other members."""
        roster = self._tick.roster if self._tick is not None else ()
        return {peer_id(share.public_key) for share in roster} - {self.host.peer_id}

    async def _coordinators_addresses(self) -> list[str]:
        """Where the coordinator's connected peers say that they are; nothing if it is away."""
        try:
            response, _ = await self.client.get_run()
        except (NetworkError, RefusedError):
            return []
        return list(response.bootstrap)

    async def _overlay_again(self) -> None:
        """p2pd was started again: streams, connections and the DHT are new."""
        self.fetcher.close()
        await self._connections.restart([*self._invite.bootstrap, *await self._coordinators_addresses()])
