"""The life of a run over its real processes: paused over a kill of the coordinator, ended early, loaded by a late joiner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.local_swarm import PLAIN_MODEL, LocalSwarm, digests_by_step, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

RUN = f"""
name = "short-lived"
{PLAIN_MODEL}
[data]
source = "{os.__file__}"
context = 32
[clock]
steps = 100000
batch_samples = 16
min_peers = 2
snapshot_every = 1000
deadline_ms_min = 1000
deadline_ms_max = 20000
[overlay]
bootstrap = [BOOTSTRAP]
"""
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
        code, summary = peer.finish(60)
        assert code == 0, peer.log.read_text()[-2000:]
        assert summary["step"] == end
    over = f"the operator ended the run at step {end}: good enough"
    status = swarm.status()
    assert (status["phase"], status["reason"], status["step"], status["steps"]) == ("finished", over, end, end)
    assert status["snapshot"]["step"] == end, "no multiple of snapshot_every"

    late = swarm.join("cyd", "--export", str(swarm.folder / "model"))
    code, summary = late.finish(90)
    assert code == 0, late.log.read_text()[-2000:]
    assert (summary["step"], summary["steps_applied"]) == (end, 0), "it loaded the last state"
    assert (swarm.folder / "model" / "model.safetensors").is_file()
    [digest] = digests_by_step(swarm.steps("ada"), swarm.steps("bob"), swarm.steps("anchor"))[end]
    assert summary["digest"] == digest
    assert anchor.child.poll() is None, "it serves the last state on"

    code, verdict = swarm.start("verify", "node", "verify", str(swarm.folder / "ada"), "--json").finish()
    assert (code, verdict["ok"], verdict["last_step"]) == (0, True, end), verdict
    assert (verdict["ended_step"], verdict["ended_reason"]) == (end, "good enough")

    swarm.operate("run", "archive", "short-lived")
    code, _ = swarm.join("eve").finish(60)
    assert code == 4
    assert "its operator has archived it" in (swarm.folder / "eve.log").read_text()
    swarm.operate("run", "delete", "short-lived", "--yes")
    code, _ = swarm.join("dot").finish(60)
    assert code == 4
    assert "was deleted by its operator" in (swarm.folder / "dot.log").read_text()
    swarm.processes["coordinator"].kill()
    swarm.serve(swarm.serving["port"])
    code, _ = swarm.start("again", "coordinator", "run", "archive", "short-lived", "--home", swarm.home).finish()
    assert code == 2, "no such run"


@pytest.mark.nightly
def test_changed_settings_reach_peers_late_joiners_archives_and_forks(tmp_path: Path) -> None:
    """The run also has held-out losses, which the peers that store a state report."""
    run = RUN.replace("snapshot_every = 1000", "snapshot_every = 5") + "[evaluation]\nevery = 10\nsamples = 8\n"
    with LocalSwarm(tmp_path, run) as swarm:
        ada, bob = swarm.join("ada", "--set", "archive=true"), swarm.join("bob")
        swarm.wait_step("ada", 5)
        at = _paused(swarm)
        changes = ("clock.snapshot_every=10", "clock.batch_samples=24", "optimizer.lr=0.004")
        done = swarm.operate("run", "change", "short-lived", *changes)
        assert {row["from_step"] for row in done["changed"]} == {at + 1}
        swarm.processes["coordinator"].kill()
        swarm.serve(swarm.serving["port"])
        swarm.operate("run", "resume", "short-lived")
        swarm.wait_step("ada", at + 12)
        then = _paused(swarm)  # a joiner loads a state after the change, and may replay no entry
        late = swarm.join("cyd")
        wait_for("the late joiner", lambda: len(_ready(swarm.status())) == 3)
        assert swarm.join("eve", "--data", "/nowhere").finish(60)[0] == 2
        [failure] = swarm.operate("run", "show", "short-lived")["failures"]
        assert (failure["reason"], failure["count"]) == ("data", 1)
        last = then + 20
        assert swarm.operate("run", "change", "short-lived", f"clock.steps={last}")["steps"] == last
        swarm.operate("run", "resume", "short-lived")
        for peer in (ada, bob, late):
            code, summary = peer.finish(120)
            assert code == 0, peer.log.read_text()[-2000:]
            assert summary["step"] == last
        same = digests_by_step(swarm.steps("ada"), swarm.steps("bob"), swarm.steps("cyd"))
        assert all(len(found) == 1 for found in same.values())
        status = swarm.status()
        assert (status["phase"], status["steps"], status["snapshot"]["step"]) == ("finished", last, last)
        held_out = status["held_out"][-1]
        assert (held_out["step"], held_out["agrees"]) == (last, True)
        assert 0 < held_out["loss"] < 6
        assert held_out["peers"] >= 2, "drawn peers that store the state of the last step"
        assert {row["key"]: row["value"] for row in status["changed"]}["clock.batch_samples"] == 24
        code, verdict = swarm.start("verify", "node", "verify", str(swarm.folder / "ada"), "--json").finish()
        assert (code, verdict["ok"], verdict["last_step"]) == (0, True, last), verdict
        first = {"step": at + 1, "clock.snapshot_every": 10, "clock.batch_samples": 24, "optimizer.lr": 0.004}
        assert verdict["changes"] == [first, {"step": then + 1, "clock.steps": last}]
        fork = swarm.operate("run", "fork", "short-lived", "--name", "after")
        shown = {row["key"]: row["value"] for row in swarm.operate("run", "show", fork["run"])["settings"]}
        assert (shown["optimizer.lr"], shown["clock.snapshot_every"]) == (0.004, 10)


@pytest.mark.nightly
def test_a_decay_by_hand_reaches_every_replica_and_ends_the_run(tmp_path: Path) -> None:
    run = RUN + '[optimizer]\nschedule = "wsd"\nwarmup_steps = 2\nlr = 0.01\nlr_final_ratio = 0.0\n'
    with LocalSwarm(tmp_path, run, "--no-layout") as swarm:
        peers = [swarm.join("ada"), swarm.join("bob")]
        swarm.wait_step("ada", 5)
        last = swarm.operate("run", "decay", "short-lived", "--steps", "10")["last_step"]
        for peer in peers:
            assert peer.finish(60)[0] == 0, peer.log.read_text()[-2000:]
        rates = {line["step"]: line["lr"] for line in swarm.steps("ada")}
        assert max(rates) == last
        assert rates[last - 10] == pytest.approx(0.01)
        assert [rates[step] for step in range(last - 9, last + 1)] == pytest.approx(
            [0.01 * (1 - (n / 10) ** 0.5) for n in range(1, 11)], abs=1e-9
        )
        assert all(len(found) == 1 for found in digests_by_step(swarm.steps("ada"), swarm.steps("bob")).values())
        assert swarm.status()["reason"].endswith(": its learning rate has decayed")


def _paused(swarm: LocalSwarm) -> int:
    """Pause the run; its newest step."""
    swarm.operate("run", "pause", "short-lived")
    step: int = wait_for("a paused run", lambda: (now := swarm.status())["phase"] == "paused" and now)["step"]
    return step


def _ready(status: dict[str, object]) -> list[object]:
    return [peer for peer in status["peers"] if peer["phase"] == "ready" and not peer["anchor"]]  # type: ignore[attr-defined]
