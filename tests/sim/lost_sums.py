"""The only aggregator, an anchor, is killed once its sum is in the log: `python -m tests.sim.lost_sums`.

Nobody has the sum. The authors still have the votes that the sum is of. Everything is real but network, clock and disk.
"""

import tempfile
from pathlib import Path
from unittest import mock

from coordinator.clock.effects import EntryCommitted, Record
from coordinator.clock.state import Run
from coordinator.serving.event_loop import RunRuntime
from node.data.samples import Samples
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig, TrustConfig
from tests.sim.__main__ import seeds_asked
from tests.sim.clock import VirtualLoop, virtual_time
from tests.sim.sums import with_aggregators
from tests.sim.world import PeerProcess, World, identity_of, without_threads

PEERS, STEPS, SECONDS = 5, 14, 400.0


class Anchor(PeerProcess):
    """Applies, adds votes up, and does not train."""

    def samples(self, config: RunConfig) -> Samples | None:
        return None


def config(ranges: int) -> RunConfig:
    return RunConfig(
        clock=ClockConfig(
            steps=STEPS, batch_samples=16, min_peers=2, snapshot_every=5, deadline_ms_min=500, deadline_ms_max=10_000,
            aggregators=1, ranges=ranges,
        ),
        optimizer=OptimizerConfig(selection="random", one_in=16),
        trust=TrustConfig(anchors=[identity_of(PEERS).peer_id]),
    )  # fmt: skip


def play(seed: int, ranges: int, killed_at: int) -> tuple[Run, list[str]]:
    """A run whose anchor is killed at this entry, or at the next that has a sum."""
    with tempfile.TemporaryDirectory() as folder, virtual_time(seed) as loop:
        return loop.run_until_complete(_play(loop, seed, Path(folder), ranges, killed_at))


async def _play(loop: VirtualLoop, seed: int, folder: Path, ranges: int, killed_at: int) -> tuple[Run, list[str]]:
    world = World(loop, seed, folder, config(ranges), PEERS + 1)
    anchor = world.peers[PEERS] = Anchor(world, PEERS, 1.0)
    killed, written = list[int](), RunRuntime._written

    def kill(runtime: RunRuntime, run: Run, record: Record) -> None:
        """The entry is in the journal, and nobody has heard of it."""
        written(runtime, run, record)
        summed = isinstance(record, EntryCommitted) and record.entry.aggregate is not None
        if summed and run.head_step >= killed_at and not killed:
            killed.append(run.head_step)
            loop.call_soon(anchor.crash)

    try:
        with without_threads(), with_aggregators(), mock.patch.object(RunRuntime, "_written", kill):
            world.coordinator.start()
            for peer in world.peers:
                peer.start()

            def run() -> Run:
                return world.coordinator.hub.runs[world.coordinator.run_id].run

            others = world.peers[:PEERS]
            done = await world.until(lambda: all(it.replica and it.replica.step == STEPS for it in others), SECONDS)
            assert done, (run().head_step, run().reason, world.notes)
            assert killed, world.notes
            world.note(f"the anchor was killed after entry {killed[0]}")
            return run(), world.notes
    finally:
        await world.close()


def main() -> None:
    for seed in seeds_asked(__doc__):
        for ranges in (1, 3):
            for killed_at in (6, STEPS):
                run, notes = play(seed, ranges, killed_at)
                print(f"seed {seed}, {ranges} ranges: {notes[-1]}; all came to step {run.head_step}", flush=True)


if __name__ == "__main__":
    main()
