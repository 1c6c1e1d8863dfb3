"""One peer in one run, on the network thread: the entrance, and where its parts are put together. Holds bytes, never tensors.

Emits events in order; an entry is emitted only with all its payloads at hand. Nothing from a stranger gets further than the
doors (`inbox`, `door`, `Chain`). What is done where: `follower` the coordinator's stream, `entries` the log's order, `pulls`
and `collector` others' payloads, `announcements` who holds what, `publication` our own payload, `reporter` what the
coordinator is told, `gossip` the topic, `connections` the overlay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.swarm import settings as limits
from node.swarm.announcements import Announcements
from node.swarm.blobs import PROTOCOL, BlobServer
from node.swarm.client import CoordinatorClient, software_version
from node.swarm.collector import Collector, Door
from node.swarm.connections import Connections
from node.swarm.coordinators import Coordinators
from node.swarm.counters import Counters
from node.swarm.dht import Discovery
from node.swarm.entries import Entries
from node.swarm.events import Event, Snapshot, Welcome
from node.swarm.fetcher import BlobFetcher
from node.swarm.follower import Follower
from node.swarm.gossip import Listener, Topic
from node.swarm.host import Host
from node.swarm.inbox import Inbox
from node.swarm.outbox import Outbox
from node.swarm.payloads import Payloads
from node.swarm.publication import Publication
from node.swarm.pulls import Pulls
from node.swarm.reporter import Reporter
from node.swarm.runtime import Runtime
from node.swarm.settings import OverlaySettings
from node.swarm.snapshots import AgreedSnapshots, snapshot_of
from node.swarm.view import View
from node.swarm.witness import Witness
from protos.errors import NetworkError, Refusal, RefusedError, SwarmentumError
from protos.identity import Identity, peer_id
from protos.invite import Invite
from protos.log import SignedEntry, Verdict
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import update_pb2


@dataclass(frozen=True)
class About:
    """What a peer tells when it joins."""

    layout_digest: bytes
    parameters: int
    device: str
    anchor: bool = False


@dataclass(frozen=True)
class Outside:
    """What a session reaches the world through; the simulator (tests/sim) gives a world of its own."""

    host: Callable[[Identity, Path, OverlaySettings], Host] = Host
    client: Callable[[Invite, Identity], CoordinatorClient] = CoordinatorClient
    discovery: Callable[[Host, bytes], Discovery] = Discovery


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
        run_id, public_key = invite.run_id, identity.public_key
        self.counters = Counters()
        self._view = View(run_id, invite.coordinator_public_key)
        self._runtime = Runtime(public_key, emit, self.counters, self._view)
        self.host = outside.host(identity, identity_path, overlay)
        self.client = outside.client(invite, identity)
        self.client.known = Coordinators(invite.coordinators, payloads.folder.parent / "coordinators.json")
        self.host.on_refusal = self._runtime.refused
        self.fetcher = BlobFetcher(self.host, self.counters.wire, self._runtime.refused)
        self._invite = invite
        self._about: About | None = None
        self._expected: tuple[bytes, ...] = ()
        self._following: asyncio.Task[Any] | None = None
        self._outbox = Outbox()
        self._snapshots = AgreedSnapshots(payloads)
        self._patience_seconds = overlay.patience_seconds
        pulls = Pulls(self.fetcher, payloads, self._view, self._snapshots, self._runtime, overlay.patience_seconds)
        self._topic = Topic(self.host, run_id, self._view, self._runtime.log)
        self._publication = Publication(
            identity, run_id, payloads, self._outbox, self._topic, self._view, self._runtime
        )
        self._server = BlobServer(
            lambda sha256: self._publication.shown(sha256) or pieces(sha256),
            self.counters.wire,
            self._runtime.refused,
        )
        self.counters.arrivals = self._server.arrivals
        self._announcements = Announcements(
            public_key, Inbox(run_id), pulls, door, self._outbox, self._view, self._runtime
        )
        self._entries = Entries(
            public_key,
            witness=Witness(run_id, invite.coordinator_public_key, payloads.folder.parent),
            collector=Collector(pulls, payloads, door, self._snapshots, self._runtime),
            announcements=self._announcements,
            publication=self._publication,
            outbox=self._outbox,
            topic=self._topic,
            view=self._view,
            runtime=self._runtime,
        )
        self._listener = Listener(
            public_key,
            entry=self._entries.overhear,
            announcement=self._announcements.offer,
            refused=self._runtime.refused,
        )
        self._reporter = Reporter(self.client, self._outbox, self._view, self._runtime)
        self._follower = Follower(
            public_key,
            self.client,
            entries=self._entries,
            announcements=self._announcements,
            snapshots=self._snapshots,
            reporter=self._reporter,
            join=self._join,
            hear=self._listener.hear,
            expect=self._expect,
            patience_seconds=overlay.patience_seconds,
            view=self._view,
            runtime=self._runtime,
        )
        self._connections = Connections(
            self.host,
            run_id,
            moved=self._reporter.moved,
            wanted=self._roster_ids,
            ask=self._coordinators_addresses,
            discovery=outside.discovery,
            log=lambda event, **facts: self._runtime.log.info(event, step=self.committed_step, **facts),
        )

    # ---- life --------------------------------------------------------------------------------------------------------

    async def connect(self, *, anchor: bool = False) -> pb.GetRunResponse:
        """Reach the coordinator and read the run's facts. RefusedError, before a model is built, if this peer is not admitted:
        excluded, not on the list, no place left, or with a ticket that admits nobody any more."""
        await self.client.connect()
        response, config = await self.client.get_run()
        await self.client.may_join(anchor=anchor)
        # Where identities are free, a stranger that hears a payload's hash first could announce it as its own.
        self._publication.commits_first = config.trust.enabled or config.admission.mode == "open"
        return response

    async def start(self, about: About, bootstrap: Sequence[str]) -> Welcome:
        """Get on the overlay and join the run. Raises NetworkError, RefusedError or OperatorError."""
        self._about = about
        known = tuple(dict.fromkeys([*self._invite.bootstrap, *bootstrap]))
        await self.host.start(known)
        self.host.on_restart = self._overlay_again
        await self.host.serve(PROTOCOL, self._server.handle)
        await self._topic.subscribe(self._listener.hear)
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
            anchor=about.anchor,
        )
        response = await self.client.join(body)
        self._view.admitted_at_step = response.head_step
        return Welcome(self._offered(response), response.head_step)

    def _offered(self, response: pb.JoinResponse | pb.GetRunResponse) -> tuple[Snapshot, ...]:
        """The agreed snapshots that the coordinator names, newest first; whom it names to start from is dialled."""
        self._snapshots.withdraw(response.withdrawn)
        refs = [response.snapshot] if response.HasField("snapshot") else []
        offered = tuple(map(snapshot_of, (*refs, *response.earlier)))
        if offered:
            self._snapshots.remember(offered[0])
        self._runtime.spawn(self._connections.connect_to(list(response.bootstrap)))
        return offered

    async def follow_from(self, step: int, head: bytes) -> None:
        """Follow the log from the state that the training thread has: after step `step`, whose entry has hash `head`."""
        self._entries.start(step, head)
        first = self._following is None
        self._following = self._runtime.spawn(self._follow_and_deliver())
        if first:
            self._runtime.spawn(self._reporter.report_forever(self._publication.answered))
            self._runtime.spawn(self._connections.keep_forever())
            self._runtime.spawn(self._publication.say_again_forever())

    async def _follow_and_deliver(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follower.follow_forever())
            group.create_task(self._entries.deliver_forever())

    async def halt(self) -> None:
        """Stop following; payloads, connections and the session stay."""
        tasks: list[asyncio.Task[Any]] = [] if self._following is None else [self._following]
        tasks += self._entries.drop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._reporter.pause()

    async def stop(self, *, leaving: bool) -> None:
        """Say goodbye (bounded), and stop everything."""
        if leaving and self._following is not None:
            try:
                await asyncio.wait_for(self.client.report(pb.ReportBody(leaving=True)), limits.GOODBYE_SECONDS_MAX)
            except (SwarmentumError, TimeoutError):
                self._runtime.log.info(
                    "left without a goodbye: the coordinator does not answer", step=self.committed_step
                )
        await self._runtime.stop()
        self.fetcher.close()
        await self._connections.stop()
        await self.host.stop()
        await self.client.close()

    # ---- the training thread's words ---------------------------------------------------------------------------------

    @property
    def committed_step(self) -> int:
        """The newest entry that has arrived."""
        return self._view.committed_step

    async def offered(self) -> tuple[Snapshot, ...]:
        """Ask the coordinator which snapshots are agreed now, newest first. NetworkError if it stays away for longer than our
        patience."""
        response, _ = await self.client.reach_run(self._patience_seconds)
        return self._offered(response)

    async def entries_about(self, step: int) -> tuple[SignedEntry | None, SignedEntry | None]:
        """The log's entries of `step` and of the step after it, verified; None for step 0, and where there is none yet.

        Raises NetworkError, or RefusedError if the coordinator's log is not this run's.
        """
        envelopes, _ = await self.client.entries(max(step, 1))
        found: dict[int, SignedEntry] = {}
        for envelope in envelopes[:2]:
            try:
                signed = self._view.chain.open(envelope)
            except Refusal as refusal:
                raise RefusedError(f"the coordinator's log of step {step} cannot be believed: {refusal}") from refusal
            found[signed.entry.step] = signed
        return found.get(step), found.get(step + 1)

    def is_withdrawn(self, step: int) -> bool:
        """Whether what was agreed about the state after this step does not count any more."""
        return self._snapshots.is_withdrawn(step)

    async def found_bad(self, snapshot: Snapshot) -> None:
        """An agreed snapshot does not hold what the log says: the coordinator is told."""
        self._reporter.found_bad(snapshot.step, snapshot.root, snapshot.total_bytes)

    async def publish(self, data: bytes, announcement: update_pb2.Announcement) -> None:
        """Offer this peer's payload of a step, and say so; or what was said before, if it was another one."""
        self._outbox.abstain(None)
        await self._publication.publish(data, announcement)

    async def applied(self, step: int, digest: bytes) -> None:
        """The training thread has reached a state."""
        self._reporter.applied(step, digest)

    async def abstained(self, step: int, reason: str) -> None:
        """The training thread has no votes for a step, and will have none."""
        if step > self._view.step:
            self._reporter.abstained(step, reason)

    async def found(self, verdicts: Sequence[Verdict]) -> None:
        """What checks of others' votes gave."""
        self._reporter.found(verdicts)

    async def restarted(self) -> None:
        """The training thread starts again from a snapshot: earlier states do not count."""
        self._reporter.restarted()

    async def stored(self, step: int, root: bytes, size: int) -> None:
        """The training thread has stored a snapshot in the piece store."""
        self._reporter.stored(step, root, size)

    async def fetch(self, sha256: bytes, size: int, holders: Sequence[bytes]) -> bytes:
        """A blob by hash from any of the holders."""
        return await self.fetcher.fetch(sha256, size, holders)

    # ---- the overlay -------------------------------------------------------------------------------------------------

    def _roster_ids(self) -> set[str]:
        """Peer ids of the open step's other members."""
        return {peer_id(key) for key in self._view.roster} - {self.host.peer_id}

    def _expect(self, members: Iterable[bytes]) -> None:
        """The roster of the open step: what its members say and ask comes before what strangers do."""
        roster = tuple(members)
        if roster != self._expected:
            self._expected = roster
            self.host.expect(roster)
            self._server.audience.members = frozenset(map(peer_id, roster))

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
