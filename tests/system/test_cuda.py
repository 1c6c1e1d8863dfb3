"""Peers on a card and on a processor in one swarm, in each mode of memory. Skips where there is no CUDA device."""

from pathlib import Path

import pytest
import torch

from tests.system.local_swarm import PATIENT, TINY_MODEL, LocalSwarm, digests_by_step, owner, toml_of_run, wait_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

MODEL = TINY_MODEL.replace("hidden_size = 64", "hidden_size = 256").replace(
    "intermediate_size = 128", "intermediate_size = 700"
)
PEERS = {
    "full": {"SWARMENTUM_DEVICE": "cuda", "SWARMENTUM_MEMORY": "full"},
    "small": {"SWARMENTUM_DEVICE": "cuda", "SWARMENTUM_MEMORY": "small", "SWARMENTUM_GPU_MEMORY": "0.2"},
    "host": {"SWARMENTUM_DEVICE": "cuda", "SWARMENTUM_MEMORY": "host"},
    "stream": {"SWARMENTUM_DEVICE": "cuda", "SWARMENTUM_MEMORY": "stream"},
    "kernels": {"SWARMENTUM_DEVICE": "cuda", "SWARMENTUM_OPTIM_BACKEND": "triton"},
    "cpu": {"SWARMENTUM_DEVICE": "cpu"},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "optimizer", [{}, {"selection": "random", "one_in": 16, "cap": 7}], ids=["groups", "shared places"]
)
def test_cards_and_processors_train_one_model(tmp_path: Path, optimizer: dict[str, object]) -> None:
    clock = {"min_peers": len(PEERS), "batch_samples": 10, "snapshot_every": 4, **PATIENT}
    run = toml_of_run("cards", MODEL, source="DATA", clock=clock, optimizer=optimizer)
    with LocalSwarm(tmp_path, run) as swarm:
        for name, environment in PEERS.items():
            swarm.join(name, environment=environment)
        for name in PEERS:
            swarm.wait_step(name, 10, 150)
        for name in PEERS:
            found = owner(swarm, name, "me")
            assert found, name
        swarm.processes["small"].kill()
        swarm.join("small", environment=PEERS["small"])
        wait_for(
            "small again",
            lambda: swarm.last_step("small") >= swarm.last_step("cpu") - 1 and swarm.last_step("cpu") > 14,
        )
        swarm.join("late", environment=PEERS["full"])
        wait_for("a late card", lambda: swarm.last_step("late") >= 16)
        digests = digests_by_step(*(swarm.steps(name) for name in (*PEERS, "late")))
    assert all(len(found) == 1 for found in digests.values()), digests
    assert len(digests) >= 16
