"""A run that is paused while the coordinator that acts dies, over one PostgreSQL database."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.local_swarm import wait_for
from tests.system.postgres import Postgres, server_or_skip
from tests.system.test_failover import OTHER, PEERS, Coordinators, in_the_end_nothing_is_left

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture
def server() -> Iterator[Postgres]:
    yield from server_or_skip()


@pytest.mark.nightly
def test_a_pause_and_a_change_outlive_the_coordinator_that_acted(tmp_path: Path, server: Postgres) -> None:
    """The acting one is killed during a pause: the other keeps the pause and the changed settings. The page tells it."""
    for swarm in in_the_end_nothing_is_left(Coordinators(tmp_path, server)):
        paused_while_one_dies(swarm)


def paused_while_one_dies(swarm: Coordinators) -> None:
    web = swarm.start("web", "node", "web", swarm.link, "--listen", "127.0.0.1:0", "--json")
    page = f"{web.first_json()['url']}api/runs/{swarm.invite.run_id.hex()}"
    acting = swarm.acting()
    of_the_run(swarm, acting, "pause", "--reason", "a look at the data")
    wait_for("pause", lambda: asked(page)["phase"] == "paused")
    of_the_run(swarm, acting, "change", "clock.batch_samples=24")
    at = swarm.newest()
    swarm.processes[acting].kill()
    other = OTHER[acting]
    wait_for("take-over", lambda: swarm.words(other)[-1]["event"] == "this coordinator acts")
    told = of_the_run(swarm, other, "show")
    settings = {it["key"]: it["value"] for it in told["settings"]}
    assert (told["phase"], settings["clock.batch_samples"]) == ("paused", 24)
    assert "a look at the data" in told["reason"]
    wait_for("word of the page", lambda: [it for it in asked(page)["events"] if it["kind"] == "take-over"])
    assert swarm.newest() == at, "a step was decided during the pause"
    of_the_run(swarm, other, "resume")
    for name in PEERS:
        swarm.wait_step(name, at + 5)
    counted = [c.samples for c in swarm.entries()[-1].contributions]
    assert sum(counted) == 24
    swarm.check()


def asked(url: str) -> Any:
    """The page's answer; without one, nothing in it is as anybody waits for."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError:
        return {"phase": "", "events": []}


def of_the_run(swarm: Coordinators, home: str, command: str, *words: str) -> dict[str, Any]:
    """`swarmentum-coordinator run COMMAND`, asked of one of the two, and what it printed."""
    where = ("--home", str(swarm.folder / home), "--json")
    code, told = swarm.start("operator", "coordinator", "run", command, "failover", *words, *where).finish()
    assert code == 0, (swarm.folder / "operator.log").read_text()
    return told
