"""A disk of a few megabytes for tests that fill it: a real file system in memory. Needs root, and skips without."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHUNK = 4096


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """An empty disk of `size` bytes at a new folder."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no small disk here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all room that is left; the file to remove for room again."""
    path = folder / "filling"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(CHUNK)) == CHUNK:
                pass
        except OSError:
            pass
    return path
