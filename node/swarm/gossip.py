"""A run's GossipSub topic: what this peer says there, and where what others say goes.

Signed envelopes of announcements and of log entries, nothing else. Best effort: who misses a message learns of the entry from
the coordinator, and of the payload from the entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node.swarm.host import Host
from node.swarm.view import View
from protos.envelope import Kind, parse
from protos.errors import NetworkError, Refusal
from protos.v1 import envelope_pb2


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
        """Gossip an envelope; that it failed is only logged."""
        try:
            await self._host.publish(self._name, raw)
        except NetworkError as error:
            self._log.info("gossip failed", step=self._view.step, why=str(error))

    async def insist(self, raw: bytes) -> None:
        """Also to every connected peer itself: for words that have to arrive before this peer stops."""
        await self._host.insist(self._name, raw)


class Listener:
    """Sorts what is said by its kind: `entry` and `announcement` verify it, and raise `Refusal`; `refused` counts that."""

    def __init__(
        self,
        public_key: bytes,
        *,
        entry: Callable[[bytes], None],
        announcement: Callable[[bytes], None],
        refused: Callable[[Refusal], None],
    ) -> None:
        self._public_key = public_key
        self._entry, self._announcement, self._refused = entry, announcement, refused

    def hear(self, data: bytes) -> None:
        """Everything that strangers say on the run's topic comes through here."""
        try:
            envelope = parse(envelope_pb2.SignedEnvelope, data)
            if envelope.kind == Kind.KIND_LOG_ENTRY:
                self._entry(data)
            elif envelope.public_key != self._public_key:
                self._announcement(data)
        except Refusal as refusal:
            self._refused(refusal)
