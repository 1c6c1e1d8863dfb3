"""The state that a run begins at: the seed's, or of a fork another run's, from its own disk or from peers that have it. ADR 5.

The genesis names a snapshot of the parent run. This peer stores it as its own snapshot of step 0: the same pieces, under a
manifest of this run. The coordinator and other peers know it by the parent run's root. Refuses any other state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from node.mirror.snapshot_mirrors import MirrorReader
from node.snapshot.image import Image
from node.snapshot.pieces import (
    SnapshotManifest,
    check_start,
    is_start,
    of_fork,
    of_parent,
    open_manifest,
    parameters_of,
)
from node.snapshot.store import SnapshotStore, snapshot_in
from node.swarm.api import Swarm
from node.swarm.facts import Snapshot
from node.training.replica import Replica
from node.training.sync import Progress, fetch_manifest, fetch_pieces
from protos.errors import Reason, Refusal
from protos.limits import SNAPSHOT_PIECE_BYTES
from protos.start import StartingState


def root_of_seed(replica: Replica) -> bytes:
    """The root of the state of step 0 that the run's seed gives, made anew beside the replica's own, which may be any other."""
    model = parameters_of(replica.first_model())
    others = {name: tuple(part.shape) for name, part in replica.state.items() if name not in model}
    base = {name: torch.zeros(shape, dtype=torch.float32, device="cpu") for name, shape in others.items()}
    image = Image({**model, **base}, live=False)
    hashes = tuple(hashlib.sha256(piece).digest() for piece in image.pieces(SNAPSHOT_PIECE_BYTES))
    run, layout = replica.run_id, replica.layout_digest
    return SnapshotManifest(run, 0, run, layout, image.total_bytes, SNAPSHOT_PIECE_BYTES, hashes).root


@dataclass(frozen=True)
class Start:
    """One peer's. `parent`: the folder in which this peer keeps snapshots of the parent run, if it took part there."""

    state: StartingState
    run_id: bytes
    store: SnapshotStore
    parent: Path

    def begin(self) -> None:
        """Serve the starting state, if it is here from an earlier life."""
        here = self._here()
        if here is not None:
            self.store.also_as(of_parent(here, self.state))

    def named(self, manifest: SnapshotManifest) -> bytes:
        """The root under which the run knows a snapshot of this peer."""
        return manifest.root if manifest.step else of_parent(manifest, self.state).root

    def stored(self, root: bytes) -> bytes:
        """The root under which this peer stores a snapshot that the run knows."""
        here = self._here() if root == self.state.root else None
        return root if here is None else here.root

    def is_here(self) -> bool:
        """Whether this machine has the starting state on its disk."""
        return self._here() is not None or snapshot_in(self.parent, self.state.root) is not None

    def _here(self) -> SnapshotManifest | None:
        return next((m for m in self.store.manifests() if m.step == 0 and is_start(m, self.state)), None)

    def fetch(
        self,
        swarm: Swarm,
        holders: tuple[bytes, ...],
        layout_digest: bytes,
        progress: Progress,
        mirrors: MirrorReader | None = None,
    ) -> SnapshotManifest:
        """This peer's own manifest of the starting state, whose file is in the store then.

        Every piece is checked against the genesis before it is kept. Raises NetworkError or Refusal.
        """
        start = self.state
        wanted = Snapshot(start.step, start.root, start.total_bytes, holders)
        elsewhere = snapshot_in(self.parent, start.root)
        here = self._here()
        if here is not None:
            manifest = of_parent(here, start)
        elif elsewhere is not None:
            manifest = elsewhere[0]
        else:
            manifest = open_manifest(fetch_manifest(swarm, wanted, mirrors, 0))
        check_start(manifest, start, layout_digest)
        own = of_fork(manifest, self.run_id)
        local = None if elsewhere is None else elsewhere[1]
        fetch_pieces(swarm, self.store, own, replace(wanted, step=0), progress, local, mirrors)
        self.store.also_as(manifest)
        return own

    def check(self, digest_after: Callable[[int, int], bytes], digest_steps: int) -> None:
        """Raises Refusal unless the loaded state has the digest that the genesis names. `digest_after`: by the step, and by
        `clock.digest_steps`. `start-from` knows no run, and parent runs may be of an earlier version: 0 counts, too."""
        named, found = self.state.state_digest, digest_after(self.state.step, digest_steps)
        if named and named != found and named != digest_after(self.state.step, 0):
            text = f"the starting state has digest {found.hex()[:16]}, and the genesis says {named.hex()[:16]}"
            raise Refusal(Reason.HASH_MISMATCH, text)
