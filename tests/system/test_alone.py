"""A swarm of one: killed in mid-run and started again, it goes on from its own disk."""

from pathlib import Path

import pytest

from tests.system.local_swarm import LocalSwarm, digests_by_step, toml_of_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run("alone", source="DATA", clock={"batch_samples": 4, "snapshot_every": 20})


def test_the_last_peer_is_killed_and_the_run_goes_on_from_its_disk(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, RUN) as swarm:
        swarm.join("ada")
        swarm.wait_step("ada", 50)
        swarm.processes["ada"].kill()
        at, before = swarm.last_step("ada"), len(swarm.steps("ada"))
        swarm.join("ada")
        swarm.wait_step("ada", at + 10)
        steps = swarm.steps("ada")
        replayed = [line["step"] for line in steps[before:] if line["step"] <= at]
        assert replayed, "it took up no log"
        assert replayed[0] > 20, "it started again from the beginning, not from its snapshot"
        assert all(len(digests) == 1 for digests in digests_by_step(steps).values()), "the replay gave other bits"
        assert not swarm.events("ada", "re-syncing")
        assert swarm.events("ada", "momentum taken up again")


@pytest.mark.long
def test_a_peer_that_ends_because_nobody_answers_keeps_its_momentum(tmp_path: Path) -> None:
    run = RUN.replace("snapshot_every = 20", "snapshot_every = 100000")
    with LocalSwarm(tmp_path, run) as swarm:
        ada = swarm.join("ada", "--set", "patience_seconds=1")
        swarm.wait_step("ada", 5)
        saved = tmp_path / "ada" / "runs" / swarm.invite.run_id.hex()[:16] / "private.pt"
        assert not saved.exists()
        swarm.processes["coordinator"].kill()
        code, _ = ada.finish()
        assert code == 3
        assert saved.exists()
        swarm.serve(port=int(swarm.serving["port"]))
        swarm.join("ada")
        swarm.wait_step("ada", swarm.last_step("ada") + 3)
        assert swarm.events("ada", "momentum taken up again")
