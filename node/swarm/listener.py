"""The door of the run's topic: sorts each message by its kind, and counts the messages that are refused.

Refuses a message that is neither a log entry nor another peer's announcement.
"""

from __future__ import annotations

from node.swarm.announcements import Announcements
from node.swarm.entries import Entries
from node.swarm.runtime import Runtime
from protos.envelope import Kind, parse
from protos.errors import Refusal
from protos.v1 import envelope_pb2


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
