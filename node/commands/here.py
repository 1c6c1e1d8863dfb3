"""A swarm on this machine: a coordinator, a relay, an anchor and peers on loopback, each the command that a user runs.

`swarmentum demo` and `swarmentum.local` start theirs with it. Each process has a home and a log by its name.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.commands.processes import Processes

COORDINATOR, RELAY, ANCHOR = "coordinator", "relay", "anchor"
NO_PAGE = "none"
LOOPBACK = "127.0.0.1:0"
END_BYTES = 1 << 14
"""Of a file of steps: more than a few lines."""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""For runs that name nothing of the hub: no library asks there."""


class LocalProcesses:
    """Starts the processes; `processes` ends them."""

    def __init__(self, processes: Processes, homes: Path) -> None:
        self.processes, self._homes = processes, homes

    def home(self, name: str) -> Path:
        """The folder of the process of this name."""
        return self._homes / name

    def create(
        self, file: Path, run_toml: Callable[[str], str], *flags: str, anchor: bool, page: str = NO_PAGE
    ) -> dict[str, Any]:
        """Start the coordinator and the relay, and create the run. Returns what `run create` printed: the links.

        `run_toml` gets the relay's address and makes the text of `file`. `page`: where the coordinator serves its web page.
        """
        start, ready = self.processes.start, self.processes.ready
        at = ("--listen", LOOPBACK, "--json")
        relay = start(RELAY, "node", "relay", "--home", str(self.home(RELAY)), "--set", "reachability=auto", *at)
        home = str(self.home(COORDINATOR))
        coordinator = start(COORDINATOR, "coordinator", "serve", "--home", home, "--web-listen", page, *at)
        addresses = ready(RELAY, relay)["addresses"]
        ready(COORDINATOR, coordinator)
        file.write_text(run_toml(addresses[0]), encoding="utf-8")
        words = ("run", "create", str(file), *(("--anchor",) if anchor else ()), "--home", home, "--json", *flags)
        return ready("create", start("create", "coordinator", *words))

    def anchor(self, link: str, *flags: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the anchor: its reports on the run's state count, and it only applies entries."""
        return self._peer(ANCHOR, "anchor", link, 1, flags, environment)

    def join(
        self, name: str, link: str, threads: int, *flags: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a peer. The same name again is the same identity."""
        return self._peer(name, "join", link, threads, flags, environment)

    def _peer(
        self,
        name: str,
        command: str,
        link: str,
        threads: int,
        flags: tuple[str, ...],
        environment: dict[str, str] | None,
    ) -> subprocess.Popen[str]:
        own = ("--home", str(self.home(name)), "--listen", LOOPBACK, "--threads", str(threads), "--json")
        surroundings = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        return self.processes.start(name, "node", command, link, *own, *flags, environment=surroundings)

    def run_folder(self, name: str, run_id: bytes) -> Path:
        """What a peer keeps of a run."""
        return self.home(name) / "runs" / run_id.hex()[:16]

    def steps(self, name: str, run_id: bytes) -> list[dict[str, Any]]:
        """What a peer wrote about its steps so far (whole lines)."""
        return _lines(self._steps_file(name, run_id))

    def last_step(self, name: str, run_id: bytes) -> int:
        """The last step that a peer wrote about; 0 before the first. Reads the end of the file alone."""
        steps = _lines(self._steps_file(name, run_id), END_BYTES)
        return int(steps[-1]["step"]) if steps else 0

    def _steps_file(self, name: str, run_id: bytes) -> Path:
        return self.run_folder(name, run_id) / "steps.jsonl"


def _lines(path: Path, end: int | None = None) -> list[dict[str, Any]]:
    """The whole lines of a file, or of its last `end` bytes; none if there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        if end is not None and (first := file.seek(0, os.SEEK_END) - end) > 0:
            file.seek(first)
            file.readline()  # the end of a line
        else:
            file.seek(0)
        data = file.read()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
