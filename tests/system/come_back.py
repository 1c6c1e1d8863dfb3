"""How long a peer that was killed is not heard after it has come back. A measurement, not a test.

    python -m tests.system.come_back --times 3

Three peers on loopback; one is killed (-9), at once starts again with its identity, and each time one JSON line says how
many seconds and steps lay between its taking part and its first vote that counts.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from tests.system.local_swarm import LocalSwarm, wait_for
from tests.system.test_faults import accepted, run_toml

PEERS = ("ada", "bob", "cyd")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.system.come_back", description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmentum-back-") as name:
        folder = Path(name)
        with LocalSwarm(folder, run_toml(folder)) as swarm:
            for peer in PEERS:
                swarm.join(peer)
            for peer in PEERS:
                swarm.wait_step(peer, 30)
            for _ in range(options.times):
                print(json.dumps(come_back(swarm)), flush=True)


def come_back(swarm: LocalSwarm) -> dict[str, float | int]:
    """Kill one, start it again, and see when it counts."""
    swarm.processes["cyd"].kill()
    lives, votes = len(swarm.events("cyd", "taking part")), accepted(swarm, "cyd")
    swarm.join("cyd")
    wait_for("cyd taking part", lambda: len(swarm.events("cyd", "taking part")) > lives)
    began, step = time.monotonic(), swarm.last_step("ada")
    wait_for("vote of cyd that counts", lambda: accepted(swarm, "cyd") > votes)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "steps": swarm.last_step("ada") - step,
        "cores": os.cpu_count() or 0,
    }


if __name__ == "__main__":
    main()
