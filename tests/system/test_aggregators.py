"""Real processes whose votes are added up by an anchor and peers: equal replicas, few payloads, whoever is killed or lies."""

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.identity import Identity
from tests.attack.attacks.false_sums import FalseSums
from tests.attack.base import Target
from tests.system.local_swarm import IMPATIENT, LocalSwarm, digests_by_step, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "added-up",
    source=os.__file__,
    optimizer={"selection": "random"},
    clock={"batch_samples": 16, "min_peers": 2, "snapshot_every": 10, "aggregators": 1} | IMPATIENT,
)
PEERS = ("ada", "bob", "cid", "dan", "eve", "fay")


@pytest.fixture
def swarm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, RUN.replace("aggregators = 1", f"aggregators = {request.param}"), "--anchor") as swarm:
        yield swarm


def came(swarm: LocalSwarm, name: str) -> tuple[int, float]:
    """A peer's newest step, and the bytes of payloads and sums that came to it so far."""
    [metrics] = swarm.events(name, "metrics")
    with urllib.request.urlopen(metrics["url"], timeout=240) as answer:
        [found] = re.findall(r"^swarmentum_payload_bytes_received_total (\S+)", answer.read().decode(), re.MULTILINE)
    return swarm.last_step(name), float(found)


@pytest.mark.nightly
@pytest.mark.parametrize("swarm", [1], indirect=True)
def test_the_anchor_adds_up_and_every_peer_takes_the_sum(swarm: LocalSwarm) -> None:
    anchor = swarm.anchor()
    flags = ("--set", "archive=true", "--set", "metrics_listen=127.0.0.1:0")
    peers = {name: swarm.join(name, *flags) for name in PEERS}
    wait_for("all of them in a step", lambda: any(it["peers"] == len(PEERS) for it in swarm.steps("fay")))
    first, before = came(swarm, "fay")
    swarm.wait_step("fay", first + 20)
    last, after = came(swarm, "fay")
    others = [it["payload_bytes"] * (1 - 1 / it["peers"]) for it in swarm.steps("fay") if first < it["step"] <= last]
    part = (after - before) / sum(others)
    print(f"of the bytes of the others' payloads, {part:.2f} came to one of {len(PEERS)} peers")
    assert part < 0.8, "sums of 2.4 bits a place"
    fay = peers.pop("fay")
    fay.interrupt()
    fay.finish()

    anchor.kill()
    head = swarm.last_step("ada")
    swarm.wait_step("ada", head + 10)  # every peer takes every payload
    again = swarm.anchor()
    swarm.wait_step("ada", head + 30)
    steps = [swarm.steps(name) for name in (*PEERS, "anchor")]
    assert all(len(digests) == 1 for digests in digests_by_step(*steps).values())
    for process in (*peers.values(), again):
        process.interrupt()
    for process in (*peers.values(), again):
        process.finish()
    code, values = swarm.start("verify", "node", "verify", str(swarm.folder / "ada"), "--json").finish()
    assert code == 0, json.dumps(values)
    assert 0 < values["votes_in_sums"] < values["votes"]


