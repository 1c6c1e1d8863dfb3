"""What is read of the steps that a peer writes: whole lines, and of a long file the end alone."""

import json
from pathlib import Path

import pytest

from node.commands import processes
from node.commands.processes import LocalProcesses, Processes

RUN_ID = bytes(range(32))


@pytest.mark.parametrize("end", [30, 100, 1 << 14])
def test_the_last_step_is_that_of_the_last_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    monkeypatch.setattr(processes, "END_BYTES", end)
    made = LocalProcesses(Processes(tmp_path), tmp_path)
    assert (made.steps("ada", RUN_ID), made.last_step("ada", RUN_ID)) == ([], 0)
    file = made.run_folder("ada", RUN_ID) / "steps.jsonl"
    file.parent.mkdir(parents=True)
    text = ""
    for step in range(1, 40):
        text += json.dumps({"step": step}) + "\n"
        for torn in ("", '{"st', '{"step": 999}'):
            file.write_text(text + torn)
            assert made.last_step("ada", RUN_ID) == step
            assert [it["step"] for it in made.steps("ada", RUN_ID)] == list(range(1, step + 1))
