"""A laptop that falls asleep: every process of a peer stands still for ten minutes, and goes on without a restart."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.local_swarm import LocalSwarm, wait_for
from tests.system.test_faults import accepted, all_equal, run_toml

SLEEP_SECONDS = float(os.environ.get("SWARMENTUM_TEST_SLEEP", "600"))
BACK_SECONDS_MAX = 60.0
pytestmark = [pytest.mark.system, pytest.mark.nightly, pytest.mark.timeout(SLEEP_SECONDS + 400)]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, run_toml(tmp_path)) as made:
        yield made


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and all below it, p2pd among them."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def test_a_peer_that_slept_for_ten_minutes_votes_again_without_a_restart(swarm: LocalSwarm) -> None:
    names = ("ada", "bob", "cyd")
    for name in names:
        swarm.join(name)
    for name in names:
        wait_for(f"vote of {name} that counts", lambda name=name: accepted(swarm, name) > 0)
    tree = tree_of(swarm.processes["cyd"].child.pid)
    assert any("p2pd" in " ".join(process.cmdline()) for process in tree), "its daemon goes on: the test tests nothing"
    for process in tree:
        process.send_signal(signal.SIGSTOP)
    at = swarm.last_step("ada")
    time.sleep(SLEEP_SECONDS)
    assert swarm.last_step("ada") > at + 10, "the others waited for it"
    for process in reversed(tree):  # p2pd first, as its parent talks to it
        process.send_signal(signal.SIGCONT)
    before, woke = accepted(swarm, "cyd"), time.monotonic()
    wait_for("vote of cyd that counts", lambda: accepted(swarm, "cyd") > before, BACK_SECONDS_MAX + SLEEP_SECONDS / 10)
    print(f"its first vote counted {time.monotonic() - woke:.1f} s after it woke up")
    assert swarm.processes["cyd"].child.poll() is None, "the same process"
    assert not swarm.events("cyd", "the libp2p daemon died; starting it again")
    swarm.wait_step("ada", swarm.last_step("cyd"))
    all_equal(swarm, *names)
