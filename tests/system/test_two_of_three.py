"""A run whose operators have keys, with real peers: they follow the orders in the log, and `verify` names who signed."""

from pathlib import Path

import pytest

from protos.identity import Identity
from tests.system.local_swarm import LocalSwarm, wait_for
from tests.system.test_owner import RUN

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
ADA, BOB, CID = (Identity.from_seed(bytes([60 + n]) * 32) for n in range(3))
OPERATORS = f'[operators]\nkeys = ["{ADA.peer_id}", "{BOB.peer_id}", "{CID.peer_id}"]\n'


@pytest.mark.long
def test_an_exclusion_a_change_and_the_end_by_two_of_three_keys(tmp_path: Path) -> None:
    for name, who in (("a.key", ADA), ("b.key", BOB)):
        (tmp_path / name).write_bytes(who.to_libp2p())
    first, second = (("--key", str(tmp_path / name)) for name in ("a.key", "b.key"))
    with LocalSwarm(tmp_path, RUN + OPERATORS) as swarm:

        def ordered(*command: str) -> None:
            given = swarm.operate(*command, *first)
            assert not given["obeyed"]
            assert swarm.operate("order", "sign", swarm.link, given["order"][:10], "--yes", *second)["obeyed"]

        one = swarm.join("one", "--set", "archive=true")
        two = swarm.join("two")
        out = swarm.join("out")
        for name in ("one", "two", "out"):
            swarm.wait_step(name, 5)
        victim = Identity.load_or_create(tmp_path / "out" / "identity.key").peer_id
        ordered("peer", "exclude", swarm.link, victim, "--reason", "noise")
        assert out.finish()[0] == 4
        swarm.operate("run", "pause", swarm.created["run"])
        wait_for("the pause", lambda: swarm.status()["phase"].startswith("paused"))
        ordered("run", "change", swarm.link, "optimizer.lr=0.001")
        swarm.operate("run", "resume", swarm.created["run"])
        at = swarm.last_step("one")
        swarm.wait_step("one", at + 5)
        ordered("run", "finish", swarm.link, "--reason", "good enough")
        assert one.finish()[0] == two.finish()[0] == 0
        code, found = swarm.start("verify", "node", "verify", str(tmp_path / "one"), "--json").finish()
        assert (code, found["ok"], found["ended_reason"]) == (0, True, "good enough"), found
        assert sorted(it["what"] for it in found["orders"]) == ["change", "exclude", "finish"]
        assert all(it["signed_by"] == [ADA.peer_id, BOB.peer_id] for it in found["orders"])
