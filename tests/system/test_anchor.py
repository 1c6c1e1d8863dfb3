"""A run with an anchor: its word counts, and a joiner that finds everybody gone starts from it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.local_swarm import IMPATIENT, TINY_MODEL, LocalSwarm, digests_by_step, leave, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "anchored",
    TINY_MODEL,
    source=os.__file__,
    clock={"batch_samples": 16, "min_peers": 2, "snapshot_every": 10} | IMPATIENT,
)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, RUN, "--anchor") as swarm:
        yield swarm


@pytest.mark.nightly
def test_a_run_with_an_anchor_lives_on_it_when_all_peers_have_left(swarm: LocalSwarm) -> None:
    assert swarm.created["layout"], "this package is installed: the layout is the genesis'"
    peers = [swarm.join("ada"), swarm.join("bob")]
    wait_for("the reason", lambda: "anchor" in swarm.status()["reason"])
    assert swarm.status()["step"] == 0, "nothing begins without the anchor's word on the initial state"

    anchor = swarm.anchor()
    swarm.wait_step("ada", 25)
    values = swarm.status()
    assert [peer["anchor"] for peer in values["peers"]].count(True) == 1
    assert values["anchored"]
    steps = [swarm.steps(name) for name in ("ada", "bob", "anchor")]
    assert all(len(digests) == 1 for digests in digests_by_step(*steps).values())
    assert not any(line["accepted"] for line in swarm.steps("anchor")), "it does not train"

    leave(*peers)
    at = swarm.last_step("anchor")
    cyd = swarm.join("cyd")
    loaded = wait_for("the snapshot", lambda: swarm.events("cyd", "loading snapshot"))
    assert loaded[0]["step"] >= 20
    wait_for("cyd to be ready", lambda: any(p["phase"] == "ready" and not p["anchor"] for p in swarm.status()["peers"]))

    # all away, the anchor too: a joiner waits for as long as its person lets it
    leave(cyd, anchor)
    swarm.join("dan")
    wait_for("a word about it", lambda: [e for e in swarm.warnings("dan") if "no peer that has the model" in e])
    assert swarm.processes["dan"].child.poll() is None
    swarm.anchor()
    swarm.join("ada")
    swarm.wait_step("dan", at + 5)
    steps = [swarm.steps(name) for name in ("ada", "bob", "cyd", "dan", "anchor")]
    assert all(len(digests) == 1 for digests in digests_by_step(*steps).values())
