"""The code of docs/python.md, and the cells of the notebook beside it, one after the other as a reader runs them."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

import swarmentum
from tests.system.local_swarm import processes_with

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
NOTEBOOK = PAGE.parent / "examples" / "swarm.ipynb"
WORDS_MAX = 560


@pytest.mark.nightly
@pytest.mark.system
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_code_of_the_page_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        swarm = names.get("swarm")
        if isinstance(swarm, swarmentum.Local):
            swarm.close()
    told = capsys.readouterr().out
    assert "http://127.0.0.1:" in told
    assert len(re.findall(r"^12D3Koo\w+ \d+ \d+$", told, flags=re.M)) == 3
    assert processes_with(str(tmp_path)) == []


@pytest.mark.nightly
@pytest.mark.system
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_cells_of_the_notebook_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "results of somebody's machine are in the file"
    names: dict[str, object] = {}
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    finally:
        swarm = names.get("swarm")
        if isinstance(swarm, swarmentum.Local):
            swarm.close()
    told = capsys.readouterr().out
    [accepted] = re.findall(r"The late peer has (\d+) accepted votes", told)
    assert int(accepted) >= 3
    assert int(re.findall(r"^(\d+) steps, the same state", told, flags=re.M)[0]) >= 5
    assert processes_with(str(tmp_path)) == []


def test_the_page_is_short_and_names_only_what_there_is() -> None:
    text = PAGE.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert len(prose.split()) <= WORDS_MAX
    for name in re.findall(r"swarmentum\.(\w+)\b(?=\()", text):
        assert name in swarmentum.__all__, name
