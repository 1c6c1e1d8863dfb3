"""One peer in one run, on the network thread: `Session` is the entrance to its parts. `build` makes each part after those that
it uses; docs/architecture.md says which module does what.

Holds bytes, never tensors. Emits events in order; it emits an entry only with all its payloads. A stranger's bytes get no
further than the doors (`inbox`, `door`, `Chain`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from node.blobs import testbytes
from node.blobs.blobs import PROTOCOL, BlobServer
from node.blobs.fetcher import BlobFetcher
from node.blobs.payloads import Payloads
from node.blobs.turns import Audience
from node.link.client import CoordinatorClient
from node.link.coordinators import Coordinators
from node.overlay.connections import Connections
from node.overlay.dht import Discovery
from node.overlay.host import Host
from node.overlay.reach import Access
from node.overlay.settings import OverlaySettings
from node.swarm import pushes
from node.swarm.announcements import Announcements, Topic
from node.swarm.collector import Collector, PayloadDecoder
from node.swarm.entries import Entries, Witness
from node.swarm.facts import AgreedSnapshots, Committed, Event, Snapshot, Welcome
from node.swarm.follower import Follower, Listener
from node.swarm.inbox import Inbox
from node.swarm.membership import JoinFacts, Membership, Neighbours
from node.swarm.outbox import Outbox
from node.swarm.publication import Aside, Publication, Reporter
from node.swarm.pulls import Pulls
from node.swarm.pushes import Pusher, PushServer
from node.swarm.runtime import Counters, Runtime, View
from node.swarm.vote_sums import Addends, Aggregator, Auditor
from protos.errors import Refusal, RefusedError, SwarmentumError
from protos.evaluation import Evaluation, seal_evaluation
from protos.identity import Identity
from protos.invite import Invite
from protos.log import SignedEntry
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import update_pb2


@dataclass(frozen=True)
class Outside:
    """A session's ways to the world; the simulator (tests/sim) gives a world of its own.

    `aside` waits for slow work, such as a sync of the disk, without stopping the network's loop.
    """

    host: Callable[[Identity, Path, OverlaySettings, Callable[[Refusal], None]], Host] = Host
    client: Callable[[Invite, Identity, Coordinators], CoordinatorClient] = CoordinatorClient
    discovery: Callable[[Host, bytes], Discovery] = Discovery
    aside: Aside = asyncio.to_thread


REAL = Outside()
"""The network and the disk of this machine."""


@dataclass(frozen=True)
class ServedBlobs:
    """The blobs that this peer serves: payloads that may be shown, and pieces of snapshots."""

    publication: Publication
    pieces: Callable[[bytes], bytes | None]

    def get(self, sha256: bytes) -> bytes | None:
        """A blob by its hash; None if it is not here, or may not be shown yet."""
        return self.publication.shown(sha256) or self.pieces(sha256)


@dataclass(frozen=True)
class Parts:
    """The parts of a session, in the order of `build`. The simulator and the tests look at parts here."""

    invite: Invite
    patience_seconds: float
    counters: Counters
    view: View
    outbox: Outbox
    runtime: Runtime
    host: Host
    client: CoordinatorClient
    snapshots: AgreedSnapshots
    fetcher: BlobFetcher
    topic: Topic
    pusher: Pusher
    publication: Publication
    announcements: Announcements
    entries: Entries
    neighbours: Neighbours
    connections: Connections
    membership: Membership
    listener: Listener
    reporter: Reporter
    follower: Follower
    blob_server: BlobServer
    push_server: PushServer


def build(
    invite: Invite,
    identity: Identity,
    identity_path: Path,
    overlay: OverlaySettings,
    door: PayloadDecoder,
    pieces: Callable[[bytes], bytes | None],
    payloads: Payloads,
    emit: Callable[[Event], Awaitable[None]],
    outside: Outside = REAL,
    *,
    archive: bool = False,
    counters: Counters | None = None,
) -> Parts:
    """A session's parts, each made after the parts that it uses. Nothing runs before `connect`.

    `pieces` gives a snapshot's piece by its hash. `emit` hands an event to the training thread. With `archive`, entries carry
    their payloads as they travelled, too. `counters` have the pace of the peer's bytes.
    """
    run_id, public_key, coordinator = invite.run_id, identity.public_key, invite.coordinator_public_key
    folder, patience = payloads.folder.parent, overlay.patience_seconds
    counters, view, outbox = counters or Counters(), View(run_id, coordinator), Outbox()
    runtime = Runtime(public_key, emit, counters, view)
    refused, wire = runtime.refused, counters.wire
    host = outside.host(identity, identity_path, overlay, refused)
    client = outside.client(invite, identity, Coordinators(invite.coordinators, folder / "coordinators.json"))

    snapshots = AgreedSnapshots(payloads)
    fetcher = BlobFetcher(host, wire, refused)
    pulls = Pulls(fetcher, payloads, view, snapshots, runtime, patience, lambda: membership.offered(0))
    topic = Topic(host, run_id, view, runtime.log)
    pusher = Pusher(host, view, wire, topic, counters.arrivals, counters.doors)
    publication = Publication(identity, run_id, payloads, outbox, pusher.publish, view, runtime, outside.aside)
    announcements = Announcements(public_key, Inbox(run_id), pulls, door, outbox, view, runtime)
    collector = Collector(public_key, pulls, payloads, door, snapshots, view, runtime, whole=archive)
    addends = Addends(pulls, door, view, runtime)
    auditor = Auditor(public_key, pulls, door, addends, outbox, view, runtime, outside.aside)
    aggregator = Aggregator(public_key, pulls, door, addends, outbox, auditor.made, view, runtime, outside.aside)
    witness = Witness(run_id, coordinator, folder)
    entries = Entries(public_key, witness, collector, announcements, auditor, publication, outbox, topic, view, runtime)
    audience = Audience()
    neighbours = Neighbours(host, audience, client, outbox, view, runtime)
    connections = Connections(host, run_id, neighbours, outside.discovery)
    membership = Membership(client, connections, outbox, snapshots, view, runtime)
    listener = Listener(public_key, entries, announcements, runtime)
    reporter = Reporter(public_key, client, outbox, publication, view, runtime)
    follower = Follower(
        public_key, client, entries, announcements, aggregator, auditor, listener, membership, neighbours,
        connections, outbox, publication, reporter, snapshots, patience, view, runtime,
    )  # fmt: skip
    blob_server = BlobServer(ServedBlobs(publication, pieces).get, wire, refused, audience, counters.arrivals)
    push_server = PushServer(announcements, view, pulls.keep, wire, refused)
    return Parts(
        invite, patience, counters, view, outbox, runtime, host, client, snapshots, fetcher, topic, pusher, publication,
        announcements, entries, neighbours, connections, membership, listener, reporter, follower, blob_server, push_server,
    )  # fmt: skip


GOODBYE_SECONDS_MAX = 1.0


class Session:
    """See the module. All methods run on the network thread's loop."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._following: asyncio.Task[Any] | None = None

    @property
    def counters(self) -> Counters:
        """Live figures."""
        return self.parts.counters

    @property
    def host(self) -> Host:
        """This peer on the overlay."""
        return self.parts.host

    @property
    def fetcher(self) -> BlobFetcher:
        """Pulls of blobs by hash."""
        return self.parts.fetcher

    # ---- life --------------------------------------------------------------------------------------------------------

    async def connect(self) -> pb.GetRunResponse:
        """Reach the coordinator and read the run's facts."""
        await self.parts.client.connect()
        if (proxy := self.parts.client.proxy) is not None:
            self.parts.runtime.log.info(
                "the coordinator is called through the HTTP proxy", at=self.parts.client.at, proxy=proxy.at
            )
        response, config = await self.parts.client.get_run()
        # In an open run, a stranger that hears a payload's hash first could announce the payload as its own.
        self.parts.view.commits_first = config.trust.enabled or config.admission.mode == "open"
        self.parts.view.ranges = config.clock.ranges
        self.parts.view.checkers = config.trust.checkers if config.trust.enabled else 0
        self.parts.view.operators = config.operators
        return response

    async def tell_failure(self, reason: pb.JoinFailure) -> None:
        await self.parts.client.tell_failure(reason)

    async def turn(self, *, anchor: bool) -> pb.MayJoinResponse:
        """Ask for a place of the run; if it is full, for a place in line. Raises RefusedError, before this peer builds a model,
        if the run does not admit it: it is excluded or not on the list, or its ticket is used up."""
        return await self.parts.client.or_move(self.parts.client.wait_in_line(anchor=anchor))

    async def start(self, bootstrap: Sequence[str]) -> None:
        """Get on the overlay. Raises NetworkError or OperatorError."""
        parts = self.parts
        known = tuple(dict.fromkeys([*parts.invite.bootstrap, *bootstrap]))
        await parts.host.start(known, self._overlay_again)
        await parts.host.serve(PROTOCOL, parts.blob_server.handle)
        await parts.host.serve(pushes.PROTOCOL, parts.push_server.handle)
        await parts.host.serve(testbytes.PROTOCOL, testbytes.Taker(parts.host, parts.counters.wire).handle)
        await parts.topic.subscribe(parts.listener.hear)
        await parts.connections.start(list(known))
        if known:
            await parts.host.find_out()
        parts.outbox.move_to(tuple(await parts.host.addresses()))

    async def enter(self, about: JoinFacts) -> Welcome:
        """Join the run. Raises NetworkError or RefusedError."""
        return await self.parts.client.or_move(self.parts.membership.enter(about))

    async def follow_from(self, step: int, head: bytes) -> None:
        """Follow the log from the state that the training thread has: after step `step`, whose entry has hash `head`."""
        self.parts.entries.start(step, head)
        first = self._following is None
        self._following = self.parts.runtime.spawn(self._follow_and_deliver())
        if first:
            self.parts.runtime.spawn(self.parts.reporter.report_forever())
            self.parts.runtime.spawn(self.parts.connections.keep_forever())
            self.parts.runtime.spawn(self.parts.publication.say_again_forever())
            self.parts.runtime.spawn(self.parts.host.keep_reachable_forever())

    async def _follow_and_deliver(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.parts.follower.follow_forever())
            group.create_task(self.parts.entries.deliver_forever())

    async def halt(self) -> None:
        """Stop following; payloads, connections and the session stay."""
        tasks: list[asyncio.Task[Any]] = [] if self._following is None else [self._following]
        tasks += self.parts.entries.drop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.parts.reporter.pause()

    async def stop(self, *, leaving: bool) -> None:
        """Tell the coordinator that this peer leaves (bounded), and stop everything."""
        if leaving and self._following is not None:
            try:
                await asyncio.wait_for(self.parts.client.report(self.parts.outbox.goodbye()), GOODBYE_SECONDS_MAX)
            except (SwarmentumError, TimeoutError):
                self.parts.runtime.log.info(
                    "leaving without telling the coordinator, which does not answer", step=self.committed_step
                )
        await self.parts.runtime.stop()
        self.parts.pusher.close()
        self.fetcher.close()
        await self.parts.connections.stop()
        await self.host.stop()
        await self.parts.client.close()

    # ---- the training thread's words ---------------------------------------------------------------------------------

    @property
    def committed_step(self) -> int:
        """The newest entry that has arrived."""
        return self.parts.view.committed_step

    def voteless(self, step: int) -> str:
        return self.parts.membership.voteless(step)

    @property
    def away(self) -> str:
        """Why the coordinator does not answer; empty while it does."""
        return self.parts.view.away

    async def offered(self) -> tuple[Snapshot, ...]:
        """Ask the coordinator which snapshots are agreed now, newest first. Raises NetworkError if the coordinator stays away
        for longer than this peer's patience."""
        return await self.parts.membership.offered(self.parts.patience_seconds)

    async def entries_about(self, step: int) -> tuple[SignedEntry | None, SignedEntry | None]:
        """The log's entries of `step` and of the step after it, verified; None for step 0, and for a step without an entry.

        Raises NetworkError, or RefusedError if the coordinator's log is not this run's.
        """
        envelopes, _ = await self.parts.client.entries(max(step, 1))
        found: dict[int, SignedEntry] = {}
        for envelope in envelopes[:2]:
            try:
                signed = self.parts.view.chain.open(envelope)
            except Refusal as refusal:
                raise RefusedError(f"the coordinator's entries from step {step} on are invalid: {refusal}") from refusal
            found[signed.entry.step] = signed
        return found.get(step), found.get(step + 1)

    def is_withdrawn(self, step: int) -> bool:
        """Whether a withdrawal covers the state after this step."""
        return self.parts.snapshots.is_withdrawn(step)

    async def tell(self, put: Callable[[Outbox], None]) -> None:
        """`put` gives the outbox a fact of the training thread, and the next report tells it."""
        put(self.parts.outbox)

    def release(self, event: Event) -> None:
        """The training thread has taken an event: its share of the bytes that may wait is free."""
        if isinstance(event, Committed):
            self.parts.entries.release(event.signed.entry.step)

    async def publish(self, data: bytes, announcement: update_pb2.Announcement) -> None:
        self.parts.outbox.withdraw_abstention()
        await self.parts.publication.publish(data, announcement)

    async def abstained(self, step: int, reason: str, *, not_finite: bool) -> None:
        """The training thread has no votes for a step, and will have none."""
        if step > self.parts.view.step:
            lost = step == self.parts.membership.unsure
            self.parts.outbox.abstain(step, reason, not_finite=not_finite, lost=lost)

    async def loaded(self, size: int) -> None:
        """This peer loads so many bytes of training text."""
        wire = self.counters.wire
        await wire.down.opened()
        await wire.down.take(size)
        wire.received += size

    async def limit_relaying(self, bytes_a_second: float | None) -> int:
        """What this peer may relay on average; None: no limit. Returns the bytes that it has relayed."""
        relaying = self.parts.host.relaying
        relaying.limit(bytes_a_second)
        return self.counters.wire.relayed(relaying.total)

    async def evaluated(self, made: Evaluation) -> None:
        """Sign and report the held-out loss of a state; the author is this peer."""
        identity = self.parts.host.identity
        envelope = seal_evaluation(identity, self.parts.invite.run_id, replace(made, author=identity.public_key))
        self.parts.outbox.add_evaluation(made.step, envelope)

    async def fetch(self, sha256: bytes, size: int, holders: Sequence[bytes]) -> bytes:
        """A blob by hash from any of the holders."""
        return await self.fetcher.fetch(sha256, size, holders)

    # ---- for the peer's owner ----------------------------------------------------------------------------------------

    async def access(self) -> Access:
        """See `Host.access`. The overlay must have started."""
        return await self.parts.host.access()

    async def standing(self) -> str:
        """The coordinator's words on whether this peer's votes count, and why. Raises NetworkError or RefusedError."""
        facts, _ = await self.parts.client.get_run()
        own = self.parts.host.identity.public_key
        found = next((peer for peer in facts.peers if peer.public_key == own), None)
        words = [] if found is None else [found.standing, found.standing_reason]
        return ": ".join(printable(word) for word in words if word)

    # ---- the overlay -------------------------------------------------------------------------------------------------

    async def _overlay_again(self) -> None:
        """p2pd has started again: streams, connections and the DHT are new."""
        self.parts.pusher.close()
        self.fetcher.close()
        await self.parts.connections.restart(
            [*self.parts.invite.bootstrap, *await self.parts.neighbours.known_addresses()]
        )
