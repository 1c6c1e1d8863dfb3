"""A run's GossipSub topic: this peer publishes signed announcements and log entries there, and subscribes to it.

Delivery is best effort. A peer that misses a message gets the entry from the coordinator, and the entry names the payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from node.overlay.host import Host
from node.swarm.view import View
from protos.errors import NetworkError, OperatorError
from protos.identity import public_key_of


def topic_of(run_id: bytes) -> str:
    """GossipSub topic of a run: signed envelopes of announcements and log entries."""
    return f"swarmentum/v1/{run_id.hex()}"


class Topic:
    """One run's, over one overlay host."""

    def __init__(self, host: Host, run_id: bytes, view: View, log: Any) -> None:
        self._host, self._name = host, topic_of(run_id)
        self._view, self._log = view, log

    async def subscribe(self, hear: Callable[[bytes], None]) -> None:
        """Hand every message to `hear`."""
        await self._host.subscribe(self._name, hear)

    async def say(self, raw: bytes) -> None:
        """Gossip an envelope. A failure is only logged."""
        try:
            await self._host.publish(self._name, raw)
        except NetworkError as error:
            self._log.info("gossip failed", step=self._view.step, why=str(error))

    async def neighbours(self) -> set[bytes]:
        """Public keys of the connected peers of this run: they are in the open step's roster, or listen to the topic, or their
        connection is relayed.

        A relay of the overlay is connected, too, but listens to no topic and needs nothing of the run. p2pd may not know for
        minutes that a member listens.
        """
        connected, listening = await self._host.connected(), await self._host.subscribers(self._name)
        roster, found = frozenset(self._view.roster), set()
        for remote, direct in connected.items():
            with suppress(OperatorError):  # not an Ed25519 key, so no peer of a run
                key = public_key_of(remote)
                if key in roster or remote in listening or not direct:
                    found.add(key)
        return found

    async def publish_to_each(self, raw: bytes) -> None:
        """Gossip an envelope, and send it to every connected peer: it has to arrive before this peer stops."""
        await self._host.publish_to_each(self._name, raw)
