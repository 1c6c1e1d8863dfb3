"""The bench of the coordinator plays peers of its own: it once could not connect any more, and nobody saw it."""

import json
import subprocess
import sys

import pytest


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_played_peers_join_and_make_steps() -> None:
    command = [sys.executable, "-m", "tests.bench", "coordinator", "--peers", "8", "--steps", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["peers"], found["admitted"], found["refusals"]) == (8, 8, 0)
