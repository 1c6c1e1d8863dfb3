"""The agreed snapshots that a peer knows of, and with them, which payloads nobody needs any more.

Keeps the newest two. Holds no pieces: those are the training thread's (node/snapshot).
"""

from __future__ import annotations

import time

from node.swarm import settings as limits
from node.swarm.events import Snapshot
from node.swarm.payloads import Payloads
from protos.v1 import coordinator_pb2 as pb

SNAPSHOTS_KEPT = 2


def snapshot_of(ref: pb.SnapshotRef) -> Snapshot:
    """From the wire."""
    return Snapshot(ref.step, ref.root, ref.total_bytes, tuple(ref.holders))


class AgreedSnapshots:
    """The newest, by step. Not thread-safe."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads
        self._known: list[Snapshot] = []
        self._agreed_at: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def newest(self) -> Snapshot | None:
        """None before the first."""
        return self._known[-1] if self._known else None

    def remember(self, snapshot: Snapshot) -> None:
        """Payloads before the newest snapshot that everybody had time to load are no longer needed by anyone."""
        now = time.monotonic()
        self._agreed_at.setdefault(snapshot.step, now)
        others = [known for known in self._known if known.step != snapshot.step]
        self._known = sorted([*others, snapshot], key=lambda known: known.step)[-SNAPSHOTS_KEPT:]
        settled = [step for step, at in self._agreed_at.items() if now - at > limits.RETAIN_SECONDS]
        if settled:
            self._payloads.forget_until(max(settled))
            self._agreed_at = {step: at for step, at in self._agreed_at.items() if step >= max(settled)}
