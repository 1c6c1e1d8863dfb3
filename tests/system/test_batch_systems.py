"""Peers that a batch system starts: the scripts of deploy/peers run here with real peers, and a preemption is a leave.

There is no Slurm and no SkyPilot here. `srun` is a program that starts its arguments, which is what srun does with one task.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from protos.identity import Identity
from tests.system.local_swarm import SURROUNDINGS, LocalSwarm, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "deploy" / "peers"
RUN = toml_of_run("batch", clock={"steps": 1000000, "batch_samples": 4, "snapshot_every": 5})


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    made = LocalSwarm(tmp_path, RUN)
    yield made
    made.close()


def started(tmp_path: Path, words: list[str], **variables: str) -> subprocess.Popen[str]:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir(exist_ok=True)
    srun.write_text('#!/bin/sh\nexec "$@"\n')
    srun.chmod(0o755)
    environment = {**os.environ, **SURROUNDINGS, "SWARMENTUM_LISTEN": "127.0.0.1:0", **variables}
    environment["PATH"] = f"{srun.parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def steps_in(home: Path, swarm: LocalSwarm) -> int:
    file = home / "runs" / swarm.invite.run_id.hex()[:16] / "steps.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def trains(peer: subprocess.Popen[str], home: Path, swarm: LocalSwarm, more: int) -> None:
    """Wait for `more` further steps, then take the machine away: exit code 130 says that the peer left cleanly."""
    before = steps_in(home, swarm)
    wait_for("steps of the peer", lambda: peer.poll() is not None or steps_in(home, swarm) >= before + more)
    assert peer.poll() is None, peer.communicate(timeout=10)[0][-3000:]
    peer.send_signal(signal.SIGTERM)
    said, _ = peer.communicate(timeout=300)
    assert peer.returncode == 130, said[-3000:]


def test_a_slurm_task_that_is_preempted_goes_on_under_its_key(swarm: LocalSwarm, tmp_path: Path) -> None:
    homes, bin_folder = tmp_path / "homes", str(Path(sys.executable).parent)
    home = homes / "7"

    def task() -> subprocess.Popen[str]:
        variables = {"LINK": swarm.link, "HOMES": str(homes), "SLURM_ARRAY_TASK_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
        return started(tmp_path, ["bash", str(PEERS / "slurm.sh")], SWARMENTUM_BIN=bin_folder, **variables)

    trains(task(), home, swarm, 8)
    key = Identity.load_or_create(home / "identity.key").public_key
    assert (home / "link").stat().st_mode & 0o077 == 0, "other users of the node can read the link"
    trains(task(), home, swarm, 8)
    assert Identity.load_or_create(home / "identity.key").public_key == key
    found = swarm.operate("peer", "list", "batch")
    assert found["votes_accepted"] > 8, "the votes before and after are one peer's"
    without = started(tmp_path, ["bash", str(PEERS / "slurm.sh")], HOMES=str(homes), SLURM_ARRAY_TASK_ID="1", LINK="")
    assert "the invite link of the run" in without.communicate(timeout=300)[0]
    assert without.returncode != 0


def test_another_spot_machine_gets_the_key_of_the_first(swarm: LocalSwarm, tmp_path: Path) -> None:
    script = yaml.safe_load((PEERS / "skypilot.yaml").read_text())["run"]
    script = script.replace("/keys/", f"{tmp_path}/keys/").replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    keys = set()
    swarm.join("ada")  # the bucket has nothing of the run's state: another peer gives it
    wait_for("steps of ada", lambda: len(swarm.steps("ada")) > 6)
    for machine in ("one", "two"):
        (tmp_path / machine).mkdir()
        home = tmp_path / machine / ".swarmentum" / "peer"
        variables = {"HOME": str(tmp_path / machine), "LINK": swarm.link, "PEER": "3", "SWARMENTUM_THREADS": "1"}
        trains(started(tmp_path, ["bash", "-c", script], **variables), home, swarm, 3)
        keys.add(Identity.load_or_create(home / "identity.key").public_key)
    assert len(keys) == 1
    assert [path.name for path in (tmp_path / "keys").rglob("*") if path.is_file()] == ["identity.key"]
