"""A peer that announces two payloads for one step: excluded with the evidence, whoever of the honest heard which first.

The offender is a real process that speaks the whole protocol; all that it does wrong is to sign a second announcement. An
honest peer that is killed in the middle of a step and comes back signs none, and stays.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.archive import ledger
from node.archive.verify import verify
from node.commands.status import status
from node.link.client import CoordinatorClient
from protos.errors import RefusedError
from protos.identity import Identity
from protos.v1 import coordinator_pb2 as pb
from tests.system.local_swarm import LocalSwarm, digests_by_step, processes_with, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "two-payloads",
    source="DATA",
    clock={"batch_samples": 16, "min_peers": 1, "deadline_ms_min": 1000, "deadline_ms_max": 5000},
)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, RUN) as swarm:
        yield swarm
    assert processes_with(str(tmp_path)) == [], "something was left running"


@pytest.mark.parametrize("honest", [2, pytest.param(5, marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_the_offender_is_excluded_and_everybody_else_goes_on(swarm: LocalSwarm, honest: int) -> None:
    names = ["ada", "bob", "cyd", "dan", "eve"][:honest]
    for name in names:
        swarm.join(name, *(("--set", "archive=true") if name == "ada" else ()))
    for name in names:
        swarm.wait_step(name, 2)
    home = swarm.folder / "mallory"
    mallory = swarm.start("mallory", "tests.system.two_faced_peer", swarm.link, str(home))
    code, _ = mallory.finish()
    words = mallory.log.read_text()
    assert code == RefusedError.exit_code, words[-3000:]
    assert "two payloads announced for step" in words
    guilty = Identity.load_or_create(home / "identity.key")

    swarm.processes["bob"].kill()  # comes back within the step, or not: it announces nothing else than before
    swarm.join("bob")
    wait_for(
        "bob among the peers", lambda: len([p for p in status(swarm.link)["peers"] if p["phase"] == "ready"]) == honest
    )
    at = max(swarm.last_step(name) for name in names)
    for name in names:
        swarm.wait_step(name, at + 5)
    different = [step for step, digests in digests_by_step(*map(swarm.steps, names)).items() if len(digests) > 1]
    assert not different, f"replicas differ after steps {different[:5]}"

    facts = status(swarm.link)
    assert [(x["id"], x["proven"]) for x in facts["exclusions"]] == [(guilty.peer_id, True)]
    standings = {peer["id"]: peer["standing"] for peer in facts["peers"]}
    assert standings.pop(guilty.peer_id) == "excluded"
    assert list(standings.values()) == ["counted"] * honest
    with pytest.raises(RefusedError, match="two payloads announced"):
        asyncio.run(join_again(swarm, guilty))
    check_the_log(swarm, guilty, facts["exclusions"][0]["step"])


async def join_again(swarm: LocalSwarm, who: Identity) -> None:
    client = CoordinatorClient(swarm.invite, who)
    try:
        await client.connect()
        await client.join(pb.JoinBody(layout_digest=bytes(32), parameters=1, device="cpu"))
    finally:
        await client.close()


def check_the_log(swarm: LocalSwarm, guilty: Identity, step: int) -> None:
    """From the log alone, the coordinator's and the archive's: who, when, why; and the evidence holds."""
    archive = swarm.folder / "ada"
    for name in ("ada", "bob"):
        swarm.processes[name].interrupt()
        assert swarm.processes[name].finish()[0] == 130
    for source in (swarm.link, str(archive)):
        found = ledger.of(source).values()
        [excluded] = found["exclusions"]
        assert (excluded["id"], excluded["step"], excluded["proven"]) == (guilty.peer_id, step, True)
        assert len(set(excluded["payloads"])) == 2
        assert "two payloads" in excluded["reason"]
        votes = [line["last_step"] for line in found["identities"] if line["id"] == guilty.peer_id]
        assert all(last < step for last in votes), "not even the votes of the open step count"
    verdict = verify(archive, None, None)
    assert verdict.ok, verdict.reason
    assert (verdict.exclusions, verdict.exclusions_proven) == (1, 1)
