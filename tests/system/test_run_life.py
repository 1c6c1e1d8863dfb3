"""The life of a run over its real processes: paused over a kill of the coordinator, ended early, loaded by a late joiner."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.local_swarm import PATIENT, LocalSwarm, digests_by_step, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "short-lived", source=os.__file__, clock={"batch_samples": 16, "min_peers": 2, "snapshot_every": 1000} | PATIENT
)
PAUSED = "the operator paused the run: the disk is full"


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, RUN, "--anchor") as swarm:
        yield swarm


@pytest.mark.long
def test_a_run_is_paused_goes_on_ends_early_and_is_loaded_by_a_late_joiner(swarm: LocalSwarm) -> None:
    anchor, ada, bob = swarm.anchor(), swarm.join("ada", "--set", "archive=true"), swarm.join("bob")
    for name in ("anchor", "ada", "bob"):
        swarm.wait_step(name, 5)

    swarm.operate("run", "pause", "short-lived", "--reason", "the disk is full")
    status = wait_for("a paused run", lambda: (now := swarm.status())["phase"] == "paused" and now)
    assert status["reason"] == PAUSED
    for name in ("ada", "bob"):
        swarm.wait_step(name, status["step"])
        wait_for(
            f"word of it at {name}", lambda name=name: [e for e in swarm.events(name, "waiting") if PAUSED in e["why"]]
        )
    swarm.processes["coordinator"].kill()
    swarm.serve(swarm.serving["port"])
    again = wait_for("both peers", lambda: len(_ready(now := swarm.status())) == 2 and now)
    assert (again["phase"], again["reason"], again["step"]) == ("paused", PAUSED, status["step"])
    swarm.operate("run", "resume", "short-lived")
    for name in ("ada", "bob"):
        swarm.wait_step(name, status["step"] + 5)

    end = swarm.operate("run", "finish", "short-lived", "--reason", "good enough")["step"]
    for peer in (ada, bob):
        code, summary = peer.finish()
        assert code == 0, peer.log.read_text()[-2000:]
        assert summary["step"] == end
    over = f"the operator ended the run at step {end}: good enough"
    status = swarm.status()
    assert (status["phase"], status["reason"], status["step"], status["steps"]) == ("finished", over, end, end)
    assert status["snapshot_step"] == end, "no multiple of snapshot_every"

    late = swarm.join("cyd", "--export", str(swarm.folder / "model"))
    code, summary = late.finish()
    assert code == 0, late.log.read_text()[-2000:]
    assert (summary["step"], summary["steps_applied"]) == (end, 0), "it loaded the last state"
    assert (swarm.folder / "model" / "model.safetensors").is_file()
    [digest] = digests_by_step(swarm.steps("ada"), swarm.steps("bob"), swarm.steps("anchor"))[end]
    assert summary["state_digest"] == digest
    assert anchor.child.poll() is None, "it serves the last state on"

    code, verdict = swarm.start("verify", "node", "verify", str(swarm.folder / "ada"), "--json").finish()
    assert (code, verdict["ok"], verdict["last_step"]) == (0, True, end), verdict
    assert (verdict["ended_step"], verdict["ended_reason"]) == (end, "good enough")

    swarm.operate("run", "archive", "short-lived")
    code, _ = swarm.join("eve").finish()
    assert code == 4
    assert "its operator has archived it" in (swarm.folder / "eve.log").read_text()
    swarm.operate("run", "delete", "short-lived", "--yes")
    code, _ = swarm.join("dot").finish()
    assert code == 4
    assert "was deleted by its operator" in (swarm.folder / "dot.log").read_text()
    swarm.processes["coordinator"].kill()
    swarm.serve(swarm.serving["port"])
    code, _ = swarm.start("again", "coordinator", "run", "archive", "short-lived", "--home", swarm.home).finish()
    assert code == 2, "no such run"


def _ready(status: dict[str, object]) -> list[object]:
    return [peer for peer in status["peers"] if peer["phase"] == "ready" and not peer["anchor"]]  # type: ignore[attr-defined]
