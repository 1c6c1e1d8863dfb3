"""Records `swarmentum demo` as a picture for the README: docs/demo.svg. Run: `python deploy/record_demo.py`.

The picture is text that a browser draws with its own monospace font: nothing is loaded from elsewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from protos.process import python_command

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "demo.svg"
COLUMNS = 88
STEPS_SHOWN = 3
SECONDS_MAX = 900
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.S)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = python_command("-m", "node", "demo", "--output", str(Path(folder) / "out"))
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=True,
            env={**os.environ, "COLUMNS": str(COLUMNS)},
        )
        lines = shown(done.stdout.replace(folder, "").splitlines())
    console = Console(record=True, width=COLUMNS, file=Path("/dev/null").open("w"))  # noqa: SIM115 - recorded, not written
    console.print(Text("$ make demo", style="bold"))
    for line in lines:
        console.print(Text(line))
    PICTURE.write_text(FONTS.sub("", console.export_svg(title="make demo")))


def shown(lines: list[str]) -> list[str]:
    """The first steps, the last one, and all that follows the steps."""
    steps = [number for number, line in enumerate(lines) if line.startswith("step ")]
    left_out = set(steps[STEPS_SHOWN:-1])
    found: list[str] = []
    for number, line in enumerate(lines):
        if number not in left_out:
            found.append(line)
        elif found[-1] != "...":
            found.append("...")
    return found


if __name__ == "__main__":
    main()
