"""The priority of a process: every thread of a real one has it."""

import subprocess
import sys

import pytest

CODE = """
import os, threading
from node.training.resource_limits import TASKS, Priority
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
first, priority = os.getpriority(os.PRIO_PROCESS, 0), Priority()
wanted = min(first + 4, 19)
assert priority.set(wanted) == ""
found = {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in TASKS.iterdir()}
assert (len(list(TASKS.iterdir())), found) == (2, {wanted}), found
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
if first < wanted:
    why = priority.set(None)
    assert "counts from the next start on" in why, why
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the priority of each thread")
def test_every_thread_takes_the_priority_and_only_an_administrator_takes_it_back() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=270)
