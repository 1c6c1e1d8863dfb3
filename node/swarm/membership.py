"""This peer's place in the run: it joins, joins again after a lost session, and learns the agreed snapshots from each answer.

Refuses to follow the log; `follower` does that.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from node.link.client import CoordinatorClient
from node.overlay.connections import Connections
from node.patience import Again
from node.swarm.events import Snapshot, Welcome
from node.swarm.outbox import Outbox
from node.swarm.runtime import Runtime
from node.swarm.snapshots import AgreedSnapshots, snapshot_of
from node.swarm.view import View
from protos.changes import settings_from_body
from protos.limits import PROCESS_BYTES
from protos.owner import owner_body
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb

TWICE_CHARACTERS_MAX = 200
TWICE_TODO = (
    "If that is not this machine's last start, its home was copied: delete identity.key in the home of one of the two "
    "(--home), and start that one again. It gets an identity of its own."
)


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
        return Welcome(self._offered(response), response.head_step, settings_from_body(response.settings))

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
