"""The agreed snapshots that a peer knows, and with them, the payloads that no peer needs any more.

Keeps the newest two snapshots, and the list of withdrawals. Holds no pieces: the training thread has them (node/snapshot).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from node.blobs.payloads import Payloads
from node.swarm.events import Snapshot
from protos.v1 import coordinator_pb2 as pb

# Payloads and snapshots stay at least this long after a newer snapshot is agreed: a joiner may still load and replay them.
RETAIN_SECONDS = 60.0

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
        self._withdrawn: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def newest(self) -> Snapshot | None:
        """None before the first."""
        return self._known[-1] if self._known else None

    def is_withdrawn(self, step: int) -> bool:
        """Whether a withdrawal covers the state after this step."""
        return any(first <= step <= last for first, last in self._withdrawn)

    def withdraw(self, withdrawn: Iterable[pb.Withdrawn]) -> None:
        """All withdrawals so far, of the operator or of an anchor."""
        self._withdrawn = tuple((gone.from_step, gone.to_step) for gone in withdrawn)
        self._known = [known for known in self._known if not self.is_withdrawn(known.step)]

    def remember(self, snapshot: Snapshot) -> None:
        """A snapshot is agreed. A joiner that cannot use the newest one loads the one before, and needs the payloads after it.

        So a payload goes only after the *second* snapshot that follows it has been there for RETAIN_SECONDS.
        """
        now = time.monotonic()
        self._agreed_at.setdefault(snapshot.step, now)
        others = [known for known in self._known if known.step != snapshot.step]
        self._known = sorted([*others, snapshot], key=lambda known: known.step)[-SNAPSHOTS_KEPT:]
        settled = sorted(step for step, at in self._agreed_at.items() if now - at > RETAIN_SECONDS)
        if len(settled) >= SNAPSHOTS_KEPT:
            before = settled[-SNAPSHOTS_KEPT]
            self._payloads.forget_until(before)
            self._agreed_at = {step: at for step, at in self._agreed_at.items() if step >= before}
