"""Records the terminal view of a real peer as a picture: docs/peer-view.svg. Run: `python deploy/record_view.py`.

A coordinator, a relay and three peers run on this machine; one of the peers has a terminal of its own. textual itself takes the
picture after some time. The picture loads nothing from elsewhere.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "peer-view.svg"
SIZE = (92, 28)
AFTER_SECONDS = 75
SECONDS_MAX = 900.0
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.S)
WIDTH = re.compile(r' textLength="[^"]*"')
RUN = """
name = "evening-run"
[model]
factory = "tests.system.paced_model:make"
[model.kwargs]
seconds = 0.15
[model.kwargs.config]
MODEL
[data]
context = 32
[clock]
steps = 1000
batch_samples = 24
min_peers = 3
snapshot_every = 50
[overlay]
bootstrap = [BOOTSTRAP]
"""


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.system.local_swarm import TINY_MODEL, LocalSwarm

    with tempfile.TemporaryDirectory() as folder:
        text = RUN.replace("MODEL", TINY_MODEL.partition("[model.config]")[2])
        swarm = LocalSwarm(Path(folder), text)
        try:
            record(swarm.link, Path(folder), lambda name: swarm.join(name, "--allow-code", "--yes"))
        finally:
            swarm.close()


def record(link: str, folder: Path, join: Callable[[str], object]) -> None:
    """Join as a person with a terminal, beside two other peers, until the picture is there."""
    from tests.system.terminal import Terminal

    for name in ("ada", "bob"):
        join(name)
    place = {"TEXTUAL_SCREENSHOT_LOCATION": str(folder), "TEXTUAL_SCREENSHOT_FILENAME": "view.svg"}
    home = folder / "home"
    environment = {**place, "TEXTUAL_SCREENSHOT": str(AFTER_SECONDS), "HOME": str(home)}
    at = ("--listen", "127.0.0.1:0", "--threads", "1", "--allow-code", "--yes")
    with Terminal("node", "join", link, *at, environment=environment, size=SIZE) as terminal:
        terminal.wait_for("picture", (folder / "view.svg").exists, SECONDS_MAX)
        terminal.signal(signal.SIGTERM)
        terminal.seconds_to_end(60.0)
    drawn = (folder / "view.svg").read_text()
    PICTURE.write_text("\n".join(short(line, str(folder)) for line in FONTS.sub("", drawn).splitlines()) + "\n")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")


def short(line: str, folder: str) -> str:
    """Without the temporary folder, and without the width that the longer text had."""
    parts = line.split("<text")
    return "<text".join(WIDTH.sub("", it).replace(folder, "") if folder in it else it for it in parts)


if __name__ == "__main__":
    main()
