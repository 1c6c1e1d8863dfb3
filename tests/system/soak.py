"""A soak: a fault every ten seconds among real peers, beside a quiet time of the same length on the same machine.

    python -m tests.system.soak --peers 8 --minutes 3

Faults in turn: kill -9 and back, SIGSTOP for a while, kill -9 of the coordinator and back. Prints one JSON object: steps a
minute quiet and under faults and their ratio, memory of the longest-lived peer, loss, and whether any two digests ever
differed. Exit code 1 if they did. The ratio is a measurement, not a verdict: the peers share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.system.local_swarm import TINY_MODEL, LocalSwarm, digests_by_step

RUN = f"""
name = "soak"
{TINY_MODEL}
[data]
source = "DATA"
context = 32
[clock]
steps = 10000000
batch_samples = 256
min_peers = 2
snapshot_every = 25
deadline_ms_min = 1000
deadline_ms_max = 10000
[overlay]
bootstrap = [BOOTSTRAP]
"""
FAULT_SECONDS = 10.0
STOPPED_SECONDS = 5.0
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def memory_mb(pid: int) -> float:
    """Resident megabytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


class Soak:
    """A swarm and what is done to it."""

    def __init__(self, folder: Path, peers: int) -> None:
        text = folder / "text.txt"
        text.write_bytes(Path(os.__file__).read_bytes())
        self.swarm = LocalSwarm(folder, RUN.replace("DATA", str(text)))
        self.names = [f"peer{number}" for number in range(peers)]
        self.chance = random.Random(0)
        self.faults = 0
        for name in self.names:
            self.swarm.join(name)
        for name in self.names:
            self.swarm.wait_step(name, 10, 300)

    def pause(self, seconds: float) -> None:
        """Time in which peers work; `peer0` is never touched, and has to live."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.swarm.processes["peer0"].child.poll() is None, "peer0 ended"
            time.sleep(min(0.5, max(until - time.monotonic(), 0.0)))

    def quiet(self, seconds: float) -> float:
        """Steps a minute when nothing happens."""
        return self._measured(seconds, lambda: self.pause(FAULT_SECONDS))

    def stormy(self, seconds: float) -> float:
        """Steps a minute with a fault every ten seconds."""
        return self._measured(seconds, self._fault)

    def _measured(self, seconds: float, part: Callable[[], None]) -> float:
        began, first = time.monotonic(), self.swarm.last_step("peer0")
        while time.monotonic() - began < seconds:
            part()
        return 60 * (self.swarm.last_step("peer0") - first) / (time.monotonic() - began)

    def _fault(self) -> None:
        self.faults += 1
        name = self.chance.choice(self.names[1:])
        kind = self.faults % 3
        if kind == 0:
            self.swarm.processes["coordinator"].kill()
            self.swarm.serve(self.swarm.serving["port"])
            self.pause(FAULT_SECONDS)
        elif kind == 1:
            self.swarm.processes[name].kill()
            self.pause(FAULT_SECONDS / 2)
            self.swarm.join(name)
            self.pause(FAULT_SECONDS / 2)
        else:
            child = self.swarm.processes[name].child
            child.send_signal(signal.SIGSTOP)
            self.pause(STOPPED_SECONDS)
            child.send_signal(signal.SIGCONT)
            self.pause(FAULT_SECONDS - STOPPED_SECONDS)

    def all_equal(self) -> bool:
        return all(len(d) == 1 for d in digests_by_step(*(self.swarm.steps(name) for name in self.names)).values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.soak", description=__doc__)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=3.0, help="of faults; the quiet time before is as long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmentum-soak-") as folder:
        soak = Soak(Path(folder), options.peers)
        try:
            pid = soak.swarm.processes["peer0"].child.pid
            quiet = soak.quiet(60 * options.minutes)
            before = memory_mb(pid)
            stormy = soak.stormy(60 * options.minutes)
            steps = soak.swarm.steps("peer0")
            result = {
                "peers": options.peers,
                "faults": soak.faults,
                "steps": steps[-1]["step"],
                "steps_a_minute_quiet": round(quiet, 1),
                "steps_a_minute_faults": round(stormy, 1),
                "ratio": round(stormy / quiet, 3),
                "memory_mb_before": round(before, 1),
                "memory_mb_after": round(memory_mb(pid), 1),
                "loss": round(sum(line["loss"] for line in steps[-20:]) / 20, 4),
                "digests_equal": soak.all_equal(),
            }
        finally:
            soak.swarm.close()
    print(json.dumps(result))
    return 0 if result["digests_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
