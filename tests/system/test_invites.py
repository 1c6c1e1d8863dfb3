"""A run that takes only peers with a ticket, with real processes: who comes second is told why, who was in comes back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.system.local_swarm import TINY_MODEL, LocalSwarm

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

RUN = f"""
name = "invited"
{TINY_MODEL}
[data]
source = "DATA"
context = 32
[clock]
steps = 100000
batch_samples = 4
snapshot_every = 20
[admission]
mode = "invite"
[overlay]
bootstrap = [BOOTSTRAP]
"""


class Invited(LocalSwarm):
    """With the operator's commands."""

    def operator(self, *arguments: str) -> dict[str, Any]:
        """The last line of a command that must succeed."""
        code, said = self.start("operator", "coordinator", "invite", *arguments, "--home", self.home, "--json").finish()
        assert code == 0, (self.folder / "operator.log").read_text()
        return said

    def refused(self, name: str) -> str:
        """What a peer that is not admitted says before it ends, without having built a model."""
        code, _ = self.join(name).finish()
        text = (self.folder / f"{name}.log").read_text()
        assert code == 4, text
        assert not self.events(name, "model"), "it built the model first"
        return text


def test_one_use_for_one_peer_through_kills_of_both(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(Path(os.__file__).read_bytes())
    swarm = Invited(tmp_path, RUN.replace("DATA", str(text)))
    try:
        swarm.link = swarm.operator("create", "invited", "--uses", "1", "--expires", "1h", "--label", "lab")["invite"]
        swarm.join("ada")
        swarm.wait_step("ada", 5)
        assert "was used by 1 of 1 peers; ask the run's operator for another" in swarm.refused("bob")

        for name in ("ada", "coordinator"):
            swarm.processes[name].kill()
        swarm.serve(port=swarm.serving["port"])
        at = swarm.last_step("ada")
        swarm.join("ada")
        swarm.wait_step("ada", at + 5)
        listed = swarm.operator("list", "invited")
        assert (listed["label"], listed["state"], listed["uses_left"]) == ("lab", "used up", 0)

        assert len(swarm.operator("revoke", "invited", "lab", "--and-its-peers")["removed"]) == 1
        code, _ = swarm.processes["ada"].finish()
        assert code == 4
        assert "was revoked" in (tmp_path / "ada.log").read_text()
    finally:
        swarm.close()
