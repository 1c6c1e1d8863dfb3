"""`swarmentum export --every` and `--push-to-hub`: the states of a run that goes on, each in a folder, the newest on a hub.

The hub is a server of the tests (tests/system/hub.py); the client is the real huggingface_hub.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.export.card import CARD, MARK
from tests.system.hub import Hub
from tests.system.local_swarm import LocalSwarm, digests_by_step, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def run_of(steps: int) -> str:
    return toml_of_run("exported", clock={"steps": steps, "batch_samples": 4, "snapshot_every": 10})


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def places(folder: Path) -> tuple[str, ...]:
    return ("--home", str(folder / "copier"), "--listen", "127.0.0.1:0", "--threads", "1", "--json")


@pytest.mark.nightly
def test_each_agreed_state_at_a_distance_and_the_last_one_are_exported(tmp_path: Path, hub: Hub) -> None:
    with LocalSwarm(tmp_path, run_of(70)) as swarm:
        folder = tmp_path / "models"
        series = ("export", swarm.link, str(folder), "--every", "20", "--keep", "2", "--push-to-hub", "ada/series")
        copier = swarm.start("copier", "node", *series, *places(tmp_path), environment=hub.environment(tmp_path))
        wait_for("the copier", lambda: swarm.events("copier", "waiting"))
        ada = swarm.join("ada")
        code, _ = copier.finish()
        assert code == 0, copier.log.read_text()[-3000:]
        assert ada.finish()[0] == 0
        exported = [line["step"] for line in swarm.events("copier", "exported")]
        assert exported[-1] == 70
        assert set(exported) <= {20, 40, 60, 70}
        assert len(exported) >= 2
        assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:09d}" for step in exported[-2:]]
        digests = digests_by_step(swarm.steps("ada"))
        for step in exported[-2:]:
            facts = json.loads((folder / f"step-{step:09d}" / MARK).read_text())
            assert (facts["steps"], {facts["state_digest"]}) == (step, digests[step])
        repo = hub.repos["ada/series"]
        said = [f"Step {step} of run {swarm.invite.run_id.hex()[:16]}" for step in exported]
        assert repo.messages[-1] == said[-1], "the last state is not there"
        assert set(repo.messages[1:]) <= set(said), "only the newest one waits while another is on its way"
        files = repo.commits[-1][1]
        assert files["model.safetensors"] == (folder / "step-000000070" / "model.safetensors").read_bytes()
        assert all(line["accepted"] for line in swarm.steps("ada")), "the copies cost the run a step"


@pytest.mark.nightly
def test_the_model_of_now_goes_to_a_hub_with_its_ledger(tmp_path: Path, hub: Hub) -> None:
    with LocalSwarm(tmp_path, run_of(100000)) as swarm:
        swarm.join("ada")
        swarm.wait_step("ada", 11)
        environment = hub.environment(tmp_path)
        taken = ("export", swarm.link, "--push-to-hub", "bob/other", *places(tmp_path))
        copier = swarm.start("refused", "node", *taken, environment=hub.environment(tmp_path, "hf_wrong"))
        assert copier.finish()[0] == 2
        assert "the hub does not take this token" in copier.log.read_text()
        assert not (tmp_path / "copier").exists(), "the peer joined before it asked the hub"
        once = ("export", swarm.link, "--push-to-hub", "ada/now", *places(tmp_path))
        copier = swarm.start("copier", "node", *once, environment=environment)
        code, told = copier.finish()
        assert code == 0, copier.log.read_text()[-3000:]
        sha, files = hub.repos["ada/now"].commits[-1]
        assert told["hub"] == f"{hub.url}/ada/now/commit/{sha}"
        assert json.loads(files[MARK])["state_digest"] == told["state_digest"]
        card = files[CARD].decode()
        assert told["state_digest"] in card
        assert "swarmentum verify ARCHIVE --model FOLDER --run " in card
        ledger = card.partition("## Who trained it")[2]
        assert "1 identities, 0 exclusions" in ledger
        assert "| 12D3KooW" in ledger.replace("`", "")


def test_a_distance_at_which_nothing_is_agreed_is_refused(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, run_of(100000)) as swarm:
        series = ("export", swarm.link, str(tmp_path / "models"), "--every", "15", *places(tmp_path))
        copier = swarm.start("copier", "node", *series)
        assert copier.finish()[0] == 2
        assert "--every 15: this run agrees on its state every 10 steps" in copier.log.read_text()
