"""A soak: a fault every ten seconds among real peers, beside a swarm that is left alone for as long on the same machine.

    python -m tests.system.soak --peers 8 --minutes 3

Each peer has a place and an uplink of its own (network namespaces: needs root), and a model that takes half a second for a
batch without using the cores (`--forward-seconds`), as if on a GPU of its own: otherwise the cores that all processes of
this test share set the pace, and a peer that starts again slows down all others. Faults in turn: kill -9 and back, SIGSTOP of
all that a peer runs, and a cut that lets no packet of one or two peers through; with `--coordinator` also kill -9 of the
coordinator and back. Prints one JSON object: steps a minute quiet and under faults and their ratio, memory of a peer that
lives through it, loss of both swarms after the same step, and whether any two digests ever differed. Exit code 1 if they did.
The ratio is a measurement, not a test.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system.local_swarm import TINY_MODEL, digests_by_step
from tests.system.netns import Internet, NotHereError
from tests.system.spread_swarm import SpreadSwarm, places_of

PACED = """[model]
factory = "tests.system.paced_model:make"
[model.kwargs]
seconds = SECONDS
[model.kwargs.config]"""
RUN = f"""
name = "soak"
{TINY_MODEL.replace("[model.config]", PACED)}
[data]
source = "DATA"
context = 32
[clock]
steps = 10000000
batch_samples = 64
min_peers = 2
snapshot_every = 25
deadline_ms_min = 1000
deadline_ms_max = 10000
[optimizer]
group_size = 8
[overlay]
bootstrap = [BOOTSTRAP]
"""
FAULT_SECONDS = 10.0
AWAY_SECONDS = 5.0
UPLINK_KBIT = 10_000
FORWARD_SECONDS = 0.5
FLAGS = ("--allow-code", "--set", "micro_batch=64")
LOSS_STEPS = 20
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def memory_mb(pid: int) -> float:
    """Resident megabytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


@dataclass(frozen=True)
class Measured:
    """What a swarm did in the time that counts."""

    steps_a_minute: float
    memory_mb_before: float
    memory_mb_after: float
    losses: dict[int, float]
    """By step."""
    digests_equal: bool


