"""`python -m tests.bench adversaries` on a tiny model, through the real coordinator's machine: who is out, and nobody else."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from node.data.corpus import open_corpus
from node.optim.votes.payload import PLAIN
from tests.bench import adversaries
from tests.bench.adversaries import Trial

STEPS = 16


def trial(tmp_path: Path, kinds: Sequence[str]) -> Trial:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number * number % 97}; " for number in range(4000)))
    parser = argparse.ArgumentParser()
    adversaries.arguments(parser)
    options = parser.parse_args(["--steps", str(STEPS), "--width", "64", "--layers", "1", "--context", "32"])
    torch.set_num_threads(1)
    return Trial(options, open_corpus(text, tmp_path).tokens, 0, kinds).play()


@pytest.mark.parametrize("kind", ["random", "copy", "changed"])
def test_one_of_eight_that_does_not_work_is_excluded_and_nobody_else(tmp_path: Path, kind: str) -> None:
    assert list(trial(tmp_path, ["honest"] * 7 + [kind]).excluded) == [7]


def test_three_of_ten_that_flip_signs_and_lie_are_excluded_and_nobody_else(tmp_path: Path) -> None:
    assert sorted(trial(tmp_path, ["honest"] * 7 + ["flip"] * 3).excluded) == [7, 8, 9]


def test_flipped_votes_are_the_same_coefficients() -> None:
    assert adversaries.flipped(PLAIN, bytes([1, 130]), 128) == bytes([129, 2])
