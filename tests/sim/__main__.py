"""Run seeds: `python -m tests.sim --seed 17` (one, with its notes) or `--seeds 0 100` (a range). Exit code 1: one failed.

Hashing is made the same in every process (PYTHONHASHSEED=0), so that a seed means the same everywhere.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

SHM = Path("/dev/shm")
STEPS_A_SECOND = 14 / 60  # so that a run is about as long as its bad time
LONG_PART = 0.2
END_SECONDS_MAX = 900.0
REAL_TIME = time.perf_counter


def run_seed(
    seed: int,
    names: list[str] | None = None,
    *,
    long: bool | None = None,
    aggregators: int = 0,
    ranges: int = 1,
    settings: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """One world to its end: (digest of everything that happened, notes). AssertionError says what did not hold."""
    from tests.sim.clock import virtual_time

    gc.disable()  # whether a cycle is found sooner or later must not matter
    folder = Path(tempfile.mkdtemp(prefix="swarmentum-sim-", dir=SHM if SHM.is_dir() else None))
    try:
        with virtual_time(seed) as loop:
            return loop.run_until_complete(_play(loop, seed, folder, names, long, aggregators, ranges, settings))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        gc.enable()
        gc.collect()


async def _play(  # type: ignore[no-untyped-def]
    loop, seed: int, folder: Path, names: list[str] | None, long: bool | None, aggregators: int, ranges: int, settings
) -> tuple[str, list[str]]:
    from protos.run_config import ClockConfig, RunConfig
    from tests.sim import faults
    from tests.sim.sums import with_aggregators
    from tests.sim.world import World, without_threads

    chance = random.Random(seed)
    peers = chance.randrange(2, 6) + (2 if aggregators else 0)
    seconds = 180.0 if (chance.random() < LONG_PART if long is None else long) else 60.0
    clock = ClockConfig(
        steps=round(seconds * STEPS_A_SECOND),
        batch_samples=16,
        min_peers=chance.randrange(1, 3),
        snapshot_every=chance.choice((2, 4, 5)),
        deadline_ms_min=500,
        deadline_ms_max=10_000,
        aggregators=aggregators,
        ranges=ranges,
    )
    config = _config(RunConfig, clock, peers, aggregators).model_dump()
    for name, value in (it.split("=") for it in settings):
        section, _, key = name.partition(".")
        config[section][key] = json.loads(value)
    world = World(loop, seed, folder, RunConfig.model_validate(config), peers)
    drawn = faults.drawn(chance, peers, names or list(faults.FAULTS), seconds)
    try:
        with without_threads(), with_aggregators():
            world.coordinator.start()
            for peer in world.peers:
                loop.call_later(chance.uniform(0.0, 5.0), peer.start)
            faults.schedule(world, drawn)
            await world.until(lambda: False, seconds)
            _check(world, await _ends(world), names)
    except BaseException:
        for note in world.notes:
            print("   ", note, file=sys.stderr)
        raise
    finally:
        await world.close()
    told = repr((world.notes, sorted(world.checkers.digests.items()), sorted(world.checkers.entries.items()), loop.now))
    return hashlib.sha256(told.encode()).hexdigest()[:16], world.notes


def _config(RunConfig, clock, peers: int, aggregators: int):  # type: ignore[no-untyped-def]
    """Aggregators need votes that add up and, in a run without anchors, peers that somebody chose."""
    if not aggregators:
        return RunConfig(clock=clock)
    from tests.sim.world import identity_of

    allowed = [identity_of(number).peer_id for number in range(peers)]
    optimizer = {"selection": "random", "one_in": 16}
    return RunConfig(clock=clock, optimizer=optimizer, admission={"mode": "allow_list", "allowed": allowed})


async def _ends(world) -> bool:  # type: ignore[no-untyped-def]
    """Whether the run comes to its end, and each peer to its own, without a peer that gives up and joins again.

    A peer that comes back to a finished run that everybody has left waits for its whole patience.
    """
    from tests.sim.world import PATIENCE_SECONDS

    def decided() -> bool:
        run = world.coordinator.hub.runs[world.coordinator.run_id].run
        return bool(run.head_step >= run.config.clock.steps)

    def over() -> bool:
        return all(peer.finished or peer.too_late for peer in world.peers)

    if not await world.until(decided, END_SECONDS_MAX):
        return False
    if await world.until(over, END_SECONDS_MAX):
        return True
    late = [peer for peer in world.peers if not peer.finished]
    return await world.until(over, PATIENCE_SECONDS) and all(peer.too_late for peer in late)


def _check(world, finished: bool, names: list[str] | None) -> None:  # type: ignore[no-untyped-def]
    from coordinator.clock.effects import EntryCommitted
    from coordinator.store.journal import Journal
    from tests.sim.sums import check_sums

    head = world.coordinator.head_step
    assert finished, (
        f"once all was well, the run did not come to its end in {END_SECONDS_MAX} s: step {head} of "
        f"{world.config.clock.steps}; "
        f"{world.coordinator.hub.runs[world.coordinator.run_id].run.reason}; "
        f"peers at {[(p.name, p.replica.step if p.replica else None, p.finished) for p in world.peers]}"
    )
    run = world.coordinator.hub.runs[world.coordinator.run_id].run
    assert head == run.config.clock.steps, f"the run ended at step {head}"
    final = {peer.replica.whole_digest() for peer in world.peers if peer.finished}
    assert len(final) == 1, "the final states differ"
    journal = Journal(world.coordinator.url, world.coordinator.identity)
    try:
        world.checkers.journal(journal.records(world.coordinator.run_id), world.coordinator.run_id, world.config)
        entries = [r.entry for r in journal.records(world.coordinator.run_id) if isinstance(r, EntryCommitted)]
        named = [entry.settings for entry in entries]
        assert named == [run.settings_at(entry.step) for entry in entries], (
            "an entry names other settings than the journal"
        )
        changed = sum(one != before for before, one in pairwise([(), *named]))
        if changed:
            world.note(f"{changed} changes of settings are in the log; the run ended at step {head}")
        check_sums(world, entries)
        empty = sum(c.payload_sha256 in world.misnamed for entry in entries for c in entry.contributions)
        if world.misnamed:
            world.note(
                f"{empty} of {len(world.misnamed)} payloads with a wrong length were accepted, and count as nothing"
            )
    finally:
        journal.close()
    for peer in world.peers:
        lied, out = (found.get(peer.identity.public_key) for found in (world.checkers.heard, world.checkers.excluded))
        if lied is not None:
            world.note(f"{peer.name} announced two payloads for step {lied}; excluded in entry {out}")
            # Where the weather is bad, too, evidence may be lost on the way. After the last step no entry follows to state it.
            assert out is not None or names != ["equivocate"] or lied == head, (
                f"{peer.name} announced two payloads and was not excluded"
            )


def seeds_asked(what: str | None) -> list[int]:
    """The seeds of the command line, 0 if it names none. `what` a program does, for its help. Nothing is logged after it."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", metavar="SEED", type=int, nargs="*", default=[0])
    found: list[int] = parser.parse_args().seeds
    _quiet(verbose=False)
    return found


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, with notes of what happened")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), help="all of first <= seed < end")
    parser.add_argument("--faults", nargs="+", help="only these kinds of faults")
    parser.add_argument("--aggregators", type=int, default=0, help="clock.aggregators (default 0: none)")
    parser.add_argument("--ranges", type=int, default=1, help="clock.ranges, with aggregators")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=JSON", help="other settings, such as clock.strict=true"
    )
    parser.add_argument("--verbose", action="store_true", help="the parts' own logs too")
    options = parser.parse_args()
    _quiet(options.verbose)
    seeds = [options.seed] if options.seed is not None else range(*(options.seeds or (0, 10)))
    failed = 0
    for seed in seeds:
        began = REAL_TIME()
        try:
            digest, notes = run_seed(
                seed, options.faults, aggregators=options.aggregators, ranges=options.ranges, settings=options.set
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed is told
            failed += 1
            if options.seed is not None:
                traceback.print_exc()
            print(f"FAILED seed {seed}: {error}\n  replay with: make sim SEED={seed}", flush=True)
            continue
        if options.seed is not None:
            print("\n".join(notes))
        print(f"seed {seed}: {digest}, {REAL_TIME() - began:.1f} s", flush=True)
    return 1 if failed else 0


def _quiet(verbose: bool) -> None:
    import logging

    import structlog
    import torch

    import tests.sim.faults  # noqa: F401 - and all that a world needs

    torch.set_num_threads(1)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.CRITICAL)
    )
    gc.freeze()  # what is imported stays: a world's collection need not look at it


if __name__ == "__main__":
    sys.exit(main())
