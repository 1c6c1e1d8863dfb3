"""A peer that announces two payloads for one step: excluded with the evidence, whoever of the honest heard which first.

The offender is a real process that speaks the whole protocol; all that it does wrong is to sign a second announcement. An
honest peer that is killed in the middle of a step and comes back signs none, and stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.identity import Identity
from tests.system.local_swarm import TINY_MODEL, LocalSwarm, digests_by_step, processes_with, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

RUN = f"""
name = "two-payloads"
{TINY_MODEL}
[data]
source = "DATA"
context = 32
[clock]
steps = 100000
batch_samples = 16
min_peers = 1
[overlay]
bootstrap = [BOOTSTRAP]
"""
REFUSED = 4
LIES_FROM = 6


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    text = tmp_path / "text.txt"
    text.write_bytes(Path(os.__file__).read_bytes())
    swarm = LocalSwarm(tmp_path, RUN.replace("DATA", str(text)))
    try:
        yield swarm
    finally:
        swarm.close()
    assert processes_with(str(tmp_path)) == [], "something was left running"


@pytest.mark.parametrize("honest", [2, 5])
def test_the_offender_is_excluded_and_everybody_else_goes_on(swarm: LocalSwarm, honest: int) -> None:
    names = ["ada", "bob", "cyd", "dan", "eve"][:honest]
    for name in names:
        swarm.join(name, *(("--archive",) if name == "ada" else ()))
    for name in names:
        swarm.wait_step(name, 2)
    command = ("tests.system.two_faced_peer", swarm.link, str(swarm.folder / "mallory"))
    mallory = swarm.start("mallory", *command, str(LIES_FROM))
    code, _ = mallory.finish(90)
    words = mallory.log.read_text()
    assert code == REFUSED, words[-3000:]
    assert "two payloads announced for step" in words
    guilty = Identity.load_or_create(swarm.folder / "mallory" / "identity.key")

    swarm.processes["bob"].kill()  # comes back within the step, or not: it announces nothing else than before
    swarm.join("bob")
    at = max(swarm.last_step(name) for name in names)
    for name in names:
        swarm.wait_step(name, at + 5)
    different = [step for step, digests in digests_by_step(*map(swarm.steps, names)).items() if len(digests) > 1]
    assert not different, f"replicas differ after steps {different[:5]}"

    status = swarm.status()
    assert [(x["id"], x["proven"]) for x in status["exclusions"]] == [(guilty.peer_id, True)]
    standings = {peer["id"]: peer["standing"] for peer in status["peers"]}
    assert standings.pop(guilty.peer_id) == "excluded"
    assert set(standings.values()) == {"counted"}
    assert len(standings) == honest

    code, _ = swarm.start("again", *command, str(LIES_FROM)).finish(60)
    assert code == REFUSED, "refused at its next join"
    check_the_log(swarm, guilty, status["exclusions"][0]["step"])


def check_the_log(swarm: LocalSwarm, guilty: Identity, step: int) -> None:
    """From the log alone, the coordinator's and the archive's: who, when, why; and the evidence holds."""
    archive = str(swarm.folder / "ada")
    wait_for("step of the exclusion in the archive", lambda: swarm.last_step("ada") > step)
    for n, source in enumerate((swarm.link, archive)):
        _, ledger = swarm.start(f"ledger-{n}", "node", "ledger", source, "--json").finish()
        [excluded] = ledger["exclusions"]
        assert (excluded["id"], excluded["step"], excluded["proven"]) == (guilty.peer_id, step, True)
        assert len(set(excluded["payloads"])) == 2
        assert "two payloads" in excluded["reason"]
        [account] = [line for line in ledger["identities"] if line["id"] == guilty.peer_id]
        assert account["last_step"] < step, "not even the votes of the open step count"
    code, verdict = swarm.start("verify", "node", "verify", archive, "--json").finish()
    assert code == 0, verdict
    assert (verdict["exclusions"], verdict["exclusions_proven"]) == (1, 1)
