"""A short run of the fuzzer in CI, over every door; and that it would notice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="the fuzzer is not installed: it comes with the extra `dev` on Linux")


@pytest.mark.long
@pytest.mark.parametrize("seconds", [8, pytest.param(40, marks=pytest.mark.nightly)])
def test_no_door_breaks_in_a_short_run(tmp_path: Path, seconds: int) -> None:
    flags = ("--seconds", str(seconds), "--artifacts", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "all", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, (
        f"{told[-3000:]}\nreplay: python -m tests.fuzz all --replay FILE, {list(tmp_path.iterdir())}"
    )
    runs = next(int(line.split()[-1]) for line in told.splitlines() if "number_of_executed_units" in line)
    assert runs > seconds, told[-2000:]  # a slow machine plays some ten a second, others some thousand


def test_every_door_is_fuzzed_and_lets_good_bytes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fuzz import __main__ as command
    from tests.fuzz import doors

    monkeypatch.setenv("SWARMENTUM_OPTIM_BACKEND", "torch")
    assert tuple(doors.DOORS) == command.NAMES
    assert doors.seeds().keys() == doors.DOORS.keys()
    for name, door in doors.DOORS.items():
        if name != "snapshot":  # a whole one would be longer than the fuzzer's inputs
            door(doors.seeds()[name][0])  # not even a refusal


def test_a_door_that_breaks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fuzz import doors

    def broken(data: bytes) -> None:
        if data.startswith(b"bad"):
            raise IndexError("not a refusal")

    monkeypatch.setitem(doors.DOORS, "envelope", broken)
    doors.knock("envelope")(b"good")
    with pytest.raises(IndexError):
        doors.knock("envelope")(b"bad")
