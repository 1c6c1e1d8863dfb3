"""Aggregators that lie alike, and peers that doubt sums that are right: `python -m tests.sim.forgers`.

A run without an anchor. `forgers` make the same false sum whenever two of them add a range up; `doubters` say of each sum that
it is false. Everything is real but network, clock and disk.
"""

import asyncio
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from coordinator.clock.aggregation import EQUAL_NEEDED
from coordinator.clock.findings import FORGED
from coordinator.clock.state import Run
from node.swarm.runtime import ByRange
from node.swarm.session import Parts, Session
from protos.checks import AUDIT_STEPS
from protos.identity import short
from protos.log import SignedEntry
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig
from protos.run_sections import AdmissionConfig
from protos.slices import Update, blobs_of
from tests.sim.__main__ import seeds_asked
from tests.sim.clock import VirtualLoop, virtual_time
from tests.sim.sums import with_aggregators
from tests.sim.world import PeerProcess, SimDoor, World, identity_of, without_threads

PEERS, STEPS, SECONDS, LATE_SECONDS = 7, 40, 900.0, 0.1


@dataclass(frozen=True)
class Played:
    """How a run ended: the coordinator's state, who lied, false sums, and words about sums that were right."""

    run: Run
    liars: frozenset[bytes]
    lies: int
    cries: int
    notes: tuple[str, ...]


class ForgingDoor(SimDoor):
    """Lies where so many forgers add one range up that their sum counts: alone they would only get a rest."""

    number = 0

    def part(self, number: int) -> "ForgingDoor":
        found = super().part(number)
        assert isinstance(found, ForgingDoor)
        found.number = number
        return found

    def aggregate(self, updates: Sequence[Update], step: int) -> bytes:
        peer, session = self._peer, self._peer._session
        assert session is not None
        rows = session.parts.view.by_range(step)
        forgers = {it.identity.public_key for it in peer.world.peers if isinstance(it, Liar) and it.forges}
        forges = bool(rows) and len(updates) > 1 and len(forgers.intersection(rows[self.number])) >= EQUAL_NEEDED
        peer.lies_in_sums = isinstance(peer, Liar) and peer.forges and forges
        return super().aggregate(updates, step)


class Slow(PeerProcess):
    """Adds up so slowly that the forgers' sums decide first."""

    def _made(self, session: Session) -> Session:
        async def late(function: Any, *given: Any) -> Any:
            await asyncio.sleep(LATE_SECONDS)
            return function(*given)

        session.parts.follower._aggregator._aside = late
        return super()._made(session)


class Liar(PeerProcess):
    """`forges`: it makes false sums; `hides`: it shows nobody its votes once a step is decided; `cries`: it doubts all sums."""

    forges = hides = cries = False
    cried = 0

    def _made(self, session: Session) -> Session:
        session, parts = super()._made(session), session.parts
        if self.hides:
            self._hide(parts)
        if self.forges or self.cries:
            parts.entries._auditor.saw = self._doubt_all(parts)  # type: ignore[assignment,method-assign]
        return session

    def _hide(self, parts: Parts) -> None:
        payloads, lookup, own = parts.publication._payloads, parts.blob_server._lookup, set[bytes]()
        put_whole = payloads.put_whole

        def noted(step: int, data: bytes, ranges: int) -> bool:
            own.update(sha256 for sha256, _ in blobs_of(data, ranges))
            return put_whole(step, data, ranges)

        def shown(sha256: bytes) -> bytes | None:
            late = payloads._steps.get(sha256, parts.view.step + 1) <= parts.view.step
            return None if late and sha256 in own else lookup(sha256)

        payloads.put_whole = noted  # type: ignore[method-assign]
        parts.blob_server._lookup = shown

    def _doubt_all(self, parts: Parts) -> Callable[[SignedEntry, ByRange], None]:
        def saw(signed: SignedEntry, _: ByRange) -> None:
            for number in range(parts.view.ranges if self.cries and signed.entry.aggregate is not None else 0):
                self.cried += 1
                parts.outbox.doubt(signed.entry.step, number)

        return saw


