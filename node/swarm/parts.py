"""The parts of a session, and how `build` puts them together: each is made after the parts that it uses.

docs/architecture.md says which module does what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from node.blobs.audience import Audience
from node.blobs.blobs import BlobServer
from node.blobs.fetcher import BlobFetcher
from node.blobs.payloads import Payloads
from node.link.client import CoordinatorClient
from node.link.coordinators import Coordinators
from node.overlay.connections import Connections
from node.overlay.dht import Discovery
from node.overlay.host import Host
from node.overlay.settings import OverlaySettings
from node.swarm.addends import Addends
from node.swarm.aggregator import Aggregator
from node.swarm.announcements import Announcements, Topic
from node.swarm.auditor import Auditor
from node.swarm.collector import Collector, PayloadDecoder
from node.swarm.entries import Entries, Witness
from node.swarm.events import Event
from node.swarm.facts import AgreedSnapshots
from node.swarm.follower import Follower, Listener
from node.swarm.inbox import Inbox
from node.swarm.membership import Membership, Neighbours
from node.swarm.outbox import Outbox
from node.swarm.publication import Aside, Publication
from node.swarm.pulls import Pulls
from node.swarm.pushes import Pusher, PushServer
from node.swarm.reporter import Reporter
from node.swarm.runtime import Runtime
from node.swarm.view import Counters, View
from protos.errors import Refusal
from protos.identity import Identity
from protos.invite import Invite


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
    pulls = Pulls(fetcher, payloads, view, snapshots, runtime, patience)
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
        connections, outbox, reporter, snapshots, patience, view, runtime,
    )  # fmt: skip
    blob_server = BlobServer(ServedBlobs(publication, pieces).get, wire, refused, audience, counters.arrivals)
    push_server = PushServer(announcements, view, pulls.keep, wire, refused)
    return Parts(
        invite, patience, counters, view, outbox, runtime, host, client, snapshots, fetcher, topic, pusher, publication,
        announcements, entries, neighbours, connections, membership, listener, reporter, follower, blob_server, push_server,
    )  # fmt: skip
