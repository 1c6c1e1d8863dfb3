"""The peers that this peer needs on the overlay: the roster of the open step. Names them to the overlay.

Refuses to dial; `node/overlay/connections.py` does that, and asks this module for the peers.
"""

from __future__ import annotations

from node.blobs.audience import Audience
from node.link.client import CoordinatorClient
from node.overlay.host import Host
from node.swarm.outbox import Outbox
from node.swarm.runtime import Runtime
from node.swarm.view import View
from protos.errors import NetworkError, RefusedError
from protos.identity import peer_id


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
