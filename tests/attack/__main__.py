"""All attackers, one after the other, against one fresh swarm of real processes: `make attack`.

Three honest peers and an anchor train; before, during and after each attack it is looked at how the run goes on. Prints a
table; exit code 0 if the run survived them all, else 1. `--seconds` is how long each lasts, `--only NAME` runs some.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.attack.attacks import all_attacks
from tests.system.copied import begin
from tests.system.local_swarm import IMPATIENT, LocalSwarm, digests_by_step, toml_of_run

HONEST = ("ada", "bob", "cyd")
AFTER_SECONDS_MAX = 300.0
STEPS_AFTER = 5
WIDTH = 160
WORDS_MAX = 300
RUN = toml_of_run(
    "attacked",
    source="stdlib",
    relay=True,
    clock={"steps": 10000000, "batch_samples": 24, "min_peers": 3, "snapshot_every": 20} | IMPATIENT,
)


@dataclass(frozen=True)
class Result:
    """What an attack did to the run. `calm` and `attacked`: steps a second."""

    name: str
    what: str
    calm: float
    attacked: float
    survived: bool
    words: str


def head(swarm: LocalSwarm) -> int:
    """The newest step that an honest peer has applied."""
    return max(swarm.last_step(name) for name in HONEST)


def pace(swarm: LocalSwarm, seconds: float) -> float:
    """Steps a second while nothing else is done."""
    before, began = head(swarm), time.monotonic()
    time.sleep(seconds)
    return (head(swarm) - before) / (time.monotonic() - began)


def attacked(swarm: LocalSwarm, name: str, what: str, seconds: float, calm_seconds: float) -> Result:
    """One attack, in a process of its own; the run has to be whole afterwards, and to go on."""
    calm = pace(swarm, calm_seconds)
    log, pid = swarm.folder / f"{name}.log", str(swarm.processes["coordinator"].child.pid)
    before, began = head(swarm), time.monotonic()
    attacker = begin(log, "tests.attack.one", name, swarm.link, str(swarm.folder), str(seconds), pid)
    try:
        said, _ = attacker.communicate(timeout=10 * seconds + 300)
    except subprocess.TimeoutExpired as error:
        attacker.kill()
        return Result(name, what, calm, 0.0, False, f"the attacker did not end within {error.timeout:.0f} s")
    rate = (head(swarm) - before) / (time.monotonic() - began)
    words = (log.read_text() if attacker.returncode else said).strip()[-WORDS_MAX:]
    return Result(name, what, calm, rate, attacker.returncode == 0 and goes_on(swarm), words)


def goes_on(swarm: LocalSwarm) -> bool:
    """Whether all peers live, take steps, and agree about every one."""
    at, until = head(swarm), time.monotonic() + AFTER_SECONDS_MAX
    while min(swarm.last_step(name) for name in HONEST) < at + STEPS_AFTER:
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    alive = all(swarm.processes[name].child.poll() is None for name in (*HONEST, "anchor"))
    steps = [swarm.steps(name) for name in (*HONEST, "anchor")]
    return alive and all(len(digests) == 1 for digests in digests_by_step(*steps).values())


def table_of(results: list[Result]) -> Table:
    """For people."""
    table = Table("attack", "steps/s before", "during", "survived", "what came of it", title="Attacks on a fresh swarm")
    for result in results:
        during = f"{result.attacked:.1f} ({result.attacked / result.calm:.0%})" if result.calm else "-"
        table.add_row(result.name, f"{result.calm:.1f}", during, "yes" if result.survived else "NO", result.words)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each attack lasts")
    parser.add_argument("--calm", type=float, default=8.0, help="how long the run is looked at before each")
    parser.add_argument("--only", nargs="*", default=[], help="names of attacks")
    options = parser.parse_args()
    attacks = {n: a for n, a in all_attacks().items() if not options.only or n in options.only}
    results: list[Result] = []
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    with (
        tempfile.TemporaryDirectory(prefix="swarmentum-attack-") as folder,
        LocalSwarm(Path(folder), RUN, "--anchor") as swarm,
    ):
        swarm.anchor()
        for name in HONEST:
            swarm.join(name)
        swarm.wait_step("ada", 10)
        for name, attack in attacks.items():
            console.print(f"{name}: {attack.what} ...", highlight=False)
            results.append(attacked(swarm, name, attack.what, options.seconds, options.calm))
    console.print(table_of(results))
    return 0 if results and all(result.survived for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
