"""A real peer on a small disk that fills up: it says so, the run goes on without it, and it is back when there is room."""

from pathlib import Path

import pytest

from tests.system.local_swarm import TINY_MODEL, LocalSwarm, digests_by_step, toml_of_run, wait_for
from tests.unit.small_disk import fill, small_disk

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "full",
    TINY_MODEL.replace("num_hidden_layers = 1", "num_hidden_layers = 3"),
    clock={"batch_samples": 8, "snapshot_every": 10, "deadline_ms_min": 1000, "deadline_ms_max": 3000},
)


@pytest.mark.parametrize(
    "anchor", [pytest.param(False, id="peer"), pytest.param(True, id="anchor", marks=pytest.mark.nightly)]
)
def test_a_peer_whose_disk_was_full_is_back(tmp_path: Path, anchor: bool) -> None:
    flags, main = (("--no-layout", "--anchor"), "stream") if anchor else (("--no-layout",), "host")
    with small_disk(tmp_path / "disk", 160 << 20) as disk:
        (tmp_path / "swarm").mkdir()
        with LocalSwarm(tmp_path / "swarm", RUN, *flags) as swarm:
            name = "anchor" if anchor else "ada"
            (swarm.folder / name).symlink_to(disk)
            swarm.join("bob", environment={"SWARMENTUM_MEMORY": "small"})  # unlike states of their own, equal replicas
            swarm.join("cid", environment={"SWARMENTUM_MEMORY": main})
            if anchor:
                swarm.anchor()
            else:
                swarm.join("ada")
            swarm.wait_step(name, 5)
            for other in (
                "bob",
                "cid",
            ):  # as the only holder of the state, a peer that leaves would keep them from joining
                swarm.wait_step(other, 5)
            filling = fill(disk)
            said = "the disk is full: this peer is out of the run, and takes part again when there is room"
            wait_for("the line about the disk", lambda: swarm.events(name, said))
            before = swarm.last_step("bob")
            swarm.wait_step("bob", before + 5)
            filling.unlink()
            wait_for("room", lambda: swarm.events(name, "the disk has room again; taking part"))
            swarm.wait_step(name, swarm.last_step("bob") + 3)
            assert len(swarm.events(name, said)) == 1
            swarm.wait_step("cid", before + 5)
            for other, memory in (("bob", "small"), ("cid", main)):
                assert f"memory {memory}" in (swarm.folder / f"{other}.log").read_text()
                assert any(line["accepted"] for line in swarm.steps(other))
            assert "Traceback" not in (swarm.folder / f"{name}.log").read_text()
            found = digests_by_step(*(swarm.steps(each) for each in ("bob", "cid", name)))
            assert all(len(digests) == 1 for digests in found.values())