class Soak:
    """A swarm and what is done to it."""

    def __init__(self, folder: Path, internet: Internet, options: argparse.Namespace) -> None:
        folder.mkdir()
        text = folder / "text.txt"
        text.write_bytes(Path(os.__file__).read_bytes())
        self.internet = internet
        self.names = [name for name in internet.public if name != "pub"]
        self.chance = random.Random(0)
        self.kinds: list[Callable[[], None]] = [self._kill, self._stop, self._cut]
        if options.coordinator:
            self.kinds.append(self._kill_coordinator)
        self.faults = 0
        run = RUN.replace("DATA", str(text)).replace("SECONDS", str(options.forward_seconds))
        self.swarm = SpreadSwarm(folder, run, internet)
        try:
            for name in self.names:
                self.swarm.join(name, *FLAGS)
            for name in self.names:
                self.swarm.wait_step(name, 10, 300)
        except BaseException:
            self.swarm.close()
            raise

    def measure(self, seconds: float, *, stormy: bool) -> Measured:
        """Let `seconds` pass, with a fault every ten of them or without."""
        lasting = self.names[0]
        pid = self.swarm.processes[lasting].child.pid
        before, began, first = memory_mb(pid), time.monotonic(), self.swarm.last_step(lasting)
        while time.monotonic() - began < seconds:
            if stormy:
                self.kinds[self.faults % len(self.kinds)]()
                self.faults += 1
            else:
                self.pause(FAULT_SECONDS)
        pace = 60 * (self.swarm.last_step(lasting) - first) / (time.monotonic() - began)
        losses = {int(line["step"]): float(line["loss"]) for line in self.swarm.steps(lasting)}
        return Measured(pace, before, memory_mb(pid), losses, self._all_equal())

    def pause(self, seconds: float) -> None:
        """Time in which peers work; the first is never touched, and has to live."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.swarm.processes[self.names[0]].child.poll() is None, f"{self.names[0]} ended"
            time.sleep(min(0.5, max(until - time.monotonic(), 0.0)))

    def _kill(self) -> None:
        name = self.chance.choice(self.names[1:])
        self.swarm.processes[name].kill()
        self.pause(AWAY_SECONDS)
        self.swarm.join(name, *FLAGS)
        self.pause(FAULT_SECONDS - AWAY_SECONDS)

    def _stop(self) -> None:
        group = self.swarm.processes[self.chance.choice(self.names[1:])].child.pid
        os.killpg(group, signal.SIGSTOP)
        self.pause(AWAY_SECONDS)
        os.killpg(group, signal.SIGCONT)
        self.pause(FAULT_SECONDS - AWAY_SECONDS)

    def _cut(self) -> None:
        names = self.chance.sample(self.names[1:], self.chance.randint(1, 2))
        for name in names:
            self.internet.cut(name)
        self.pause(AWAY_SECONDS)
        for name in names:
            self.internet.heal(name)
        self.pause(FAULT_SECONDS - AWAY_SECONDS)

    def _kill_coordinator(self) -> None:
        self.swarm.processes["coordinator"].kill()
        self.swarm.serve(self.swarm.serving["port"])
        self.pause(FAULT_SECONDS)

    def _all_equal(self) -> bool:
        return all(len(d) == 1 for d in digests_by_step(*(self.swarm.steps(name) for name in self.names)).values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.soak", description=__doc__)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=3.0, help="of faults; the quiet swarm runs as long")
    parser.add_argument("--uplink-kbit", type=int, default=UPLINK_KBIT, help="what each peer can send; 0: no limit")
    parser.add_argument("--forward-seconds", type=float, default=FORWARD_SECONDS, help="of a forward pass, at least")
    parser.add_argument("--coordinator", action="store_true", help="kill the coordinator in turn, too")
    parser.add_argument("--keep", type=Path, help="an empty folder for the peers' homes and logs")
    options = parser.parse_args()
    places = places_of(f"peer{number}" for number in range(options.peers))
    try:
        internet = Internet(places, homes={})
    except NotHereError as why:
        print(f"no network namespaces here: {why}", file=sys.stderr)
        return 2
    try:
        for place in places:
            if place != "pub" and options.uplink_kbit:
                internet.shape(place, options.uplink_kbit)
        with tempfile.TemporaryDirectory(prefix="swarmentum-soak-") as folder:
            result = _compare(options, options.keep or Path(folder), internet)
    finally:
        internet.close()
    print(json.dumps(result))
    return 0 if result["digests_equal"] else 1


def _compare(options: argparse.Namespace, folder: Path, internet: Internet) -> dict[str, Any]:
    found: dict[bool, Measured] = {}
    for stormy in (False, True):
        soak = Soak(folder / ("stormy" if stormy else "quiet"), internet, options)
        try:
            found[stormy] = soak.measure(60 * options.minutes, stormy=stormy)
        finally:
            soak.swarm.close()
    quiet, storm = found[False], found[True]
    last = sorted(quiet.losses.keys() & storm.losses.keys())[-LOSS_STEPS:]
    return {
        "peers": options.peers,
        "uplink_kbit": options.uplink_kbit,
        "forward_seconds": options.forward_seconds,
        "faults": soak.faults,
        "steps_a_minute_quiet": round(quiet.steps_a_minute, 1),
        "steps_a_minute_faults": round(storm.steps_a_minute, 1),
        "ratio": round(storm.steps_a_minute / quiet.steps_a_minute, 3),
        "memory_mb_before": round(storm.memory_mb_before, 1),
        "memory_mb_after": round(storm.memory_mb_after, 1),
        "loss_steps": [last[0], last[-1]],
        "loss_quiet": round(statistics.mean(quiet.losses[step] for step in last), 4),
        "loss_quiet_spread": round(statistics.stdev(quiet.losses[step] for step in last), 4),
        "loss_faults": round(statistics.mean(storm.losses[step] for step in last), 4),
        "digests_equal": quiet.digests_equal and storm.digests_equal,
    }


if __name__ == "__main__":
    sys.exit(main())
