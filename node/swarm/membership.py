"""This peer's place in the run: it joins, joins again after a lost session, and learns the agreed snapshots from each answer.

Refuses to follow the log; `follower` does that. `Neighbours` names the peers of the open step's roster to the overlay. It
refuses to dial: `node/overlay/connections.py` does that.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass

from node.blobs.turns import Audience
from node.link.client import CoordinatorClient
from node.overlay.connections import Connections
from node.overlay.host import Host
from node.swarm.facts import AgreedSnapshots, Snapshot, Welcome, snapshot_of
from node.swarm.outbox import Outbox
from node.swarm.runtime import Runtime, View
from protos.accounts import owner_body
from protos.changes import settings_from_body
from protos.clocks import Again
from protos.errors import NetworkError, RefusedError
from protos.identity import peer_id
from protos.limits import PROCESS_BYTES
from protos.text import printable
from protos.tick import Tick
from protos.v1 import coordinator_pb2 as pb

TWICE_CHARACTERS_MAX = 200
TWICE_TODO = (
    "If that is not this machine's last start, its home was copied: delete identity.key in the home of one of the two "
    "(--home), and start that one again. It gets an identity of its own."
)
TWICE_SILENT_SECONDS = 10.0
"""A peer whose identity seems to be in use twice sends no votes for so long after it joined, nor in the step that was open.
With the other's votes they would be two payloads, which exclude the identity for good."""

UNSURE = "it may have sent votes in this step before, of which its home does not know"


@dataclass(frozen=True)
class JoinFacts:
    """The facts that a peer gives when it joins."""

    layout_digest: bytes
    parameters: int
    device: str
    anchor: bool = False


class Membership:
    """One peer's, in one run."""

    def __init__(
        self,
        client: CoordinatorClient,
        connections: Connections,
        outbox: Outbox,
        snapshots: AgreedSnapshots,
        view: View,
        runtime: Runtime,
    ) -> None:
        self._client, self._connections = client, connections
        self._outbox, self._snapshots = outbox, snapshots
        self._view, self._runtime = view, runtime
        self._about: JoinFacts | None = None
        self._process, self._told = secrets.token_bytes(PROCESS_BYTES), Again()
        self.used_twice = False
        """Whether another machine seems to use this peer's identity. Two that join in turn must not do so all the time."""
        self._silent = 0, -math.inf
        self.unsure = 0
        """The step in which an earlier life may have sent votes: this peer never votes in it."""

    async def enter(self, about: JoinFacts) -> Welcome:
        """Join for the first time, with these facts about the peer. Raises NetworkError or RefusedError."""
        self._about = about
        return await self.join()

    async def join(self) -> Welcome:
        """Join with the facts of `enter`. Raises NetworkError or RefusedError."""
        about = self._about
        assert about is not None, "enter first"
        body = pb.JoinBody(
            layout_digest=about.layout_digest,
            parameters=about.parameters,
            device=about.device,
            addresses=self._outbox.addresses,
            anchor=about.anchor,
            owner=owner_body(self._outbox.owner),
            process=self._process,
        )
        response = await self._client.join(body)
        self._tell_twice(printable(response.used_twice, TWICE_CHARACTERS_MAX))
        self._view.admitted_at_step = response.head_step
        if self.used_twice:
            self._silent = response.head_step + 1, time.monotonic() + TWICE_SILENT_SECONDS
        return Welcome(self._offered(response), response.head_step, settings_from_body(response.settings))

    def voteless(self, step: int) -> str:
        """Why this peer sends no votes in a step, because another machine or an earlier life of it may have sent some; empty if
        it may vote. From any thread."""
        now, (to_step, until) = time.monotonic(), self._silent
        if step <= to_step or now < until:
            return "another program may vote with this peer's identity"
        return UNSURE if step == self.unsure else ""

    def met_open(self, tick: Tick, public_key: bytes, announced: int, seen: int) -> None:
        """The step was open before this peer followed. Its home knows what it announced up to the step `announced`, or up to
        `seen`, the last one that it saw opened, and later steps may have been announced from a home that is lost, or from this
        home before a backup of it came back. Any peer may keep that announcement for as long as the step is open."""
        asked = tick.attempt > 1 or public_key in tick.places
        known = announced if tick.step == self.unsure else max(announced, seen)
        self.unsure = tick.step if asked and known + 1 < tick.step else 0

    def _tell_twice(self, why: str) -> None:
        self.used_twice = bool(why)
        if why and self._told.worth("twice", time.monotonic()):
            self._runtime.log.warning(
                "two machines use one identity",
                step=self._view.step,
                why=f"this peer's identity: {why}",
                todo=TWICE_TODO,
            )

    async def offered(self, patience_seconds: float) -> tuple[Snapshot, ...]:
        """Ask the coordinator for the agreed snapshots, newest first. NetworkError if it stays silent for so long."""
        response, _ = await self._client.reach_run(patience_seconds)
        return self._offered(response)

    def _offered(self, response: pb.JoinResponse | pb.GetRunResponse) -> tuple[Snapshot, ...]:
        """The snapshots of an answer, newest first. The peer also dials the bootstrap peers of the answer."""
        self._snapshots.withdraw(response.withdrawn)
        refs = [response.snapshot] if response.HasField("snapshot") else []
        offered = tuple(map(snapshot_of, (*refs, *response.earlier)))
        if offered:
            self._snapshots.remember(offered[0])
        self._runtime.spawn(self._connections.connect_to(list(response.bootstrap)))
        return offered


class Neighbours:
    """One peer's; `audience` decides which peers this peer's blob server serves first."""

    def __init__(
        self, host: Host, audience: Audience, client: CoordinatorClient, outbox: Outbox, view: View, runtime: Runtime
    ) -> None:
        self._host, self._audience, self._client = host, audience, client
        self._outbox, self._view, self._runtime = outbox, view, runtime
        self._expected: tuple[bytes, ...] = ()

    def wanted(self) -> set[str]:
        """Peer ids of the open step's other members, and of its aggregators."""
        tick = self._view.tick
        return {peer_id(key) for key in (*self._view.roster, *(tick.aggregators if tick else ()))} - {
            self._host.peer_id
        }

    def expect_roster(self) -> None:
        """A step is open: this peer serves gossip and blob requests of the step's members before those of strangers."""
        roster = self._view.roster
        if roster != self._expected:
            self._expected = roster
            self._host.expect(roster)
            self._audience.members = frozenset(map(peer_id, roster))

    async def known_addresses(self) -> list[str]:
        """Addresses of peers that are connected to the coordinator; none while the coordinator is away."""
        try:
            return await self._client.bootstrap()
        except (NetworkError, RefusedError):
            return []

    def moved(self, addresses: tuple[str, ...]) -> None:
        """Other peers can dial this peer at these addresses now."""
        self._outbox.move_to(addresses)

    def log(self, event: str, **facts: object) -> None:
        """One line about connections, with the newest entry's step."""
        self._runtime.log.info(event, step=self._view.committed_step, **facts)
