"""Continued training: a model folder becomes the state that a run begins with, over the real commands. ADR 5."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.system.local_swarm import TINY_MODEL, LocalSwarm, toml_of_run
from tests.unit.node.test_start_from import TINY

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

CLOCK = {"steps": 3, "batch_samples": 8, "min_peers": 2}
RUN = "seed = 5\n" + toml_of_run("continued", TINY_MODEL, source=os.__file__, clock=CLOCK)


@pytest.mark.nightly
def test_a_run_begins_with_the_weights_of_a_model_on_every_peer(tmp_path: Path) -> None:
    torch.manual_seed(77)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    model.save_pretrained(tmp_path / "model")
    toml, start = tmp_path / "before.toml", tmp_path / "start.json"
    toml.write_text(RUN.replace("[BOOTSTRAP]", "[]"))
    command = [sys.executable, "-m", "node", "start-from", str(toml), str(tmp_path / "model")]
    places = ["--home", str(tmp_path / "ada"), "--out", str(start), "--json"]
    done = subprocess.run([*command, *places], capture_output=True, text=True, timeout=300, check=True)
    made = json.loads(done.stdout.splitlines()[-1])
    with LocalSwarm(tmp_path, RUN, "--from", str(start)) as swarm:
        assert swarm.created["fork"] == {"run": made["model"], "step": 1, "root": made["root"], "model": True}
        exported = tmp_path / "exported"
        ada, bob = swarm.join("ada", "--set", "archive=true"), swarm.join("bob", "--export", str(exported))
        for peer in (ada, bob):
            code, _ = peer.finish()
            assert code == 0, peer.log.read_text()[-2000:]
        code, verdict = swarm.start("verify", "node", "verify", str(swarm.folder / "ada"), "--json").finish()
        assert (code, verdict["ok"], verdict["fork_of"]) == (0, True, made["model"]), verdict
    before, after = load_file(tmp_path / "model" / "model.safetensors"), load_file(exported / "model.safetensors")
    furthest = max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())
    assert 0 < furthest < 0.02, "bob has no copy of the model: three steps away from its weights"
