"""The service manager of this machine: systemd's user manager on Linux, launchd on macOS. Refuses other systems.

A peer is started again after a failure, and not after an end that another start would not change: wrong settings (2), refused
(4), replicas differ (5). A peer that left because its owner or the system stopped it (130) has not failed. Each call to a
program of the system has a deadline.
"""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protos.disk import at_home, write_bytes
from protos.errors import OperatorError
from protos.process import python_command
from protos.text import printable

NOT_AGAIN = (2, 4, 5)
LEFT = 130
RESTART_SECONDS = 30
STOP_SECONDS_MAX = 60
NICE = 10
LABEL = "org.swarmentum.peer"
ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t"}


@dataclass(frozen=True)
class Service:
    """One peer: the run that it takes part in, and the command that starts it."""

    run_id: str
    """The first 16 hex digits."""
    run_name: str
    command: tuple[str, ...]
    home: Path
    folder: Path
    """Where the command was given: relative paths among its options begin there."""
    environment: Mapping[str, str]

    @property
    def unit(self) -> str:
        """The name for systemd."""
        return f"swarmentum-{self.run_id}.service"

    @property
    def label(self) -> str:
        """The name for launchd."""
        return f"{LABEL}.{self.run_id}"


def systemd_unit(service: Service) -> str:
    """A user unit. journald keeps the log, and bounds it."""
    environment = "".join(f"Environment={quoted([f'{name}={value}'])}\n" for name, value in service.environment.items())
    return f"""[Unit]
Description=Swarmentum peer of the run {printable(service.run_name).replace("%", "%%")} ({service.run_id})
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command_line(service.command)}
WorkingDirectory={str(service.folder).replace("%", "%%")}
{environment}Restart=on-failure
RestartSec={RESTART_SECONDS}
RestartPreventExitStatus={" ".join(map(str, NOT_AGAIN))}
SuccessExitStatus={LEFT}
TimeoutStopSec={STOP_SECONDS_MAX}
KillMode=mixed
Nice={NICE}

[Install]
WantedBy=default.target
"""


def command_line(words: Sequence[str]) -> str:
    """A command as systemd reads it: no word splits, and neither a variable nor a specifier expands."""
    return quoted([word.replace("$", "$$") for word in words])


def quoted(words: Sequence[str]) -> str:
    """Assignments as systemd reads them: no word splits, and no specifier expands. A dollar sign means nothing here."""
    return " ".join('"' + "".join(ESCAPES.get(sign, sign) for sign in word) + '"' for word in words)


def launch_agent(service: Service, supervisor: Sequence[str]) -> bytes:
    """A property list. launchd knows no exit codes that mean "not again" and rotates no logs: the supervisor does both."""
    return plistlib.dumps(
        {
            "Label": service.label,
            "ProgramArguments": [*supervisor, *service.command],
            "WorkingDirectory": str(service.folder),
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_SECONDS,
            "ExitTimeOut": STOP_SECONDS_MAX,
            "ProcessType": "Background",
            "Nice": NICE,
        }
    )


CALL_SECONDS_MAX = 30.0


@dataclass(frozen=True)
class Installed:
    """A service that is installed. `state` and `detail` are the service manager's words."""

    run: str
    """The first 16 hex digits of its id."""
    file: Path
    state: str
    detail: str
    logs: str
    """The command that shows the log."""


class Manager(Protocol):
    """What the commands need of a service manager."""

    def install(self, service: Service, *, start: bool) -> tuple[Path, list[str]]:
        """Write the definition; with `start`, start it now and at each start of the machine. Returns the file and warnings."""

    def remove(self, run_id: str) -> Path:
        """Stop the service, and remove its definition. OperatorError if it is not installed."""

    def installed(self) -> list[Installed]:
        """Every peer that is a service of this user."""


def call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the system. OperatorError if it is not there, or does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS_MAX, check=False)
    except FileNotFoundError as error:
        raise OperatorError(f"{command[0]} is not on this machine, so it cannot keep a service") from error
    except subprocess.TimeoutExpired as error:
        raise OperatorError(f"`{' '.join(command)}` did not end within {CALL_SECONDS_MAX:.0f} s") from error


