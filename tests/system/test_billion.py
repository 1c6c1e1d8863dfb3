"""The story of tests/system/billion.py, small on any machine at night, and of 1.24 billion parameters where there is room."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.system, pytest.mark.nightly, pytest.mark.timeout(7200)]
MEMORY_BYTES, DISK_BYTES = 22e9, 75e9


@pytest.mark.parametrize("size", [("--layers", "1", "--width", "256"), ()], ids=["small", "1.24 billion"])
def test_a_run_from_nothing_to_an_export_and_a_verified_archive(size: tuple[str, ...], tmp_path: Path) -> None:
    if not size and psutil.virtual_memory().total < MEMORY_BYTES:
        pytest.skip("needs 22 GB of memory: an anchor and a peer")
    if not size and shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip("needs 75 GB of disk")
    command = [sys.executable, "-m", "tests.system.billion", "--folder", str(tmp_path / "story"), *size]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=7000, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    finally:
        shutil.rmtree(tmp_path / "story", ignore_errors=True)
