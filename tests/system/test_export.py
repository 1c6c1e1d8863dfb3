"""`swarmentum export`: the model of a run that goes on, taken by a program that trains nothing. Real processes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.local_swarm import TINY_MODEL, LocalSwarm, digests_by_step, processes_with, toml_of_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run("copied", TINY_MODEL, source="DATA", clock={"batch_samples": 8, "min_peers": 1, "snapshot_every": 20})


@pytest.mark.long
@pytest.mark.nightly
def test_a_run_s_model_is_had_while_it_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(Path(json.__file__).read_bytes())
    with LocalSwarm(tmp_path, RUN.replace("DATA", str(text))) as swarm:
        swarm.join("ada", "--allow-data")
        swarm.wait_step("ada", 25)
        folder = tmp_path / "model"
        home = ("--home", str(tmp_path / "copier"), "--listen", "127.0.0.1:0", "--threads", "1")
        command = [sys.executable, "-m", "node", "export", swarm.link, str(folder), *home, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        told = json.loads(done.stdout.splitlines()[-1])
        swarm.wait_step("ada", told["step"] + 5)
        assert told["step"] >= 25
        assert digests_by_step(swarm.steps("ada"))[told["step"]] == {told["state_digest"]}, "it is not the run's state"
        after = [line for line in swarm.steps("ada") if line["step"] > 25]
        assert all(line["accepted"] for line in after), "the copy cost the run a step"
        assert all(line["peers"] == 1 for line in after), "the copier took part"
        card = (folder / "README.md").read_text()
        assert told["state_digest"] in card
        assert "1 peer trained this model" in card
        assert re.search(r"\| loss of the step, nats a token \| \d\.\d{4} \|", card)
        assert str(tmp_path) not in card, "the card names a folder of this machine"
        from transformers import AutoModelForCausalLM

        assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()) > 50_000
    assert processes_with(str(tmp_path)) == [], "something was left running"
