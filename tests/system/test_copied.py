"""Copies of tests/system/copied.py end with their tests, however these end. Run as a program, this file is such tests."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.system import copied
from tests.system.local_swarm import wait_for

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux copies"),
]
SECONDS_MAX = 240.0


def begun_with_a_copy(log: Path, how: str) -> subprocess.Popen[str]:
    command = [*copied.GUARD, str(os.getpid()), sys.executable, "-m", "tests.system.test_copied", str(log), how]
    environment = {name: value for name, value in os.environ.items() if name != "SWARMENTUM_TEST_COPIES"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_no_copy_outlives_its_tests(tmp_path: Path, how: str) -> None:
    """Tests that are killed can end nothing; those that end do not wait for a copy that is stopped."""
    with begun_with_a_copy(tmp_path / "log", how) as tests:
        assert tests.stdout is not None
        server, copy = map(int, tests.stdout.readline().split())
        assert tests.wait(SECONDS_MAX) == (-signal.SIGKILL if how == "killed" else 0)
    for pid in (server, copy):
        wait_for("end of what was copied", lambda pid=pid: has_ended(pid), SECONDS_MAX)  # type: ignore[misc]


def test_a_signal_to_one_that_ends_just_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    monkeypatch.setattr(copied.Copied, "poll", lambda _: None)
    copy = copied.Copied.__new__(copied.Copied)
    copy.pid = ended.pid
    copy.send_signal(signal.SIGCONT)


def test_what_asks_for_more_threads_first_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original has loaded with one thread, whoever comes first."""
    monkeypatch.delenv("SWARMENTUM_TEST_COPIES", raising=False)
    monkeypatch.setattr(copied, "_loaded_with", {})
    monkeypatch.setattr(copied._forkserver, "ensure_running", lambda: None)
    usual = {**os.environ, **copied.SURROUNDINGS}
    assert not copied._can_be_copied({**usual, "OMP_NUM_THREADS": "2"})
    assert copied._can_be_copied(usual)


def main(log: str, how: str) -> None:
    if how == "copy":
        signal.pause()
    copy = copied.begin(Path(log), "tests.system.test_copied", log, "copy")
    assert isinstance(copy, copied.Copied)
    print(copied._forkserver._forkserver_pid, copy.pid, flush=True)  # type: ignore[attr-defined]
    os.kill(*{"killed": (os.getpid(), signal.SIGKILL), "stopped": (copy.pid, signal.SIGSTOP)}[how])


if __name__ == "__main__":
    main(*sys.argv[1:])
