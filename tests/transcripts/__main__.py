"""Write the transcripts again: review the difference before you commit it."""

from pathlib import Path

from tests.transcripts.scenarios import SCENARIOS, written

HERE = Path(__file__).parent

if __name__ == "__main__":
    for name in SCENARIOS:
        (HERE / f"{name}.txt").write_text(written(name))
