"""A run with `method = "paper"` in real processes: peers of different k stay equal, learn, and can be joined."""

from pathlib import Path

import pytest

from tests.system.local_swarm import LocalSwarm, digests_by_step, processes_with, wait_for
from tests.system.test_methods import RUN

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@pytest.mark.nightly
def test_peers_of_different_k_stay_equal_and_a_late_one_joins(tmp_path: Path) -> None:
    settings = '[optimizer]\nwarmup_steps = 3\nmethod = "paper"\nchunk = 32\ntop_k = 16\nbeta = 0.95\n'
    with LocalSwarm(tmp_path, RUN + settings) as swarm:
        swarm.join("ada")
        swarm.join("bob", "--set", "vote_size=64")
        swarm.wait_step("ada", 20)
        swarm.join("cyd", "--set", "vote_size=25%")
        wait_for("vote of cyd", lambda: any(line["accepted"] for line in swarm.steps("cyd")))
        assert swarm.steps("cyd")[0]["step"] > 15, "it started from the initial state, not from an agreed snapshot"
        upto = swarm.last_step("cyd") + 5
        for name in ("ada", "bob", "cyd"):
            swarm.wait_step(name, upto)
        every = digests_by_step(*(swarm.steps(name) for name in ("ada", "bob", "cyd")))
        assert all(len(digests) == 1 for digests in every.values()), "replicas differ"
        losses = [line["loss"] for line in swarm.steps("ada")]
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
        for name in ("ada", "bob", "cyd"):
            swarm.processes[name].interrupt()
            code, summary = swarm.processes[name].finish(30)
            assert (code, summary["resyncs"]) == (130, 0)
    assert processes_with(str(tmp_path)) == [], "something was left running"