def config(ranges: int, each: int) -> RunConfig:
    return RunConfig(
        clock=ClockConfig(
            steps=STEPS, batch_samples=16, min_peers=2, snapshot_every=10, deadline_ms_min=500, deadline_ms_max=10_000,
            aggregators=each, ranges=ranges,
        ),
        optimizer=OptimizerConfig(selection="random", one_in=16),
        admission=AdmissionConfig(mode="allow_list", allowed=[identity_of(n).peer_id for n in range(PEERS)]),
    )  # fmt: skip


def play(
    seed: int,
    ranges: int,
    *,
    forgers: int = 0,
    doubters: int = 0,
    hides: bool = False,
    each: int = 3,
    slow: bool = False,
) -> Played:
    """A run until it stops, or to its end. `each`: aggregators of a range."""
    with tempfile.TemporaryDirectory() as folder, virtual_time(seed) as loop:
        return loop.run_until_complete(
            _play(loop, seed, Path(folder), config(ranges, each), forgers, doubters, hides, slow)
        )


async def _play(
    loop: VirtualLoop,
    seed: int,
    folder: Path,
    settings: RunConfig,
    forgers: int,
    doubters: int,
    hides: bool,
    slow: bool,
) -> Played:
    world = World(loop, seed, folder, settings, PEERS)
    if slow:
        world.peers = [Slow(world, number, peer.compute_seconds) for number, peer in enumerate(world.peers)]
    chosen = random.Random(seed).sample(range(PEERS), forgers + doubters)
    for at, number in enumerate(chosen):
        liar = Liar(world, number, world.peers[number].compute_seconds)
        liar.forges, liar.hides, liar.cries = at < forgers, hides and at < forgers, at >= forgers
        world.peers[number] = liar

    def run() -> Run:
        return world.coordinator.hub.runs[world.coordinator.run_id].run

    try:
        with without_threads(), with_aggregators(), mock.patch("tests.sim.world.SimDoor", ForgingDoor):
            world.coordinator.start()
            for peer in world.peers:
                peer.start()
            done = await world.until(lambda: run().is_paused or all(p.finished for p in world.peers), SECONDS)
            assert done, (run().reason, world.notes)
            await asyncio.sleep(30.0)
            liars = frozenset(world.peers[number].identity.public_key for number in chosen)
            cries = sum(peer.cried for peer in world.peers if isinstance(peer, Liar))
            return Played(run(), liars, world.lies, cries, tuple(world.notes))
    finally:
        await world.close()


CASES: dict[str, dict[str, Any]] = {
    "two lie alike": {"forgers": 2},
    "two lie alike before the third is done": {"forgers": 2, "slow": True},
    "two lie alike and hide their votes": {"forgers": 2, "hides": True},
    "all aggregators lie alike and hide their votes": {"forgers": 2, "hides": True, "each": 2},
    "three doubt": {"doubters": 3},
}
OFTEN = 2
"""Every so many steps a range is audited where all its aggregators lie: a run of few steps tells something."""


def check(played: Played) -> None:
    """Who forged is named, and nobody else; who doubts what is right gains nothing."""
    run, words = played.run, played.run.pause or ""
    if played.cries:
        assert played.cries > STEPS // 2, "they were heard"
        assert not words, words
        assert run.head_step == STEPS
        assert not run.resting
    if words:
        assert words.startswith(FORGED), words
        named = set(words.split("It came from ")[1].split(". ")[0].split(", "))
        assert len(named) >= EQUAL_NEEDED
        assert named <= {short(key) for key in played.liars}, words
        step = int(words.split(" of step ")[1].split()[0])
        assert run.head_step <= step + AUDIT_STEPS
        assert run.resting.keys() <= played.liars, "who was right adds up again"
    elif played.lies:
        assert run.head_step == STEPS


def main() -> None:
    for seed in seeds_asked(__doc__):
        for ranges in (1, 3):
            for name, case in CASES.items():
                often = mock.patch("protos.checks.AUDIT_EVERY", OFTEN) if "each" in case else nullcontext()
                with often:
                    found = play(seed, ranges, **case)
                check(found)
                print(f"seed {seed}, {ranges} ranges, {name}: step {found.run.head_step}, {found.lies} false sums, "
                      f"{found.cries} cries: {found.run.reason}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
