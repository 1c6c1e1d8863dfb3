"""Methods of the DeMo family as run settings, in real processes: equal replicas, a joiner that takes the base's state over."""

from pathlib import Path

import pytest

from tests.system.local_swarm import (
    PATIENT,
    TINY_MODEL,
    LocalSwarm,
    digests_by_step,
    processes_with,
    toml_of_run,
    wait_for,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "methods", TINY_MODEL, source="DATA", clock={"batch_samples": 24, "min_peers": 2, "snapshot_every": 15} | PATIENT
)
METHODS = {
    "top-k into AdamW": """
selection = "topk"
top_k = 32
values = "2bit"
transform = "hadamard"
base = { name = "adamw", beta1 = 0.5 }
""",
    "overlap": """
overlap = true
base = { name = "muon", momentum = 0.5 }
""",
    "random places": """
selection = "random"
one_in = 8
""",
    "places of each peer's own": """
selection = "independent"
one_in = 8
""",
    "the paper's, of three k": """
method = "paper"
chunk = 32
top_k = 16
beta = 0.95
""",
    "DiLoCo with DeMo": """
recipe = "diloco-demo"
local = { steps = 4, lr = 2e-3 }
""",
    "SparseLoCo": """
lr = 0.7
selection = "topk"
top_k = 64
values = "2bit"
transform = "identity"
magnitudes = true
beta2 = 0
base = { name = "sgd" }
local = { steps = 4, lr = 2e-3 }
""",
}


OTHER_SIZES = {METHODS["the paper's, of three k"]: (("--set", "vote_size=64"), ("--set", "vote_size=25%"))}
"""Peers of that method may send votes of sizes of their own: bob's and cyd's."""


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_replicas_stay_equal_learn_and_can_be_joined(method: str, tmp_path: Path) -> None:
    bobs, cyds = OTHER_SIZES.get(method, ((), ()))
    with LocalSwarm(tmp_path, f"{RUN}[optimizer]\nwarmup_steps = 3\n{method}") as swarm:
        swarm.join("ada")
        swarm.join("bob", *bobs)
        swarm.wait_step("ada", 20)
        swarm.join("cyd", *cyds)
        wait_for("vote of cyd", lambda: any(line["accepted"] for line in swarm.steps("cyd")))
        assert swarm.steps("cyd")[0]["step"] > 15, "it started from the initial state, not from an agreed snapshot"
        upto = swarm.last_step("cyd") + 5
        for name in ("ada", "bob", "cyd"):
            swarm.wait_step(name, upto)
        swarm.processes["bob"].kill()
        swarm.join("bob", *bobs)
        before = sum(line["accepted"] for line in swarm.steps("bob"))
        wait_for("vote of bob", lambda: sum(line["accepted"] for line in swarm.steps("bob")) > before)
        every = digests_by_step(*(swarm.steps(name) for name in ("ada", "bob", "cyd")))
        assert all(len(digests) == 1 for digests in every.values()), "replicas differ"
        losses = [line["loss"] for line in swarm.steps("ada")]
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
        for name in ("ada", "bob", "cyd"):
            swarm.processes[name].interrupt()
            code, summary = swarm.processes[name].finish()
            assert (code, summary["resyncs"]) == (130, 0)
    assert processes_with(str(tmp_path)) == [], "something was left running"
