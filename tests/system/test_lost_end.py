"""A coordinator whose journal lost its newest records (a disk, a backup): the peers give them back, and the run goes on."""

import sqlite3
from pathlib import Path

import pytest

from tests.system.local_swarm import LocalSwarm, digests_by_step, wait_for
from tests.system.test_faults import run_toml

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

STEPS_LOST = 12


@pytest.mark.long
@pytest.mark.nightly
def test_peers_give_a_coordinator_back_what_its_journal_lost(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, run_toml(tmp_path)) as swarm:
        for name in ("ada", "bob"):
            swarm.join(name)
        for name in ("ada", "bob"):
            swarm.wait_step(name, 25)
        port = swarm.serving["port"]
        swarm.processes["coordinator"].kill()
        known = max(swarm.last_step(name) for name in ("ada", "bob"))  # the newest entry may have reached nobody
        head, before = lose_the_end(Path(swarm.home) / "journal.sqlite3", STEPS_LOST, known)
        swarm.serve(port)
        for name in ("ada", "bob"):
            swarm.wait_step(name, head + 10)
        gave = [
            line["entries"]
            for name in ("ada", "bob")
            for line in swarm.events(name, "the coordinator's journal had lost its end: this peer gave entries back")
        ]
        assert sum(gave) >= STEPS_LOST
        assert swarm.events("coordinator", "the journal had lost its last entries, and a peer gave them back")
        assert entries(Path(swarm.home) / "journal.sqlite3", head) == before, "other bytes than were lost"
        swarm.join("cleo")  # from a snapshot, through what was lost
        wait_for("a step of cleo", lambda: swarm.last_step("cleo") > head + 10)
        written = digests_by_step(*(swarm.steps(name) for name in ("ada", "bob", "cleo")))
        assert not [step for step, digests in written.items() if len(digests) > 1], "replicas differ"
        for name in ("ada", "bob", "cleo"):
            assert swarm.processes[name].child.poll() is None, f"{name} ended"


def lose_the_end(journal: Path, steps: int, known: int) -> tuple[int, list[bytes]]:
    """Delete the newest records, from so many entries before step `known` on. Returns `known`, and all entries up to it."""
    database = sqlite3.connect(journal)
    [newest] = database.execute("SELECT max(step) FROM records WHERE kind = 'entry'").fetchone()
    head = min(newest, known)
    before = entries(journal, head)
    first = "SELECT number FROM records WHERE kind = 'entry' AND step = ?"
    with database:
        database.execute(f"DELETE FROM records WHERE number >= ({first})", (head - steps + 1,))
    database.close()
    return head, before


def entries(journal: Path, to_step: int) -> list[bytes]:
    database = sqlite3.connect(journal)
    query = "SELECT body FROM records WHERE kind = 'entry' AND step <= ? ORDER BY step"
    found = [body for (body,) in database.execute(query, (to_step,))]
    database.close()
    return found
