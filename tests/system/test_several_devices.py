"""A peer of two ranks in a swarm of ordinary peers: one identity, one vote, the same state after every step.

Real processes: torchrun starts the ranks, gloo on the CPU carries their collective calls.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos.identity import Identity
from protos.invite import Invite
from tests.system.local_swarm import (
    PATIENT,
    LocalSwarm,
    Process,
    digests_by_step,
    processes_with,
    toml_of_run,
    wait_for,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RANKS = 2
INSTALLED = ("--no-python", str(Path(sys.executable).with_name("swarmentum")))
Make = Callable[..., LocalSwarm]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    swarms = []

    def start(method: str, min_peers: int = 1) -> LocalSwarm:
        clock = {"batch_samples": 192, "min_peers": min_peers, "snapshot_every": 10} | PATIENT
        run = toml_of_run("ranks", source="DATA", clock=clock, evaluation={"every": 10, "samples": 4})
        swarms.append(LocalSwarm(tmp_path, f"{run}[optimizer]\nwarmup_steps = 3\n{method}"))
        return swarms[0]

    try:
        yield start
    finally:
        for swarm in swarms:
            swarm.close()
    assert processes_with(str(tmp_path)) == [], "something was left running"


def join_with_ranks(swarm: LocalSwarm, name: str, *flags: str) -> Process:
    """As `LocalSwarm.join`, by torchrun."""
    home = ("--home", str(swarm.folder / name), "--listen", "127.0.0.1:0", "--threads", "1")
    ranks = ("torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", "0", "--standalone")
    return swarm.start(name, *ranks, *INSTALLED, "join", swarm.link, *home, "--json", *flags)


def children(pid: int) -> list[int]:
    """All processes below one, the nearest first."""
    below = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*below, *(grandchild for child in below for grandchild in children(child))]


def kill_tree(process: Process) -> None:
    """kill -9 of torchrun and everything below it."""
    pids = [process.child.pid, *children(process.child.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.kill()


def equal_so_far(swarm: LocalSwarm, *names: str) -> None:
    different = {s: d for s, d in digests_by_step(*(swarm.steps(name) for name in names)).items() if len(d) > 1}
    assert not different, f"replicas differ after steps {sorted(different)[:5]}"


def votes(swarm: LocalSwarm, name: str) -> int:
    return sum(line["accepted"] for line in swarm.steps(name))


def wait_votes(swarm: LocalSwarm, name: str, more: int) -> None:
    wanted = votes(swarm, name) + more
    wait_for(f"{more} votes of {name}", lambda: votes(swarm, name) >= wanted)


@pytest.mark.long
@pytest.mark.nightly
def test_two_ranks_are_one_peer_from_a_join_to_ctrl_c(make: Make) -> None:
    swarm = make("")
    swarm.join("ada")
    swarm.wait_step("ada", 12)
    duo = join_with_ranks(swarm, "duo")
    wait_votes(swarm, "duo", 3)
    assert swarm.steps("duo")[0]["step"] > 10, "it started from the initial state, not from an agreed snapshot"
    assert len(swarm.status()["peers"]) == 2, "two ranks are not one peer"
    equal_so_far(swarm, "ada", "duo")
    [evaluated, *_] = wait_for("evaluation by two ranks", lambda: swarm.events("duo", "held-out loss"))
    at = evaluated["step"]
    [of_ada, *_] = wait_for("ada's", lambda: [it for it in swarm.events("ada", "held-out loss") if it["step"] == at])
    assert evaluated["loss"] == pytest.approx(of_ada["loss"], abs=1e-3)
    duo.interrupt()
    _, summary = duo.finish()
    assert (summary["device"], summary["resyncs"]) == ("2 x cpu", 0)
    assert processes_with(str(swarm.folder / "duo")) == []


@pytest.mark.nightly
def test_ranks_and_one_device_take_up_each_others_momentum_after_a_kill(make: Make) -> None:
    swarm = make("")
    swarm.join("ada")
    swarm.join("bob")
    join_with_ranks(swarm, "duo")
    wait_votes(swarm, "duo", 11)  # momentum is saved with each snapshot

    # the same peer on one device: it takes up what the ranks saved ...
    kill_tree(swarm.processes["duo"])
    swarm.join("duo", "--set", "micro_batch=3")
    wait_votes(swarm, "duo", 2)
    swarm.processes["duo"].interrupt()
    assert swarm.processes["duo"].finish()[0] == 130

    # ... and gives it back to them
    duo = join_with_ranks(swarm, "duo", "--set", "micro_batch=3")
    wait_votes(swarm, "duo", 2)
    assert len(swarm.events("duo", "momentum taken up again")) == 2, "a restart began with fresh momentum"
    duo.interrupt()
    _, summary = duo.finish()
    assert (summary["device"], summary["resyncs"]) == ("2 x cpu", 0)
    assert processes_with(str(swarm.folder / "duo")) == []
    equal_so_far(swarm, "ada", "bob", "duo")


METHODS = {
    "muon, overlapping": """
