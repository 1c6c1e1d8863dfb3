"""What is built can be installed: a wheel in a folder of its own runs both commands and a short demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 240


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], folder)
    [wheel] = folder.glob("swarmentum-*.whl")
    run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], folder)
    return folder / "site"


def run(command: list[str], folder: Path, site: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("command", ["swarmentum", "swarmentum-coordinator"])
def test_both_commands_are_there(installed: Path, tmp_path: Path, command: str) -> None:
    assert "Usage" in run([sys.executable, str(installed / "bin" / command), "--help"], tmp_path, installed)


@pytest.mark.nightly
def test_a_short_demo_runs_from_it(installed: Path, tmp_path: Path) -> None:
    where = run([sys.executable, "-c", "import node, coordinator, protos; print(node.__file__)"], tmp_path, installed)
    assert Path(where.strip()).is_relative_to(installed), "the checkout was imported instead"
    demo = ["demo", "--json", "--steps", "5", "--peers", "2", "--output", str(tmp_path / "out")]
    printed = run([sys.executable, str(installed / "bin" / "swarmentum"), *demo], tmp_path, installed)
    values = json.loads(printed.splitlines()[-1])
    assert values["steps"] == 5
    assert values["digests_equal_at_every_step"]