@pytest.mark.nightly
@pytest.mark.parametrize("swarm", [3], indirect=True)
def test_a_member_that_lies_in_sums_and_strangers_that_send_some_change_nothing(swarm: LocalSwarm) -> None:
    """The anchor's sums count, whatever others say; the archive leads to the weights that the log confirms."""
    anchor = swarm.anchor()
    names = (*PEERS, "gil")
    peers = {name: swarm.join(name, *(["--set", "archive=true"] if name == "ada" else [])) for name in names}
    liar = swarm.start("liar", "tests.system.lying_aggregator", swarm.link, str(swarm.folder / "liar"))
    wait_for("all of them in a step", lambda: any(it["peers"] == len(names) + 1 for it in swarm.steps("ada")))
    target = Target(swarm.link, swarm.folder, swarm.processes["coordinator"].child.pid)
    words = FalseSums().run(target, 20.0)
    head = swarm.last_step("ada")
    swarm.wait_step("ada", head + 10)
    print(words)
    told = "differs from the one that counts"
    wait_for("a word to the liar", lambda: any(told in json.dumps(line) for line in swarm.events("liar", "waiting")))
    steps = [swarm.steps(name) for name in (*names, "liar", "anchor")]
    assert all(len(digests) == 1 for digests in digests_by_step(*steps).values()), "the liar applies what all apply"
    for process in (*peers.values(), liar, anchor):
        process.interrupt()
    for process in (*peers.values(), liar, anchor):
        process.finish()
    code, values = swarm.start("verify", "node", "verify", str(swarm.folder / "ada"), "--json").finish()
    assert code == 0, json.dumps(values)
    assert values["votes_in_sums"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("anchored", [False, True], ids=["no anchor", "an anchor"])
def test_of_four_ranges_each_has_its_aggregators_whoever_is_killed(anchored: bool, tmp_path: Path) -> None:
    """All replicas stay equal, and the sums of slices lead to them."""
    ids = [Identity.load_or_create(tmp_path / name / "identity.key").peer_id for name in PEERS]
    settings = RUN.replace("aggregators = 1", "aggregators = 2\nranges = 4")
    settings += f'[admission]\nmode = "allow_list"\nallowed = {json.dumps(ids)}\n'
    with LocalSwarm(tmp_path, settings, *(["--anchor"] if anchored else [])) as swarm:
        names = [*PEERS, *(["anchor"] if anchored else [])]
        processes = {"anchor": swarm.anchor()} if anchored else {}
        processes |= {name: swarm.join(name, "--set", "archive=true") for name in PEERS}
        wait_for("all of them in a step", lambda: any(it["peers"] == len(PEERS) for it in swarm.steps("ada")))
        swarm.wait_step("ada", swarm.last_step("ada") + 20)
        processes.pop("dan").kill()  # in a moment when it may add up two ranges
        head = swarm.last_step("ada")
        swarm.wait_step("ada", head + 10)
        processes["dan"] = swarm.join("dan", "--set", "archive=true")
        wait_for("dan", lambda: bool(swarm.steps("dan")) and swarm.last_step("dan") > head + 10)
        swarm.wait_step("ada", swarm.last_step("ada") + 10)
        digests = digests_by_step(*map(swarm.steps, names))
        assert len(digests) > 20
        assert all(len(found) == 1 for found in digests.values())
        for process in processes.values():
            process.interrupt()
        for process in processes.values():
            process.finish()
        code, values = swarm.start("verify", "node", "verify", str(swarm.folder / "ada"), "--json").finish()
        assert code == 0, json.dumps(values)
        assert values["votes_in_sums"] > 5 * 20, "most steps have six votes in their sums"


@pytest.mark.nightly
@pytest.mark.parametrize("ranges", [1, 4])
def test_two_aggregators_that_lie_alike_stop_the_run_with_their_names(ranges: int, tmp_path: Path) -> None:
    """There is no anchor: the third of the range finds it, and most peers compute the same from the votes."""
    liars = ("liam", "lola")
    made = {name: Identity.load_or_create(tmp_path / name / "identity.key") for name in (*PEERS, *liars)}
    ids = [identity.peer_id for identity in made.values()]
    keys = [made[name].public_key.hex() for name in liars]
    settings = RUN.replace("aggregators = 1", f"aggregators = 3\nranges = {ranges}")
    settings += f'[admission]\nmode = "allow_list"\nallowed = {json.dumps(ids)}\n'
    with LocalSwarm(tmp_path, settings) as swarm:
        processes = {name: swarm.join(name) for name in PEERS}
        for name in liars:
            home = str(swarm.folder / name)
            processes[name] = swarm.start(name, "tests.system.lying_aggregator", swarm.link, home, *keys)

        def stopped() -> str:
            said = [json.dumps(line) for name in PEERS for line in swarm.events(name, "waiting")]
            return next((line for line in said if "aggregators forged a sum" in line), "")

        words = wait_for("a run that stops", stopped)
        print(words)
        assert all(made[name].peer_id[-8:] in words for name in liars)
        assert not any(made[name].peer_id[-8:] in words.split("It came from")[1] for name in PEERS)
        steps = [swarm.steps(name) for name in PEERS]
        assert all(len(digests) == 1 for digests in digests_by_step(*steps).values()), "replicas are equal all the same"
        for process in processes.values():
            process.interrupt()
        for process in processes.values():
            process.finish()
