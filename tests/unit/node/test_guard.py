"""A guarded command ends with the process that started it, however that one ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from node.model import other_process
from node.model.spec import ModelSpec
from protos import guard

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:3], str(os.getpid()), "/bin/sleep", "1000"])
print(child.pid, flush=True)
child.wait()
"""
# elsewhere than on Linux, guard.py watches; the same code runs here
WATCHING = f"""
import sys
sys.path.insert(0, {str(Path(guard.__file__).parent)!r})
import guard
sys.exit(guard._watch(int(sys.argv[1]), sys.argv[2:]))
"""


def sleepers(above: int) -> list[int]:
    """`sleep` processes among a process and its children."""
    try:
        process = psutil.Process(above)
        found = [it for it in (process, *process.children()) if it.name() == "sleep"]
        return [it.pid for it in found if it.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def until(what: object, seconds: float = 240.0) -> bool:
    end = time.monotonic() + seconds
    while not (met := what()) and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(met)


@pytest.mark.parametrize(
    "how",
    [pytest.param((guard.__file__,), marks=LINUX_ONLY, id="linux"), pytest.param(("-c", WATCHING), id="elsewhere")],
)
def test_the_command_ends_when_its_starter_is_killed(how: tuple[str, ...]) -> None:
    code = PARENT if len(how) == 2 else PARENT.replace("sys.argv[1:3]", "sys.argv[1:2]")
    parent = subprocess.Popen([sys.executable, "-c", code, *how], stdout=subprocess.PIPE, text=True)
    try:
        guarded = int(parent.stdout.readline())
        assert until(lambda: sleepers(guarded)), "the command did not start"
        [sleeper] = sleepers(guarded)
        parent.kill()
        assert until(lambda: not Path(f"/proc/{sleeper}").exists()), "the command goes on without its starter"
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()


def test_what_watches_passes_signals_and_the_exit_code_on() -> None:
    base = [sys.executable, "-I", "-S", "-c", WATCHING, str(os.getpid())]
    assert subprocess.run([*base, "/bin/sh", "-c", "exit 7"], timeout=270, check=False).returncode == 7
    watched = subprocess.Popen([*base, "/bin/sleep", "1000"])
    assert until(lambda: sleepers(watched.pid))
    watched.terminate()
    assert watched.wait(240) != 0
    assert not sleepers(watched.pid)


@LINUX_ONLY
def test_a_command_whose_starter_is_gone_already_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", guard.__file__, "1", "/bin/echo", "started"]
    done = subprocess.run(command, capture_output=True, timeout=270, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_process_that_builds_ends_with_the_one_that_asked(tmp_path: Path) -> None:
    """`run check` kills the dry run when it takes too long, and a factory may build for minutes."""
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n\n\ndef model():\n"
        "    pathlib.Path(__file__).with_suffix('.pid').write_text(str(os.getpid()))\n    time.sleep(1000)\n"
    )
    asks = (
        "import sys; sys.path.append(sys.argv[1]); from node.model.other_process import compare_elsewhere; "
        "from node.model.spec import ModelSpec; compare_elsewhere(ModelSpec(factory='slow:model'), 1, {}, 'model')"
    )
    with subprocess.Popen([sys.executable, "-c", asks, str(tmp_path)]) as parent:
        written = tmp_path / "slow.pid"
        assert until(lambda: written.exists() and bool(written.read_text()))
        child = int(written.read_text())
        parent.kill()
    assert until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


@LINUX_ONLY
def test_a_process_that_builds_ends_though_it_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a supervisor that ignores it, all children do: a slow build was waited for without an end."""
    (tmp_path / "slow.py").write_text("import time\n\n\ndef model():\n    time.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(other_process, "SECONDS_MAX", 1.0)
    monkeypatch.setattr(other_process, "END_SECONDS_MAX", 0.0)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        told = other_process.compare_elsewhere(ModelSpec(factory="slow:model"), 1, {}, "model")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "that took more than 1 s" in told
