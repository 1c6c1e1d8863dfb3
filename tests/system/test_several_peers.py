"""One `join` for several devices runs a peer for each, and the owner steers all or one. Real peers, twice on the CPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.commands.join import FILE, devices_of, hold, homes_of
from node.config import PeerSettings
from protos.errors import OperatorError
from tests.system.local_swarm import LocalSwarm, digests_by_step, processes_with, wait_for
from tests.system.test_owner import RUN

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
FIRST, SECOND = "both/cpu", "both/cpu-2"


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, RUN) as made:
        yield made


def owner(swarm: LocalSwarm, command: str, *flags: str) -> list[dict[str, Any]]:
    """What an owner's command prints, a line for each peer."""
    process = swarm.start(command, "node", command, "--home", str(swarm.folder / "both"), "--json", *flags)
    out, _ = process.child.communicate(timeout=300)
    process.close()
    assert process.child.returncode == 0, process.log.read_text()
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.long
def test_two_devices_are_two_peers_with_a_switch_for_each(swarm: LocalSwarm) -> None:
    both = swarm.join("both", "--device", "cpu,cpu")
    for name in (FIRST, SECOND):
        swarm.wait_step(name, 5)
    told = owner(swarm, "me")
    assert [it["home"] for it in told] == [str(swarm.folder / name) for name in (FIRST, SECOND)]
    assert len({it["id"] for it in told}) == 2, "each has its own key"
    assert len(swarm.status()["peers"]) == 2
    swarm.join("ada")
    swarm.wait_step("ada", swarm.last_step(FIRST) + 2)
    [paused] = owner(swarm, "pause", "--device", "cpu-2")
    assert (paused["paused"], paused["home"]) == (True, str(swarm.folder / SECOND))
    assert [it["paused"] for it in owner(swarm, "me")] == [False, True]
    assert [it["paused"] for it in owner(swarm, "pause", "--device", "cpu")] == [True, True], "both are on the CPU"
    assert [it["paused"] for it in owner(swarm, "resume")] == [False, False]
    second = swarm.start("second", "node", "join", swarm.link, "--home", str(swarm.folder / "both"))
    assert second.finish()[0] == 2, "the home is in use"
    at = swarm.last_step(FIRST)
    wait_for("votes of the second", lambda: [s for s in swarm.steps(SECOND) if s["step"] > at and s["accepted"]])
    owner(swarm, "leave", "--device", "cpu-2")
    wait_for("the end of the second", lambda: not processes_with(f"home={swarm.folder / SECOND}"))
    swarm.wait_step(FIRST, swarm.last_step(FIRST) + 3)
    assert both.child.poll() is None, "the other goes on"
    both.interrupt()
    assert both.finish()[0] == 130
    assert not (swarm.folder / "both" / FILE).exists()
    digests = digests_by_step(*(swarm.steps(name) for name in (FIRST, SECOND, "ada")))
    assert all(len(found) == 1 for found in digests.values())


def test_what_is_refused(tmp_path: Path) -> None:
    assert homes_of(tmp_path) == [tmp_path]
    with pytest.raises(OperatorError, match="no `join` for several devices runs"):
        homes_of(tmp_path, "cuda:1")
    with hold(tmp_path / FILE, {"cuda-0": "cuda:0", "cuda-1": "cuda:1"}):
        assert homes_of(tmp_path, "cuda:1") == homes_of(tmp_path, "cuda-1") == [tmp_path / "cuda-1"]
        assert len(homes_of(tmp_path)) == 2
        with pytest.raises(OperatorError, match="there are cuda-0, cuda-1"):
            homes_of(tmp_path, "cuda:7")
        (tmp_path / FILE).write_text("[]")
        with pytest.raises(OperatorError, match="cannot be read"):
            homes_of(tmp_path)
    assert homes_of(tmp_path) == [tmp_path], "its process was killed and left the file"
    with pytest.raises(OperatorError, match="names no device"):
        devices_of(PeerSettings(home=tmp_path, device=" , "))
