"""A real anchor copies snapshots to a folder, and a joiner takes them from a web server of that folder when all are gone."""

import os
from pathlib import Path

import pytest

from tests.system.local_swarm import PATIENT, TINY_MODEL, LocalSwarm, digests_by_step, toml_of_run, wait_for
from tests.system.web_folder import WebFolder

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "mirrored",
    TINY_MODEL,
    source=os.__file__,
    clock={"steps": 20, "batch_samples": 16, "min_peers": 2, "snapshot_every": 5} | PATIENT,
    snapshots={"mirrors": ["http://127.0.0.1:1/away", "MIRROR"]},
    evaluation={"every": 10, "samples": 4},
)


@pytest.mark.long
def test_a_joiner_gets_the_model_from_a_mirror_when_all_are_gone(tmp_path: Path) -> None:
    mirror = WebFolder(tmp_path / "mirror")
    with LocalSwarm(tmp_path, RUN.replace("MIRROR", mirror.url), "--anchor") as swarm:
        anchor = swarm.anchor(flags=("--mirror", str(mirror.folder)))
        peers = [swarm.join("ada"), swarm.join("bob")]
        for peer in peers:
            assert peer.finish()[0] == 0
        last = wait_for("the copy of the last state", lambda: list(mirror.folder.glob(f"*/{20:012d}-*.manifest")))
        wait_for(
            "its held-out loss", lambda: [it for it in swarm.events("anchor", "held-out loss") if it["step"] == 20]
        )
        anchor.interrupt()
        anchor.finish()
        kept = {path.name[:12] for path in last[0].parent.iterdir()}
        assert kept == {f"{step:012d}" for step in (15, 20)}, "the newest two"

        late = swarm.join("late", "--export", str(tmp_path / "model"))
        code, values = late.finish()
        assert code == 0, late.log.read_text()[-2000:]
        assert swarm.events("late", "the run is finished: loading its last state")
        [came] = swarm.events("late", "mirror: bytes came from there")
        assert came["bytes"] > 0
        assert swarm.events("late", "mirror: a failure")[0]["mirror"] == "http://127.0.0.1:1/away"
        assert (tmp_path / "model" / "model.safetensors").exists()
        told = digests_by_step(*(swarm.steps(name) for name in ("ada", "bob", "anchor")))
        assert values["step"] == 20
        assert all(len(digests) == 1 for digests in told.values())
        assert {values["state_digest"]} == told[20]
        mirror.close()
