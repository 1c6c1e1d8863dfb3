"""A run that takes only peers with a ticket, with real processes: who comes second is told why, who was in comes back.

It is strict: it waits for a peer that was killed, until the operator excludes it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.identity import Identity
from tests.system.local_swarm import LocalSwarm, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "invited",
    source="DATA",
    clock={"batch_samples": 4, "snapshot_every": 20, "strict": True},
    admission={"mode": "invite"},
)


class Invited(LocalSwarm):
    """With the operator's commands."""

    def operator(self, *arguments: str, group: str = "invite") -> dict[str, Any]:
        """The last line of a command that must succeed."""
        code, said = self.start("operator", "coordinator", group, *arguments, "--home", self.home, "--json").finish()
        assert code == 0, (self.folder / "operator.log").read_text()
        return said

    def ledger(self) -> list[dict[str, Any]]:
        """Who was excluded, as the log says."""
        code, said = self.start("ledger", "node", "ledger", self.link, "--json").finish()
        assert code == 0
        found: list[dict[str, Any]] = said["exclusions"]
        return found

    def refused(self, name: str) -> str:
        """What a peer that is not admitted says before it ends, without having built a model."""
        code, _ = self.join(name).finish()
        text = (self.folder / f"{name}.log").read_text()
        assert code == 4, text
        assert not self.events(name, "model"), "it built the model first"
        return text

    def told(self, name: str, words: str) -> None:
        """The peer stops, and says why."""
        code, _ = self.processes[name].finish()
        text = (self.folder / f"{name}.log").read_text()
        assert code == 4, text
        assert f"excluded by the operator of this run: {words}" in text.splitlines()[-1]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Invited]:
    """With one peer, Ada, who has used up the only ticket."""
    with Invited(tmp_path, RUN) as swarm:
        swarm.link = swarm.operator("create", "invited", "--uses", "1", "--expires", "1h", "--label", "lab")["invite"]
        swarm.join("ada")
        swarm.wait_step("ada", 5)
        yield swarm


@pytest.mark.long
@pytest.mark.nightly
def test_one_use_for_one_peer_through_kills_of_both(swarm: Invited) -> None:
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
    assert "was revoked" in (swarm.folder / "ada.log").read_text()


@pytest.mark.nightly
def test_the_operator_excludes_a_peer_that_a_strict_run_waits_for_and_readmits_it(swarm: Invited) -> None:
    """Of two peers one is killed for good, excluded, readmitted, and excluded while it is there."""
    swarm.link = swarm.operator("create", "invited", "--label", "second")["invite"]
    swarm.join("carl")
    wait_for("votes of carl", lambda: any(line["accepted"] for line in swarm.steps("carl")))
    carl = Identity.load_or_create(swarm.folder / "carl" / "identity.key").peer_id
    swarm.processes["carl"].kill()
    at = swarm.last_step("ada")
    assert swarm.operator("exclude", "invited", carl[-8:], "--reason", "its machine is gone", group="peer")["known"]
    swarm.wait_step("ada", at + 5)  # it no longer waits

    swarm.operator("readmit", "invited", carl[-8:], group="peer")
    swarm.join("carl")
    swarm.wait_step("carl", swarm.last_step("ada") + 3)  # past the entry that excludes it
    swarm.operator("exclude", "invited", carl, "--reason", "we need its place", group="peer")
    swarm.told("carl", "we need its place")
    swarm.wait_step("ada", swarm.last_step("ada") + 3)

    first, second = swarm.ledger()
    assert first["reason"].endswith(": its machine is gone")
    assert at < first["step"] <= at + 3, "the strict step that it was missing in"
    assert first["step"] < first["readmitted_step"] < second["step"]
    for excluded in (first, second):
        assert (excluded["id"], excluded["by_operator"], excluded["verdicts"]) == (carl, True, 0)
    assert second["readmitted_step"] is None
