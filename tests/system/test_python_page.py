"""The code of docs/python.md, and the cells of the notebook beside it, one after the other as a reader runs them."""

import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import swarmentum
from tests.system.local_swarm import processes_with

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
NOTEBOOK = PAGE.parent / "examples" / "swarm.ipynb"
WORDS_MAX = 560


def run(pieces: Iterable[tuple[str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code one piece after the other, with one set of names; nothing is left running."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {}
    try:
        for name, code in pieces:
            exec(compile(code, name, "exec"), names)
    finally:
        swarm = names.get("swarm")
        if isinstance(swarm, swarmentum.Local):
            swarm.close()
    assert processes_with(str(folder)) == []


@pytest.mark.nightly
@pytest.mark.system
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_code_of_the_page_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    assert len(blocks) == 3
    run(((str(PAGE), block) for block in blocks), tmp_path, monkeypatch)
    told = capsys.readouterr().out
    assert "http://127.0.0.1:" in told
    assert len(re.findall(r"^12D3Koo\w+ \d+ \d+$", told, flags=re.M)) == 3


@pytest.mark.nightly
@pytest.mark.system
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_cells_of_the_notebook_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "results of somebody's machine are in the file"
    run(((cell["id"], "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"), tmp_path, monkeypatch)
    told = capsys.readouterr().out
    [accepted] = re.findall(r"The late peer has (\d+) accepted votes", told)
    assert int(accepted) >= 3
    assert int(re.findall(r"^(\d+) steps, the same state", told, flags=re.M)[0]) >= 5


def test_the_page_is_short_and_names_only_what_there_is() -> None:
    text = PAGE.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert len(prose.split()) <= WORDS_MAX
    for name in re.findall(r"swarmentum\.(\w+)\b(?=\()", text):
        assert name in swarmentum.__all__, name
