"""DeMoOptimizer in Accelerate, the Hugging Face Trainer and Lightning: the examples of the docs, and their own checkpoints.

The trainers are in an environment of their own: SWARMENTUM_TEST_TRAINERS names its Python (`make .venv/.trainers` makes one).
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("SWARMENTUM_TEST_TRAINERS")
pytestmark = [
    pytest.mark.system,
    pytest.mark.nightly,
    pytest.mark.skipif(PYTHON is None, reason="needs SWARMENTUM_TEST_TRAINERS: a Python with accelerate and lightning"),
]


def run(*arguments: str) -> str:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("trainer", ["accelerate", "hf_trainer", "lightning"])
def test_two_ranks_in_a_trainer_exchange_votes_and_no_gradient(trainer: str, tmp_path: Path) -> None:
    """Without the hook, the optimizer would find the same gradient on both ranks, and refuse it."""
    example = f"docs/examples/train_with_{trainer}.py"
    out = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example, str(tmp_path))
    weights = re.findall(r"rank [01].*? weights ([0-9a-f]{16})", out)  # ranks may share a line
    assert len(weights) == 2, out
    assert len(set(weights)) == 1


def test_a_trainer_s_own_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    lines = [line.split() for line in run("tests/system/trainer_checkpoints.py", str(tmp_path)).splitlines()]
    found = {line[0]: line[1:] for line in lines if len(line) == 3 and len(line[1]) == 64}
    assert set(found) == {"accelerate", "hf_trainer", "lightning"}
    for trainer, (whole, parts) in found.items():
        assert whole == parts, trainer


def test_a_trainer_s_settings_do_what_a_loop_by_hand_does() -> None:
    """Accumulation, clipping and mixed precision. Lightning refused to clip in mixed precision."""
    lines = [line.split() for line in run("-m", "tests.system.trainer_by_hand").splitlines()]
    found = {line[0]: line[1:] for line in lines if len(line) == 3 and len(line[1]) == 64}
    assert len(found) == 3 * 4
    for case, (trained, by_hand) in found.items():
        assert trained == by_hand, case
    assert len({digests[0] for digests in found.values()}) == 2 * 4, "each setting does something"


def test_a_trainer_of_two_ranks_warms_up_from_a_rate_of_0_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Each rank's own state comes back by torch's hook, and at a rate of 0 the votes of all ranks are empty and equal."""
    program = ("-m", "tests.system.trainer_resumes")
    out = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program, str(tmp_path))
    weights = re.findall(r"rank [01] weights ([0-9a-f]{16})", out)
    assert len(weights) == 6, out
    assert len(set(weights[:2] + weights[4:])) == 1
    assert weights[2] != weights[0]
