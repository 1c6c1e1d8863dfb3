"""One peer that does not work among honest ones, from its training thread to its exclusion: `python -m tests.sim.adversaries`.

Everything is real but network, clock and disk: checks are drawn from the log, made by the training threads, reported, judged by
the coordinator and journalled. Prints who was excluded, at which step, and why. Odd seeds train on a mixture of sources.
"""

import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from coordinator.clock.effects import EntryCommitted
from coordinator.store.journal import Journal
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, DataConfig, MixSource, RunConfig, TrustConfig, WeightChange
from protos.slices import Update, encode_update, hash_of
from tests.sim.__main__ import seeds_asked
from tests.sim.clock import VirtualLoop, virtual_time
from tests.sim.world import PeerProcess, SimReplica, World, without_threads

PEERS, IDLE, STEPS = 6, 5, 30


class IdleReplica(SimReplica):
    """Its votes are random; its gradient is not even looked at."""

    def vote(self, step: int, lr: float) -> bytes:
        super().vote(step, lr)
        votes = self.demo.open_votes
        assert votes is not None
        made_up = random.Random(step).randbytes(self.demo.config.form.body_bytes(self.demo.layout.chunks, votes.size))
        data = encode_update(self.run_id, self.layout_digest, Update(step, votes.size, made_up))
        self.published = (step, hash_of(data))
        return data


MIX = (
    MixSource(name="text", source="stdlib", weight=3, changes=(WeightChange(step=8, weight=1),)),
    MixSource(name="code", source="stdlib", weight=1, changes=(WeightChange(step=15, weight=5),)),
)


def settings(*, mixed: bool = False) -> RunConfig:
    """Many votes a chunk, as the simulator's model has two chunks only. `mixed`: the checks read samples of a mixture."""
    return RunConfig(
        data=DataConfig(mix=MIX if mixed else ()),
        optimizer=OptimizerConfig(group_size=8, warmup_steps=3),
        clock=ClockConfig(steps=STEPS, batch_samples=8 * PEERS, min_peers=3, snapshot_every=10),
        trust=TrustConfig(enabled=True),
    )


def play(seed: int) -> tuple[int, str, list[str]]:
    """A run to its end: (step of the exclusion, its reason, why peers ended)."""
    with tempfile.TemporaryDirectory() as folder, virtual_time(seed) as loop:
        return loop.run_until_complete(_play(loop, seed, Path(folder)))


async def _play(loop: VirtualLoop, seed: int, folder: Path) -> tuple[int, str, list[str]]:
    def replica(peer: PeerProcess, *rest: Any) -> SimReplica:
        return (IdleReplica if peer.name == f"peer{IDLE}" else SimReplica)(peer, *rest)

    world = World(loop, seed, folder, settings(mixed=seed % 2 == 1), PEERS)
    ended: list[str] = []
    try:
        with (
            without_threads(),
            mock.patch("tests.sim.world.SimReplica", replica),
            mock.patch.object(world.checkers, "ended", lambda name, error: ended.append(f"{name}: {error}")),
        ):
            world.coordinator.start()
            for peer in world.peers:
                peer.start()
            honest = [peer for n, peer in enumerate(world.peers) if n != IDLE]
            assert await world.until(lambda: all(peer.finished for peer in honest), 3600.0), world.notes
    finally:
        await world.close()
    journal = Journal(world.coordinator.url, world.coordinator.identity)
    try:
        entries = [r.entry for r in journal.records(world.coordinator.run_id) if isinstance(r, EntryCommitted)]
    finally:
        journal.close()
    told = [(entry.step, exclusion) for entry in entries for exclusion in entry.exclusions]
    assert [x.public_key for _, x in told] == [world.peers[IDLE].identity.public_key], told
    assert len({verdict.checker for verdict in told[0][1].evidence}) >= 2
    return told[0][0], told[0][1].reason, ended


def main() -> None:
    for seed in seeds_asked(__doc__):
        step, reason, ended = play(seed)
        print(f"seed {seed}: step {step}: {reason}; {sorted(set(ended))}")


if __name__ == "__main__":
    main()
