"""The owner of a peer steers it from another terminal: pause, resume, finish, leave; the others lose no step."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.local_swarm import LocalSwarm, digests_by_step, owner, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
PEERS = ("ada", "bob", "eve")
RUN = toml_of_run("owners", source="DATA", clock={"batch_samples": 6, "min_peers": 2, "snapshot_every": 50})


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, RUN) as swarm:
        yield swarm


@pytest.mark.nightly
def test_a_paused_peer_costs_the_others_no_step_and_comes_back(swarm: LocalSwarm) -> None:
    for name in PEERS:
        swarm.join(name)
    for name in PEERS:
        swarm.wait_step(name, 5)
    told = owner(swarm, "eve", "me", "--steps", "100")
    assert {"accepted"} & {fate["outcome"] for fate in told["last"]}
    assert told["votes_accepted"] > 0
    own = sum(fate["samples"] for fate in told["last"] if fate["outcome"] == "accepted")
    assert told["share"] == pytest.approx(own / sum(fate["all_samples"] for fate in told["last"]))
    assert 0.0 < told["share"] < 1.0

    owner(swarm, "eve", "pause")
    wait_for("pause of eve", lambda: swarm.events("eve", "paused"))
    paused_at = swarm.last_step("eve") + 2  # the step that was open may still have its votes
    swarm.wait_step("ada", paused_at + 20)
    swarm.wait_step("eve", paused_at + 20)
    alone = [line for line in swarm.steps("ada") if paused_at < line["step"] <= paused_at + 20]
    assert {line["peers"] for line in alone} == {2}, "it votes though it is paused, or the others do not"
    told = owner(swarm, "eve", "me")
    assert told["paused"]
    assert told["last"][0]["outcome"] == "paused"
    peer = next(peer for peer in swarm.status()["peers"] if peer["id"] == told["id"])
    assert peer["paused"]

    owner(swarm, "eve", "resume")
    back = wait_for(
        "votes of eve", lambda: [s for s in swarm.steps("eve") if s["step"] > paused_at + 20 and s["accepted"]]
    )
    assert back
    owner(swarm, "eve", "pause", "--for", "2s")
    wait_for("the end of the second pause", lambda: len(swarm.events("eve", "goes on")) >= 2)
    wait_for("votes of eve", lambda: swarm.steps("eve")[-1]["accepted"])

    owner(swarm, "eve", "finish")
    code, summary = swarm.processes["eve"].finish()
    assert code == 0
    assert summary["votes_accepted"] > told["votes_accepted"]
    at = swarm.last_step("ada")
    swarm.wait_step("ada", at + 5)
    owner(swarm, "bob", "leave")
    assert swarm.processes["bob"].finish()[0] == 0
    digests = digests_by_step(*(swarm.steps(name) for name in PEERS))
    assert all(len(found) == 1 for found in digests.values())


@pytest.mark.long
@pytest.mark.nightly
def test_a_daemon_that_is_killed_starts_again_and_the_peer_votes_on(swarm: LocalSwarm) -> None:
    for name in PEERS:
        swarm.join(name, "--owner", "one person")
    for name in PEERS:
        swarm.wait_step(name, 5)
    died = "the libp2p daemon died; starting it again"
    for number in (1, 2):
        below = psutil.Process(swarm.processes["eve"].child.pid).children(recursive=True)
        [p2pd] = [it for it in below if "p2pd" in it.name()]
        p2pd.kill()
        wait_for("restarts", lambda number=number: len(swarm.events("eve", died)) >= number)
        swarm.wait_step("ada", swarm.last_step("ada") + 5)
    at = swarm.last_step("ada")
    accepted = wait_for("votes of eve", lambda: [s for s in swarm.steps("eve") if s["step"] > at + 5 and s["accepted"]])
    assert accepted
    [group] = swarm.status()["owners"]
    assert (group["name"], len(group["peers"])) == ("one person", 3)
    owner(swarm, "eve", "set", "owner", "Eve")
    wait_for("another name", lambda: len(swarm.status()["owners"]) == 2)
    digests = digests_by_step(*(swarm.steps(name) for name in PEERS))
    assert all(len(found) == 1 for found in digests.values())


def test_without_a_peer_the_command_says_what_to_do(swarm: LocalSwarm) -> None:
    process = swarm.start("nobody", "node", "pause", "--home", str(swarm.folder / "nobody"))
    code, _ = process.finish()
    assert code == 3
    assert "no peer runs with the home" in process.log.read_text()