def needed(*command: str) -> str:
    """The output of a program of the system. OperatorError if it fails."""
    done = call(*command)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise OperatorError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout


class Systemd:
    """systemd's user manager. Lingering keeps it alive while nobody is logged in."""

    def __init__(self) -> None:
        self._folder = at_home(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "systemd" / "user"

    def install(self, service: Service, *, start: bool) -> tuple[Path, list[str]]:
        file = self._folder / service.unit
        if start and call("systemctl", "--user", "show-environment").returncode:
            raise OperatorError(
                "systemd's user manager does not answer here: log in as the user of the peer (not with `su` or `sudo`), or "
                "write the unit alone with --no-start. Without systemd, keep `swarmentum join` running in `tmux` or `screen`"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, systemd_unit(service).encode())
        if not start:
            return file, []
        needed("systemctl", "--user", "daemon-reload")
        needed("systemctl", "--user", "enable", service.unit)
        needed("systemctl", "--user", "restart", service.unit)
        lingers = call("loginctl", "enable-linger", str(os.getuid()))
        if not lingers.returncode:
            return file, []
        return file, [
            "The peer stops when you log out, because lingering is off. Turn it on: "
            f"sudo loginctl enable-linger {os.getuid()}"
        ]

    def remove(self, run_id: str) -> Path:
        file = self._folder / f"swarmentum-{run_id}.service"
        if not file.exists():
            raise OperatorError(f"{file}: is not there; `swarmentum service status` lists the services")
        call("systemctl", "--user", "disable", "--now", file.name)
        file.unlink()
        call("systemctl", "--user", "daemon-reload")
        return file

    def installed(self) -> list[Installed]:
        return [self._of(file) for file in sorted(self._folder.glob("swarmentum-*.service"))]

    def _of(self, file: Path) -> Installed:
        run_id = file.stem.removeprefix("swarmentum-")
        done = call("systemctl", "--user", "show", file.name, "-p", "ActiveState,SubState,ExecMainStatus,NRestarts")
        values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        if done.returncode or not values:
            state, detail = "unknown", (done.stderr.strip() or "systemd's user manager does not answer")
        else:
            state = values.get("ActiveState", "unknown")
            detail = (
                f"{values.get('SubState', '')}; last exit code {values.get('ExecMainStatus', '-')}, "
                f"started again {values.get('NRestarts', '-')} times"
            )
        return Installed(run_id, file, state, detail, f"journalctl --user -u {file.name} -f")


class Launchd:
    """launchd of macOS, for the user who is logged in."""

    def __init__(self) -> None:
        self._folder = at_home("~/Library/LaunchAgents")

    def install(self, service: Service, *, start: bool) -> tuple[Path, list[str]]:
        file, log = self._folder / f"{service.label}.plist", service.home / "service.log"
        supervisor = python_command("-m", "node.service.supervise", str(log))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, launch_agent(service, supervisor))
        if start:
            call("launchctl", "bootout", self._domain, str(file))
            needed("launchctl", "bootstrap", self._domain, str(file))
        return file, ["The peer stops when you log out: launchd starts it with your session."] if start else []

    def remove(self, run_id: str) -> Path:
        file = self._folder / f"{LABEL}.{run_id}.plist"
        if not file.exists():
            raise OperatorError(f"{file}: is not there; `swarmentum service status` lists the services")
        call("launchctl", "bootout", self._domain, str(file))
        file.unlink()
        return file

    def installed(self) -> list[Installed]:
        return [self._of(file) for file in sorted(self._folder.glob(f"{LABEL}.*.plist"))]

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    def _of(self, file: Path) -> Installed:
        words = plistlib.loads(file.read_bytes())["ProgramArguments"]
        done = call("launchctl", "print", f"{self._domain}/{file.stem}")
        state = next(
            (line.split("=", 1)[1].strip() for line in done.stdout.splitlines() if "state =" in line), "not loaded"
        )
        return Installed(file.stem.removeprefix(f"{LABEL}."), file, state, "", f"tail -f {words[3]}")


def manager() -> Manager:
    """This machine's. OperatorError on other systems."""
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform.startswith("linux"):
        return Systemd()
    raise OperatorError(f"services are for Linux (systemd) and macOS (launchd), and this is {sys.platform}")
