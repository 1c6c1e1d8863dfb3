"""A run whose text stays with each peer: peers with other texts train one model, and a peer without text does not join."""

import json
from pathlib import Path

import pytest

from tests.system.local_swarm import PATIENT, LocalSwarm, digests_by_step, toml_of_run

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 12
RUN = toml_of_run(
    "own text", source="own", clock={"steps": STEPS, "batch_samples": 8, "min_peers": 2, "snapshot_every": 6} | PATIENT
)


def test_peers_with_other_texts_train_one_model(tmp_path: Path) -> None:
    texts = {"ada": Path(json.__file__).read_text(), "ben": "a page of a diary\n" * 500}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    with LocalSwarm(tmp_path, RUN) as swarm:
        nobody = swarm.join("cid")  # also with allow_data, which these tests set
        for name in texts:
            swarm.join(name, "--data", str(tmp_path / f"{name}.txt"))
        code, _ = nobody.finish()
        assert code == 2
        assert "each peer brings its own" in nobody.log.read_text()
        for name in texts:
            code, summary = swarm.processes[name].finish()
            assert (code, summary["step"]) == (0, STEPS)
        assert all(len(found) == 1 for found in digests_by_step(swarm.steps("ada"), swarm.steps("ben")).values())
        assert all(sum(line["accepted"] for line in swarm.steps(name)) > STEPS // 2 for name in texts)