overlap = true
base = { name = "muon", momentum = 0.5 }
""",
    "SparseLoCo": """
lr = 0.7
selection = "topk"
top_k = 64
values = "2bit"
transform = "identity"
magnitudes = true
beta2 = 0
base = { name = "sgd", momentum = 0.5 }
local = { steps = 4, lr = 2e-3 }
""",
}


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_methods_with_more_state_on_two_ranks(make: Make, method: str) -> None:
    swarm = make(method)
    swarm.join("ada")
    swarm.join("bob")
    join_with_ranks(swarm, "duo")
    wait_votes(swarm, "duo", 11)
    kill_tree(swarm.processes["duo"])
    join_with_ranks(swarm, "duo")
    wait_votes(swarm, "duo", 2)
    assert swarm.events("duo", "momentum taken up again")
    equal_so_far(swarm, "ada", "bob", "duo")


@pytest.mark.nightly
def test_a_peer_of_two_ranks_checks_others_and_is_found_good(make: Make) -> None:
    swarm = make("group_size = 8\n[trust]\nenabled = true", min_peers=3)
    swarm.join("ada")
    join_with_ranks(swarm, "duo")
    swarm.join("bob")
    for name in ("ada", "duo", "bob"):
        wait_for(f"checks by {name}", lambda name=name: len(swarm.events(name, "checked")) >= 3)

    def good() -> list[bool]:
        peers = swarm.status()["peers"]
        return [peer["standing"] == "counted" and peer["score"] == 0 and peer["check_rate"] < 1 for peer in peers]

    wait_for("good checks of all", lambda: good() == [True] * 3)
    equal_so_far(swarm, "ada", "bob", "duo")


@pytest.mark.nightly
def test_a_rank_or_torchrun_that_dies_ends_the_peer_and_nobody_waits(make: Make) -> None:
    swarm = make("")
    swarm.join("ada")
    swarm.join("bob")
    duo = join_with_ranks(swarm, "duo")
    wait_votes(swarm, "duo", 2)
    second = next(
        p for p in children(duo.child.pid) if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{p}/environ").read_bytes()
    )
    os.kill(second, signal.SIGKILL)
    code, _ = duo.finish()
    assert code != 0
    assert "another rank of this peer died" in (swarm.folder / "duo.log").read_text()

    # torchrun itself is killed, and cannot end them
    join_with_ranks(swarm, "duo")
    wait_votes(swarm, "duo", 1)
    swarm.processes["duo"].kill()
    wait_for("end of all ranks", lambda: not processes_with(str(swarm.folder / "duo")))
    swarm.wait_step("ada", swarm.last_step("ada") + 5)


@pytest.mark.nightly
def test_a_method_for_one_device_is_refused_and_nobody_waits(make: Make) -> None:
    swarm = make('method = "paper"')
    swarm.join("ada")
    swarm.wait_step("ada", 1)
    code, _ = join_with_ranks(swarm, "duo").finish()
    assert code != 0
    assert "this peer has 2 devices" in (swarm.folder / "duo.log").read_text()
    wait_for("end of all ranks", lambda: not processes_with(str(swarm.folder / "duo")))
    swarm.wait_step("ada", swarm.last_step("ada") + 5)


def test_devices_that_are_not_a_ranks_own_are_refused(tmp_path: Path) -> None:
    coordinator = Identity.from_seed(bytes(32)).public_key
    link = Invite(bytes(32), ("127.0.0.1:1",), coordinator, bytes(32), (), "nowhere").link()
    command = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone", *INSTALLED, "join", link)
    process = Process(tmp_path / "log", *command, "--home", str(tmp_path / "duo"), "--device", "cuda:1")
    code, _ = process.finish()
    assert code != 0
    assert "each takes a device of its own" in (tmp_path / "log").read_text()
