"""What the others lose when one of four peers is killed, again and again, in quick steps: `python -m tests.sim.kills`.

Nobody is told of the death: connections to it stay and carry nothing, as QUIC's do for 30 s. Prints, for each of the others, in
how many of the ten steps after a kill its votes did not count, at the most.
"""

import tempfile
from pathlib import Path

from coordinator.clock.effects import EntryCommitted
from coordinator.store.journal import Journal
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig
from tests.sim.__main__ import seeds_asked
from tests.sim.clock import VirtualLoop, virtual_time
from tests.sim.network import Weather
from tests.sim.world import PeerProcess, World, without_threads

PEERS, KILLED, KILLS, WATCHED = 4, 3, 12, 10
COMPUTE_SECONDS = 0.02


def settings() -> RunConfig:
    """Steps of some 0.07 s; who misses one for a second misses more while it comes after."""
    clock = ClockConfig(
        steps=100_000,
        batch_samples=8 * PEERS,
        min_peers=2,
        snapshot_every=20,
        deadline_ms_min=1000,
        deadline_ms_max=20_000,
    )
    return RunConfig(optimizer=OptimizerConfig(group_size=8, warmup_steps=3), clock=clock)


def play(seed: int) -> list[tuple[int, dict[str, list[int]]]]:
    """For each kill the head's step, and which of the next ten steps each of the others missed."""
    with tempfile.TemporaryDirectory() as folder, virtual_time(seed) as loop:
        return loop.run_until_complete(_play(loop, seed, Path(folder)))


async def _play(loop: VirtualLoop, seed: int, folder: Path) -> list[tuple[int, dict[str, list[int]]]]:
    world = World(loop, seed, folder, settings(), PEERS)
    world.net.weather = Weather(delay=(0.001, 0.01))
    coordinator, victim = world.coordinator, world.peers[KILLED]
    killed_at: list[int] = []

    async def reach(step: int) -> None:
        there = await world.until(lambda: coordinator.head_step >= step, 60.0)
        assert there, (step, coordinator.hub.runs[coordinator.run_id].run.reason, world.notes)

    def kill() -> None:
        killed_at.append(coordinator.head_step)
        victim.crash(silently=True)

    def back() -> bool:
        replica = victim.replica
        return replica is not None and replica.step > coordinator.head_step - 3

    try:
        with without_threads():
            coordinator.start()
            for peer in world.peers:
                peer.compute_seconds = COMPUTE_SECONDS
                peer.start()
            await reach(10)
            for _ in range(KILLS):
                await reach(coordinator.head_step + world.random.randrange(10, 30))
                assert await world.until(back, 60.0), world.notes
                loop.call_later(world.random.uniform(0.0, 0.1), kill)
                assert await world.until(lambda: not victim.running, 1.0)
                victim.replica = None
                await reach(killed_at[-1] + WATCHED)
                victim.start()
    finally:
        await world.close()
    journal = Journal(coordinator.url, coordinator.identity)
    try:
        entries = {r.entry.step: r.entry for r in journal.records(coordinator.run_id) if isinstance(r, EntryCommitted)}
    finally:
        journal.close()
    counted = {step: {part.public_key for part in entry.contributions} for step, entry in entries.items()}
    others = [peer for peer in world.peers if peer is not victim]

    def missed(peer: PeerProcess, step: int) -> list[int]:
        return [n for n in range(step + 1, step + 1 + WATCHED) if peer.identity.public_key not in counted[n]]

    return [(step, {peer.name: missed(peer, step) for peer in others}) for step in killed_at]


def main() -> None:
    for seed in seeds_asked(__doc__):
        kills = play(seed)
        for step, missed in kills:
            if any(missed.values()):
                print(f"seed {seed}: killed after step {step}: missed {missed}")
        worst = max(len(steps) for _, missed in kills for steps in missed.values())
        print(f"seed {seed}: {len(kills)} kills, {worst} steps missed at the most")


if __name__ == "__main__":
    main()
