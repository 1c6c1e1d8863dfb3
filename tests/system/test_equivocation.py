"""A coordinator that signs two logs of one run: all peers notice, stop, say so, and keep what proves it.

What an operator may really do: a coordinator is started from an old copy of the home folder, while the first still serves.
Half of the swarm follows one, half the other.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protos.log import SignedEntry, open_entry
from tests.system.local_swarm import LocalSwarm, processes_with, toml_of_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

HALVES = {"coordinator": ("ada", "bob"), "other": ("cyd", "dan")}
DIVERGED = 5
RUN = toml_of_run("two-logs", source="DATA", relay=True, clock={"batch_samples": 16, "min_peers": 2})


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, RUN) as swarm:
        yield swarm
    assert processes_with(str(tmp_path)) == [], "something was left running"


@pytest.mark.long
def test_both_halves_stop_with_the_evidence(swarm: LocalSwarm) -> None:
    first = swarm.processes["coordinator"]
    first.interrupt()
    assert first.finish()[0] == 0
    shutil.copytree(swarm.home, swarm.folder / "other")
    swarm.serve(swarm.serving["port"])
    for name in HALVES["coordinator"]:
        swarm.join(name)
    for name in HALVES["coordinator"]:
        swarm.wait_step(name, 5)
    other = swarm.start("other", "coordinator", "serve", "--home", str(swarm.folder / "other"),
                        "--listen", "127.0.0.1:0", "--json").first_json()  # fmt: skip
    swarm.link = replace(swarm.invite, coordinators=(f"127.0.0.1:{other['port']}",)).link()
    for name in HALVES["other"]:
        swarm.join(name)
    for name in (name for names in HALVES.values() for name in names):
        process = swarm.processes[name]
        code, _ = process.finish()
        words = process.log.read_text()
        assert code == DIVERGED, words[-3000:]
        folder = swarm.folder / name / "runs" / swarm.invite.run_id.hex()[:16]
        [path] = folder.glob("equivocation-*.json")
        assert str(path) in words
        assert "two coordinators with one key" in words
        told, heard = evidence(swarm, path)
        print(
            f"\n{name}: at step {swarm.last_step(name)} it held entry {told.entry.step}, and heard {heard.entry.step}"
        )
        if told.entry.step == heard.entry.step:
            assert told.hash != heard.hash
        else:
            assert heard.entry.parent_hash != told.hash
            assert heard.entry.step == told.entry.step + 1


def evidence(swarm: LocalSwarm, path: Path) -> tuple[SignedEntry, SignedEntry]:
    """Both entries, as anyone can check them who has the invite."""
    run_id, coordinator = swarm.invite.run_id, swarm.invite.coordinator_public_key
    values = json.loads(path.read_text())
    assert (values["run"], values["coordinator"]) == (run_id.hex(), coordinator.hex())
    envelopes = [bytes.fromhex(entry["envelope"]) for entry in values["entries"]]
    told, heard = (open_entry(envelope, run_id=run_id, coordinator=coordinator) for envelope in envelopes)
    return told, heard
