"""The promise of an open run with an anchor, attacked: eight free identities against three honest peers.

They say that they have states, snapshots and payloads that nobody computed, all the same and before anybody else can. The run
loses no step's state and no honest peer, and learns what it would have learnt without them.
"""

import asyncio
import os
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from node.archive.ledger import read
from tests.attack.fakes import poison
from tests.system.copied import Copied, begin
from tests.system.local_swarm import IMPATIENT, LocalSwarm, digests_by_step, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

HONEST = ("ada", "bob", "cyd")


def attacked_from(swarm: LocalSwarm, name: str, step: int, seconds: float) -> subprocess.Popen[str] | Copied:
    """Start an attack, in a process of its own, once the run has reached a step."""
    swarm.wait_step("ada", step)
    command = ("tests.attack.one", name, swarm.link, str(swarm.folder), str(seconds))
    return begin(swarm.folder / f"{name}.log", *command)


def play(folder: Path, steps: int, attack: str | None) -> tuple[LocalSwarm, float, str]:
    """A whole run of three honest peers and an anchor; the loss of its last steps, and what the attacker says."""
    folder.mkdir()
    clock = {"steps": steps, "batch_samples": 24, "min_peers": 3, "snapshot_every": 10} | IMPATIENT
    swarm = LocalSwarm(folder, toml_of_run("open", source=os.__file__, relay=True, clock=clock), "--anchor")
    words = ""
    try:
        assert swarm.created["trust"], "an open run with an anchor has checks"
        swarm.anchor()
        peers = [swarm.join(name) for name in HONEST]
        attacker = attacked_from(swarm, attack, 10, 600.0) if attack else None
        for peer in peers:
            code, summary = peer.finish(500)
            assert code == 0, "an honest peer was lost"
            assert summary["resyncs"] == 0
        if attacker is not None:
            attacker.terminate()
            words = attacker.communicate(timeout=300)[0]
        loss = statistics.fmean(line["loss"] for line in swarm.steps("ada")[-30:])
        return swarm, loss, words
    except BaseException:
        swarm.close()
        raise


@pytest.mark.parametrize("steps", [50, 200])
@pytest.mark.nightly
def test_eight_fakes_harm_nothing_in_a_run_of_three_with_an_anchor(tmp_path: Path, steps: int) -> None:
    started = time.monotonic()
    calm, calm_loss, _ = play(tmp_path / "calm", steps, None)
    calm_seconds = time.monotonic() - started
    calm.close()
    started = time.monotonic()
    swarm, loss, _ = play(tmp_path / "attacked", steps, "poisoned_state")
    seconds = time.monotonic() - started
    try:
        print(f"calm {calm_seconds:.1f} s, loss {calm_loss:.3f}; attacked {seconds:.1f} s, loss {loss:.3f}")
        told = [swarm.steps(name) for name in (*HONEST, "anchor")]
        assert all(len(digests) == 1 for digests in digests_by_step(*told).values())
        truth = {line["step"]: bytes.fromhex(line["digest"]) for line in swarm.steps("ada")}
        entries = asyncio.run(read(swarm.invite))[0]
        assert len(entries) == steps
        said = {s.entry.step - 1: s.entry.parent_state_digest for s in entries if s.entry.parent_state_digest}
        assert len(said) > steps / 2
        assert all(digest == truth[step] for step, digest in said.items())
        honest = {peer["id"] for peer in swarm.status()["peers"] if peer["votes_accepted"]}
        assert len(honest) == len(HONEST), "votes of the fakes counted"
        values = swarm.operate("snapshot", "list", "open")
        assert values["snapshots"][0]["step"] == steps
        assert all(poison("root", s["step"]).hex() != s["root"] for s in values["snapshots"])
        assert loss <= 1.05 * calm_loss
        # the anchor serves the end of the run: who comes now gets the true state
        late = swarm.join("late")
        wait_for("the last state", lambda: swarm.events("late", "loading snapshot"))
        code, summary = late.finish()
        assert code == 0
        assert summary["state_digest"] == swarm_digest(swarm)
    finally:
        swarm.close()


def swarm_digest(swarm: LocalSwarm) -> str:
    """What the honest peers ended with (their models are below a digest's part: the last step's digest is the whole)."""
    return swarm.steps("ada")[-1]["digest"]
