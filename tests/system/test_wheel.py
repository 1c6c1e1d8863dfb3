"""What is built can be installed: a wheel in a folder of its own runs both commands and a short demo."""

import json
import os
import shutil
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


def run(command: list[str], folder: Path, site: Path | None = None, seconds_max: float = SECONDS_MAX) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds_max, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("command", ["swarmentum", "swarmentum-coordinator"])
def test_both_commands_are_there(installed: Path, tmp_path: Path, command: str) -> None:
    assert "Usage" in run([sys.executable, str(installed / "bin" / command), "--help"], tmp_path, installed)


@pytest.fixture(scope="module")
def bare(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment: the wheel is installed there, and libraries come from this environment."""
    folder = tmp_path_factory.mktemp("bare")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
    python = folder / "venv" / "bin" / "python"
    [wheel] = installed.parent.glob("swarmentum-*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    run([*pip, "install", "--no-deps", "--no-index", str(wheel)], folder)
    where = "import site; print(site.getsitepackages()[0])"
    there, here = (Path(run([it, "-c", where], folder).strip()) for it in (str(python), sys.executable))
    # a path in a .pth file: the .pth files in that folder, and so this checkout, stay unread
    (there / "libraries.pth").write_text(f"{here}\n")
    return python


PROGRAM = """
import swarmentum
reveal_type(swarmentum.verify("archive").ok)
reveal_type([step.votes[0].loss for step in swarmentum.read_run("archive").steps])
reveal_type(swarmentum.DeMoOptimizer([], lr=1e-3).abstentions)
reveal_type(swarmentum.__version__)
swarmentum.read_run(1)
"""


def test_a_program_imports_the_package(bare: Path, tmp_path: Path) -> None:
    where = "import swarmentum, node; print(swarmentum.__file__, node.__file__, swarmentum.DeMoOptimizer.__name__)"
    found = run([str(bare), "-c", where], tmp_path).split()
    assert all(Path(file).is_relative_to(bare.parents[1]) for file in found[:2]), "the checkout was imported instead"


@pytest.mark.nightly
@pytest.mark.long
def test_a_program_sees_its_types(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(bare), "program.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    said = [line.partition(": ")[2] for line in checked.stdout.splitlines()[:-1]]
    assert said == [
        'note: Revealed type is "bool"',
        'note: Revealed type is "list[float]"',
        'note: Revealed type is "int"',
        'note: Revealed type is "str"',
        'error: Argument 1 to "read_run" has incompatible type "int"; expected "str | PathLike[str]"  [arg-type]',
    ], checked.stdout + checked.stderr


@pytest.mark.nightly
def test_a_short_demo_runs_from_it(installed: Path, tmp_path: Path) -> None:
    where = run([sys.executable, "-c", "import node, coordinator, protos; print(node.__file__)"], tmp_path, installed)
    assert Path(where.strip()).is_relative_to(installed), "the checkout was imported instead"
    short_demo([sys.executable, str(installed / "bin" / "swarmentum")], tmp_path, installed)


def short_demo(swarmentum: list[str], folder: Path, site: Path | None = None) -> None:
    demo = ["demo", "--json", "--steps", "5", "--peers", "2", "--output", str(folder / "out")]
    values = json.loads(run([*swarmentum, *demo], folder, site).splitlines()[-1])
    assert values["steps"] == 5
    assert values["digests_equal_at_every_step"]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_pythons_install_the_newest_libraries_and_run_a_short_demo(
    installed: Path, tmp_path: Path, version: str
) -> None:
    """Without the set that was tested together: protobuf 7 and grpcio's newest, as whoever runs `pip install` gets them."""
    asked = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    others = [it for it in (shutil.which(f"python{version}"), *map(str, pyenv)) if it]
    found = [
        it
        for it in others
        if subprocess.run([it, "-c", asked], capture_output=True, text=True, check=False).stdout.strip() == version
    ]
    if not found:
        pytest.skip(f"this machine has no Python {version}")
    run([found[0], "-m", "venv", str(tmp_path / "venv")], tmp_path)
    [wheel] = installed.parent.glob("swarmentum-*.whl")
    torch = run([sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"], tmp_path).strip()
    pip = [str(tmp_path / "venv" / "bin" / "pip"), "install", "--quiet", f"{wheel}[node]", f"torch=={torch}"]
    run(pip, tmp_path, seconds_max=1200)
    short_demo([str(tmp_path / "venv" / "bin" / "swarmentum")], tmp_path)
