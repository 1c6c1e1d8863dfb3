"""The code of docs/python.md, block after block, as a reader would paste it into one notebook."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

import swarmentum
from tests.system.local_swarm import processes_with

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
WORDS_MAX = 500


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


def test_the_page_is_short_and_names_only_what_there_is() -> None:
    text = PAGE.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert len(prose.split()) <= WORDS_MAX
    for name in re.findall(r"swarmentum\.(\w+)\b(?=\()", text):
        assert name in swarmentum.__all__, name
