"""docs/operator.md, each command of ours in its order, on loopback.

systemd is not the first process here, so the test starts what the units start, with other folders and ports.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.local_swarm import Process, processes_with, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900), pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"swarmentum": "node", "swarmentum-coordinator": "coordinator"}
LINKS = re.compile(r"swarmentum(?:-anchor)?://\S+")


def lines_of_ours() -> list[str]:
    """Commands of the page that are this project's, without comments."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / "docs/operator.md").read_text(), flags=re.S | re.M)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("swarmentum")]


def started_by(unit: str, **changes: str) -> list[str]:
    """What a unit starts, as modules of this checkout."""
    text = (ROOT / "deploy/systemd" / f"{unit}.service").read_text()
    [line] = re.findall(r"^ExecStart=/opt/swarmentum/bin/(.*)$", text, flags=re.M)
    for old, new in changes.items():
        assert old in line
        line = line.replace(old, new)
    program, *words = shlex.split(line)
    return [PROGRAMS[program], *words]


class Server:
    """The server of the page, and the machine at home."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running, self.links = folder, dict[str, Process](), list[str]()
        self.surroundings = {
            "SWARMENTUM_COORDINATOR_HOME": str(folder / "coordinator"),
            "SWARMENTUM_COORDINATOR_WEB_LISTEN": "none",
            "SWARMENTUM_COORDINATOR_LISTEN": "127.0.0.1:0",
            "SWARMENTUM_LISTEN": "127.0.0.1:0",
            "SWARMENTUM_HOME": str(folder / "peer"),
            "SWARMENTUM_THREADS": "1",
        }

    def start(self, name: str, command: list[str]) -> Process:
        self.running[name] = Process(self.folder / f"{name}.log", *command, environment=self.surroundings)
        return self.running[name]

    def run(self, line: str) -> str:
        """One command to its end, and what it printed."""
        line = line.replace("12D3KooW...", self.peer()).replace("/root", str(self.folder))
        line, file = (part.strip() for part in (*line.split(">"), "")[:2]) if "> " in line else (line, "")
        program, *words = shlex.split(line.replace("swarmentum://...", self.links[-1] if self.links else ""))
        done = subprocess.run(
            [sys.executable, "-m", PROGRAMS[program], *words],
            cwd=self.folder, capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.surroundings},
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if file:
            (self.folder / file).write_text(done.stdout)
        return done.stdout

    def peer(self) -> str:
        log = self.folder / "join.log"
        found = re.search(r'"peer": "(\w{8})"', log.read_text()) if log.exists() else None
        return found[1] if found else "12D3KooW..."

    def close(self) -> None:
        for process in self.running.values():
            process.close()


def test_from_nothing_to_a_peer_at_home(tmp_path: Path) -> None:
    server = Server(tmp_path)
    home = {"/var/lib/swarmentum": str(tmp_path / "coordinator"), "127.0.0.1:9100": "127.0.0.1:0"}
    coordinator = server.start("coordinator", started_by("swarmentum-coordinator", **home))
    try:
        coordinator.first_json()
        ran = []
        for line in lines_of_ours():
            command = " ".join(line.split()[:3])
            if command.startswith("swarmentum join"):
                words = line.replace("swarmentum://...", server.links[-1]).split()[1:]
                peer = server.start("join", ["node", *words, "--json", "--yes"])
                log = tmp_path / "join.log"
                wait_for("steps of the peer at home", lambda log=log: log.read_text().count('"event": "step"') > 3)  # type: ignore[misc]
            else:
                said = server.run(line)
                server.links += LINKS.findall(said)
            ran.append(command)
            if "run create" in line:
                assert len(server.links) == 2, said
                (tmp_path / "anchor.link").write_text(server.links[0] + "\n")
                anchor = {"%d": str(tmp_path), "/var/lib": str(tmp_path), "0.0.0.0:7701": "127.0.0.1:0"}
                server.start("anchor", started_by("swarmentum-anchor", **anchor))
        assert "swarmentum export swarmentum://..." in ran
        assert (tmp_path / "swarm-backup.tar").stat().st_size > 10_000
        assert (tmp_path / "model" / "config.json").exists()
        assert peer.finish()[0] == 4, "the peer was excluded"
        server.running["anchor"].child.send_signal(signal.SIGTERM)
        coordinator.child.send_signal(signal.SIGTERM)
        assert (server.running["anchor"].finish()[0], coordinator.finish()[0]) == (130, 0)
    finally:
        server.close()
    assert processes_with(str(tmp_path)) == []
