"""`tests.bench real` with a tiny model, from the trained tokenizer to AdamW's curve: every part of it is a real process."""

import argparse
from pathlib import Path

import pytest

from tests.bench import real

TINY = "--steps 8 --batch 2 --every 4 --width 64 --layers 1 --lrs 1e-3 --tries 4"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_whole_run_and_adamw_on_the_same_samples(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    real.arguments(parser)
    found = real.measure(parser.parse_args([*TINY.split(), "--folder", str(tmp_path)]))
    swarm, adamw = found["swarm"], found["adamw"]
    assert (swarm["steps"], swarm["equal"], swarm["verified"]) == (8, True, True)
    assert swarm["held_out"][-1][0] == adamw["held_out"][-1][0] == 8
    assert swarm["wrote"].startswith(real.PROMPT)
    assert [step for step, _ in adamw["held_out"]] == [4, 8]
