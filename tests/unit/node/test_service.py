"""A peer as a service: definitions that systemd and launchd take, the supervisor's log and exit codes, and the commands.

No service manager of a user runs here. systemd's own checker reads the unit; the commands find a `systemctl` that notes calls.
"""

import json
import os
import plistlib
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from node import __main__ as command
from node.service import manager
from node.service import supervise as supervisor
from node.service.manager import Service, command_line, launch_agent, quoted, systemd_unit
from node.service.supervise import LOGS_KEPT, supervise
from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import Invite

AWKWARD = 'a "quoted" 100% $HOME \\ back'
LINK = Invite(bytes(range(32)), ("127.0.0.1:7700",), Identity.generate().public_key, bytes(32), (), "tiny").link()
RUN = bytes(range(8)).hex()


def service(folder: Path) -> Service:
    return Service(RUN, "50 % done", (sys.executable, "-c", AWKWARD), folder, folder, {"NOTE": AWKWARD})


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    checker = shutil.which("systemd-analyze")
    if checker is None:
        pytest.skip("no systemd-analyze here")
    file, unit = tmp_path / service(tmp_path).unit, systemd_unit(service(tmp_path))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "warning"}
    said = []
    for text in (unit, unit.replace("Restart=on-failure", "Restart=maybe")):
        file.write_text(text)
        command = [checker, "--user", "verify", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=270)
        said.append(done.stdout + done.stderr)
    assert [line for line in said[0].splitlines() if file.name in line] == []
    assert "maybe" in said[1], "the checker finds nothing at all"


def test_a_unit_starts_again_only_where_that_helps(tmp_path: Path) -> None:
    lines = systemd_unit(service(tmp_path)).splitlines()
    assert "Restart=on-failure" in lines
    assert "RestartPreventExitStatus=2 4 5" in lines
    assert "SuccessExitStatus=130" in lines
    assert "Description=Swarmentum peer of the run 50 %% done (0001020304050607)" in lines


def test_words_of_a_command_stay_words() -> None:
    words = ["a b", '"', "%h", "$HOME", "\\"]
    assert command_line(words) == '"a b" "\\"" "%%h" "$$HOME" "\\\\"'
    assert quoted(words) == '"a b" "\\"" "%%h" "$HOME" "\\\\"', "a dollar sign in a variable's value is itself"


def test_launchd_gets_the_command_behind_the_supervisor(tmp_path: Path) -> None:
    values = plistlib.loads(launch_agent(service(tmp_path), ("python", "-m", "supervise", "log")))
    assert values["ProgramArguments"] == ["python", "-m", "supervise", "log", *service(tmp_path).command]
    assert values["KeepAlive"] == {"SuccessfulExit": False}
    assert values["EnvironmentVariables"] == {"NOTE": AWKWARD}
    assert values["Label"].endswith(RUN)


@pytest.mark.parametrize(("code", "told"), [(0, 0), (1, 1), (2, 0), (3, 3), (4, 0), (5, 0), (130, 0)])
def test_the_supervisor_says_whether_another_start_helps(code: int, told: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert supervise(log, [sys.executable, "-c", f"print('said'); raise SystemExit({code})"]) == told
    assert log.read_text() == "said\n"


def test_the_supervisor_s_log_is_bounded(tmp_path: Path) -> None:
    program = "for number in range(1000): print(f'{number:09}')"
    assert supervise(tmp_path / "log", [sys.executable, "-c", program], bytes_max=1000) == 0
    logs = sorted(tmp_path.glob("log*"))
    assert len(logs) == 1 + LOGS_KEPT
    assert all(log.stat().st_size <= 1000 for log in logs)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "000000999"


def test_the_supervisor_hands_signals_on(tmp_path: Path) -> None:
    log, program = (
        tmp_path / "log",
        "import signal; print('here', flush=True); signal.sigwait([signal.SIGTERM]); exit(130)",
    )
    waits = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); {program}"
    line = [sys.executable, "-m", "node.service.supervise", str(log), sys.executable, "-c", waits]
    with subprocess.Popen(line) as child:
        while not (log.exists() and log.read_text()):
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(240) == 0


