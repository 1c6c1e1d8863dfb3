"""The most memory of `export` and `verify`, in bytes a parameter above the same command with a tiny model.

A coordinator and a peer with an archive are processes of their own; `export` takes the state of a running run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench import loop
from tests.system.local_swarm import TINY_MODEL, LocalSwarm

EVERY, LAST = 4, 11
LOOK_SECONDS = 0.01
SECONDS_MAX = 900.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, nargs="+", default=[25_000_000], help="sizes, about (default 25 million)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    _peaks(TINY_MODEL)  # compiles the kernels
    empty = _peaks(TINY_MODEL)
    rows = [_row(*loop.model_of(count), empty) for count in options.params]
    return {"rows": rows, "empty_bytes": empty, "cores": os.cpu_count()}


def _row(model: str, parameters: int, empty: dict[str, int]) -> dict[str, Any]:
    peaks = _peaks(model)
    above = {name: round((peak - empty[name]) / parameters, 2) for name, peak in peaks.items()}
    return {"params": parameters, "bytes_per_param": above, "peak_bytes": peaks}


def _peaks(model: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with LocalSwarm(folder, loop.run_toml(model, loop.text_in(folder), EVERY, 1)) as swarm:
            ada = swarm.join("ada", environment={"SWARMENTUM_ARCHIVE": "true"})
            swarm.wait_step("ada", LAST, SECONDS_MAX)
            export = ("export", swarm.link, str(folder / "model"), "--yes", "--home", str(folder / "export"))
            exported = peak_of(export, folder / "export.log")
            ada.interrupt()
            ada.finish(SECONDS_MAX)
            archive = next((folder / "ada" / "runs").iterdir())
            return {"export": exported, "verify": peak_of(("verify", str(archive)), folder / "verify.log")}


def peak_of(words: tuple[str, ...], log: Path, seconds_max: float = SECONDS_MAX) -> int:
    """The most memory of a command that has to succeed."""
    with log.open("w") as file:
        child = subprocess.Popen([sys.executable, "-m", "node", *words], stdout=file, stderr=file)
        peak, began = 0, time.monotonic()
        try:
            while child.poll() is None:
                peak = max(peak, loop.processes_of(child.pid).get(child.pid, 0))
                assert time.monotonic() - began < seconds_max, words
                time.sleep(LOOK_SECONDS)
        finally:
            child.kill()
    assert child.returncode == 0, log.read_text()[-3000:]
    return peak
