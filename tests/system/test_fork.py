"""A fork: a new run that begins at an agreed snapshot of another one, with the same peers and a newcomer."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.invite import Invite
from protos.start import start_of
from protos.v1 import log_pb2
from tests.system.local_swarm import PATIENT, TINY_MODEL, LocalSwarm, digests_by_step, leave, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "parent",
    source=os.__file__,
    clock={"steps": 40, "batch_samples": 16, "min_peers": 2, "snapshot_every": 20} | PATIENT,
)
LR, STEPS = 0.0005, 25
CONFIG = ", ".join(line for line in TINY_MODEL.splitlines() if "=" in line)
DIVERGES = f"""
name = "diverges"
[model]
factory = "tests.system.nan_model:make"
kwargs = {{ forwards = 24, config = {{ {CONFIG} }} }}
[data]
source = "{os.__file__}"
context = 32
[clock]
steps = 100
batch_samples = 16
snapshot_every = 5
deadline_ms_min = 1000
deadline_ms_max = 20000
[overlay]
bootstrap = [BOOTSTRAP]
"""


class AllowsCode(LocalSwarm):
    """The model is one of these tests."""

    def surroundings(self, name: str) -> dict[str, str]:
        return {"SWARMENTUM_ALLOW": "code,data"}


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, RUN, "--anchor") as swarm:
        yield swarm


@pytest.mark.long
@pytest.mark.nightly
def test_a_fork_goes_on_from_the_first_snapshot_with_another_learning_rate(swarm: LocalSwarm) -> None:
    anchor, peers = swarm.anchor(), [swarm.join("ada"), swarm.join("bob")]
    for peer in peers:
        assert peer.finish()[0] == 0
    wait_for("the anchor's last step", lambda: swarm.last_step("anchor") == 40)
    leave(anchor)
    parent = swarm.invite.run_id.hex()
    [at_20] = digests_by_step(swarm.steps("ada"), swarm.steps("bob"), swarm.steps("anchor"))[20]

    changes = (
        f"optimizer.lr={LR}",
        f"clock.steps={STEPS}",
        "clock.min_peers=3",
        "trust.check_samples=32",
        "trust.exclude_at=6",
    )
    _go_over(swarm, swarm.operate("run", "fork", parent[:16], *changes, "--from-step", "30"))
    fork = swarm.status()["fork"]
    assert (fork["run"], fork["step"]) == (parent, 20), "the newest agreed snapshot at or before step 30"

    # nobody has the state yet: a newcomer says so, and waits
    newcomer = swarm.join("cyd")
    where = f"no peer that has the starting state (step 20 of run {parent[:16]}) is online"
    wait_for("a word about it", lambda: [event for event in swarm.warnings("cyd") if where in event])
    assert newcomer.child.poll() is None
    assert swarm.status()["step"] == 0

    anchor = swarm.anchor()
    everyone = [newcomer, swarm.join("ada", "--set", "archive=true"), swarm.join("bob")]
    for peer in everyone:
        assert peer.finish()[0] == 0, peer.log.read_text()[-2000:]
    wait_for("the anchor's last step", lambda: swarm.last_step("anchor") == STEPS)
    leave(anchor)
    steps = [swarm.steps(name) for name in ("ada", "bob", "cyd", "anchor")]
    found = digests_by_step(*steps)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all(len(digests) == 1 for digests in found.values()), "replicas are equal"
    assert all(any(line["accepted"] for line in lines) for lines in steps[:3]), "the newcomer's votes count, too"
    assert max(line["lr"] for line in steps[0]) == pytest.approx(LR)
    assert steps[0][0]["lr"] < LR / 5, "the schedule begins anew, with its warm-up"

    archive = swarm.folder / "ada" / "runs" / swarm.invite.run_id.hex()[:16] / "archive"
    verdict = _verified(swarm, archive)
    assert (verdict["ok"], verdict["steps"], verdict["from_start"]) == (True, STEPS, True), verdict
    assert (verdict["fork_of"], verdict["fork_step"]) == (parent, 20)
    assert {verdict["state_digest"]} == found[STEPS]
    start = start_of(log_pb2.Genesis.FromString((archive / "genesis").read_bytes()))
    assert start.state_digest.hex() == at_20, "the fork names the state that the parent run's peers had"
    loaded = {name: swarm.events(name, "starting state loaded")[0] for name in ("ada", "bob", "cyd", "anchor")}
    assert {name: event["from_disk"] for name, event in loaded.items()} == {
        "ada": True, "bob": True, "anchor": True, "cyd": False,
    }  # fmt: skip


@pytest.mark.nightly
def test_a_run_of_nan_names_the_command_that_goes_back_and_the_command_works(tmp_path: Path) -> None:
    with AllowsCode(tmp_path, DIVERGES, "--anchor") as swarm:
        anchor, ada = swarm.anchor(), swarm.join("ada")
        pattern = r"swarmentum-coordinator (run fork [0-9a-f]{16} --from-step \d+ optimizer\.lr=\S+)"
        found = wait_for("the way back", lambda: re.search(pattern, swarm.status()["reason"]))
        diverged_at = swarm.last_step("ada")
        leave(ada, anchor)
        _go_over(swarm, swarm.operate(*found[1].split()))
        fork = swarm.status()["fork"]
        assert 0 < fork["step"] <= diverged_at
        anchor, ada = swarm.anchor(), swarm.join("ada")
        swarm.wait_step("ada", 3)
        assert all(len(digests) == 1 for digests in digests_by_step(swarm.steps("ada"), swarm.steps("anchor")).values())


def _go_over(swarm: LocalSwarm, created: dict[str, object]) -> None:
    """From now on, the swarm's commands are about this run."""
    swarm.created, swarm.link = created, str(created["invite"])
    swarm.invite = Invite.parse(swarm.link)


def _verified(swarm: LocalSwarm, archive: Path) -> dict[str, object]:
    code, values = swarm.start("verify", "node", "verify", str(archive), "--json").finish()
    assert code == 0, values
    return values
