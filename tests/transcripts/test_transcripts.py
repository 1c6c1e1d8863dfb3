"""The machine does what the transcripts say, line for line."""

from pathlib import Path

import pytest

from tests.transcripts.scenarios import SCENARIOS, written

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_machine_does_what_the_transcript_says(name: str) -> None:
    expected = (HERE / f"{name}.txt").read_text()
    assert written(name) == expected, "if this is meant, run `python -m tests.transcripts` and review the difference"


def test_no_transcript_is_left_over() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(SCENARIOS)


def test_the_architecture_page_shows_the_quiet_step() -> None:
    page = HERE.parents[1] / "docs" / "architecture.md"
    assert f"```\n{written('quiet')}```" in page.read_text(), "copy tests/transcripts/quiet.txt into the page"
