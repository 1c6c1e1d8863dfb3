"""What the service manager of a machine is told about a peer: a systemd user unit, or a LaunchAgent of macOS. Pure.

A peer is started again after a failure, and not after an end that another start would not change: wrong settings (2), refused
(4), replicas differ (5). A peer that left because its owner or the system stopped it (130) has not failed.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
