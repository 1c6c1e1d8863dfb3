"""A peer that comes to a full run waits in line, keeps its place over a restart, and is next. Real processes."""

from pathlib import Path

import pytest

from tests.system.local_swarm import LocalSwarm, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900), pytest.mark.long]

RUN = toml_of_run("full", clock={"max_peers": 2})


def place(swarm: LocalSwarm, name: str) -> int:
    """The newest place that a peer was told; 0: none yet."""
    told = swarm.events(name, "waiting in line")
    return int(told[-1]["place"]) if told else 0


@pytest.mark.nightly
def test_first_come_first_served(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, RUN) as swarm:
        swarm.join("ada")
        dan = swarm.join("dan")
        for name in ("ada", "dan"):
            swarm.wait_step(name, 1)
        bob = swarm.join("bob")
        wait_for("place of bob", lambda: place(swarm, "bob") == 1)
        swarm.join("cay")
        wait_for("place of cay", lambda: place(swarm, "cay") == 2)
        swarm.processes["coordinator"].kill()
        wait_for("patience of bob", lambda: swarm.events("bob", "coordinator away; trying again"))
        swarm.serve(port=swarm.serving["port"])
        bob.interrupt()
        assert bob.finish()[0] == 130
        swarm.join("bob")
        swarm.wait_step("dan", swarm.last_step("dan") + 2)  # members come back first: a place is kept for each
        dan.interrupt()
        assert dan.finish()[0] == 130
        swarm.wait_step("bob", swarm.last_step("ada") + 2)
        wait_for("place of cay", lambda: place(swarm, "cay") == 1)
        assert swarm.steps("cay") == [], "cay came after bob"
        status = swarm.start("status", "node", "status", swarm.link, "--json")
        assert status.finish()[1]["in_line"] == 1
