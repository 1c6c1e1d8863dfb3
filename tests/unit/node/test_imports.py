"""A module that is loaded later is loaded by its first use, and by no look at it."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from node import imports
from node.imports import later, many_imports


def test_a_module_is_loaded_by_its_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "costly.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    later("some_package.costly")
    import some_package.costly as early  # type: ignore[import-not-found]

    inspect.getmodule(test_a_module_is_loaded_by_its_first_use)  # looks at every module
    assert not hasattr(early, "__file__")
    assert early.answer == 42
    assert early.answer == 42
    import some_package.costly as late

    assert (late.answer, late.__file__) == (42, str(package / "costly.py"))
    later("some_package.costly")
    assert sys.modules["some_package.costly"] is late


def test_a_peer_starts_without_what_it_never_uses() -> None:
    """hivemind imports scipy.optimize, 0.4 s of a core, for averages that no peer takes."""
    code = "import node.app, sys; print([name for name in sys.modules if name.startswith('scipy.optimize.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=270, check=True)
    assert done.stdout.strip() == "[]"


def test_a_working_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    """MKL ended the process: "Cannot load libtorch_cpu.so"."""
    code = f"""
import os
from pathlib import Path
folder = Path({str(tmp_path / "gone")!r})
folder.mkdir()
os.chdir(folder)
folder.rmdir()
from node.imports import many_imports
with many_imports():
    print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=Path.cwd())
    assert "OperatorError: the working folder cannot be used" in done.stderr
    assert "goes on" not in done.stdout


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        ("tempfile._candidate_tempdir_list = lambda: [gone]", "OperatorError: no folder takes temporary files"),
        ("os.getpid = lambda: 'no/name'", "OperatorError: no semaphore can be made"),
    ],
)
def test_a_system_without_what_the_packages_need_is_told(tmp_path: Path, breaks: str, told: str) -> None:
    """A container whose disk is read-only, or without /dev/shm: their imports ended with tracebacks."""
    code = f"""
import os, tempfile
gone = {str(tmp_path / "gone")!r}
{breaks}
from node.imports import many_imports
with many_imports():
    print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=Path.cwd())
    assert told in done.stderr.splitlines()[-1], done.stderr
    assert "goes on" not in done.stdout


def test_the_semaphore_that_is_tried_has_a_name_that_macos_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 characters: each command said that no semaphore can be made."""
    names = list[str]()
    monkeypatch.setattr(imports, "SemLock", lambda *given: names.append(given[3]))
    with many_imports():
        pass
    (name,) = names
    assert len(name) <= 30


def test_a_damaged_link_is_answered_before_torch_is_loaded() -> None:
    """A helper of `join` imported torch: seconds, and a traceback where there is no temporary folder."""
    code = "import sys; from node.__main__ import main; sys.argv[1:] = ['join', 'swarmentum://x']; main()"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], check=False, capture_output=True, text=True)
    said, names = done.stderr, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "the invite link is damaged or cut off" in said
    assert "node.commands.join" in names
    assert "torch" not in names
