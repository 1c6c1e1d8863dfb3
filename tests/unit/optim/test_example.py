"""The examples of docs/optimizers.md, run as they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "train_with_torchrun.py"


@pytest.mark.long
def test_the_example_trains_with_torchrun() -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE))
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=EXAMPLE.parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(re.findall(r"rank (\d): loss (\S+), weights [0-9a-f]{16}", done.stdout))
    weights = set(re.findall(r"weights ([0-9a-f]{16})", done.stdout))
    assert len(weights) == 1, "the ranks' weights differ"
    assert {"0", "1"} == said.keys()
    assert all(float(loss) < 0.9 for loss in said.values()), "the loss of a batch is about 1 at first"


def test_the_example_of_a_base_of_one_s_own_trains() -> None:
    example = EXAMPLE.with_name("lion.py")
    function = re.search(r"def lion.*?return update\n", example.read_text(encoding="utf-8"), re.DOTALL)
    assert len(function[0].splitlines()) <= 15
    done = subprocess.run(
        (sys.executable, str(example)), capture_output=True, text=True, timeout=240, check=False, cwd=EXAMPLE.parents[2]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) < 0.9, "the loss of a batch is about 1 at first"