def test_a_signal_before_there_is_a_peer_reaches_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launchd ends a service that has just begun: the peer must not outlive its supervisor."""
    waits = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); exit(signal.sigwait([signal.SIGTERM]))"
    start = subprocess.Popen

    def slow(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        signal.raise_signal(signal.SIGTERM)
        return start(
            *arguments, **options, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        )

    monkeypatch.setattr(supervisor.subprocess, "Popen", slow)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert supervise(tmp_path / "log", [sys.executable, "-c", waits]) == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_costs_lines_of_the_log_and_not_the_peer(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    program = "for number in range(50): print('x' * 5000)\nraise SystemExit(3)"  # more than a pipe holds
    assert supervise(tmp_path / "log", [sys.executable, "-c", program], bytes_max=1000) == 3


# ---- the commands ----------------------------------------------------------------------------------------------------

NOTES = """#!/bin/sh
echo "$(basename "$0") $*" >>"$NOTES"
case "$*" in *show\\ swarmentum*) printf 'ActiveState=active\\nSubState=running\\nExecMainStatus=0\\nNRestarts=2\\n';; esac
"""


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of systemd that note how they are called; the file of the notes."""
    for name in ("systemctl", "loginctl"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(NOTES)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    monkeypatch.setenv("SWARMENTUM_MICRO_BATCH", "3")
    monkeypatch.setattr(manager.sys, "platform", "linux")
    return tmp_path / "notes"


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command.app, ["service", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_install_status_and_uninstall(noted: Path, tmp_path: Path) -> None:
    home, unit = tmp_path / "home", f"swarmentum-{RUN}.service"
    code, said = run("install", LINK, "--json", "--home", str(home), "--threads", "2", "--yes")
    assert code == 0, said
    told = json.loads(said.splitlines()[-1])
    invite = Path(told["invite_file"])
    assert invite.read_text().strip() == LINK
    assert stat.S_IMODE(invite.stat().st_mode) == 0o600
    text = Path(told["file"]).read_text()
    assert LINK not in text, "everybody may read a unit"
    assert 'Environment="SWARMENTUM_MICRO_BATCH=3"' in text, "settings of the shell are lost"
    assert f'"--invite-file" "{invite}" "--home" "{home}" "--threads" "2" "--yes"' in text
    calls = noted.read_text().splitlines()
    assert [line for line in calls if line.startswith("systemctl")][1:] == [
        "systemctl --user daemon-reload", f"systemctl --user enable {unit}", f"systemctl --user restart {unit}",
    ]  # fmt: skip
    assert any(line.startswith("loginctl enable-linger") for line in calls)

    [found] = json.loads(run("status", "--json")[1])
    assert (found["run"], found["state"]) == (RUN, "active")
    assert "started again 2 times" in found["detail"]

    assert run("uninstall", "")[0] == 2, "of a variable that is not set"
    assert run("uninstall")[0] == 0
    assert f"systemctl --user disable --now {unit}" in noted.read_text()
    assert not Path(told["file"]).exists()
    assert not invite.exists()
    assert json.loads(run("status", "--json")[1]) == []
    with pytest.raises(OperatorError, match="installed are: none"):
        run("uninstall")


def test_an_option_that_join_does_not_know_is_refused_before_anything_is_written(noted: Path, tmp_path: Path) -> None:
    code, said = run("install", LINK, "--home", str(tmp_path / "home"), "--treads", "2")
    assert code == 2
    assert "--treads" in said
    assert not (tmp_path / "home").exists()
    assert not noted.exists()


def test_nothing_is_started_with_no_start(noted: Path, tmp_path: Path) -> None:
    assert run("install", LINK, "--no-start", "--home", str(tmp_path / "home"))[0] == 0
    assert not noted.exists()


def test_a_service_that_cannot_be_installed_leaves_no_link(noted: Path, tmp_path: Path) -> None:
    """There may be a ticket in it, and no `uninstall` found it."""
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(OperatorError, match="user manager does not answer"):
        run("install", LINK, "--home", str(tmp_path / "home"))
    assert not [path for path in (tmp_path / "person").rglob("*") if path.is_file()]
    assert not noted.exists()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager.sys, "platform", "win32")
    with pytest.raises(OperatorError, match="win32"):
        run("status")
