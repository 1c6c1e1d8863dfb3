"""One peer for each of several devices, started by one `join --device cuda:0,cuda:1`: each has its own key, state and votes.

The peers' homes are folders of the home. A file names them, and is locked while the peers run, so the owner's commands find all
of them, or the one of a device. Refuses to be a peer itself, and to share anything between the peers.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from node.commands.processes import GUARD
from node.earlier_settings import TCP_ALONE
from protos.console import lock_home
from protos.disk import remove_left, replace_bytes
from protos.errors import OperatorError
from protos.process import EXIT_INTERRUPTED, asked_to_stop, python_command

if TYPE_CHECKING:
    from node.config import PeerSettings

FILE: Final = "devices.json"
DEVICES_MAX: Final = 16
BETWEEN: Final = ","
LOOK_SECONDS: Final = 0.5
BY_SIGNAL: Final = 128


def devices_of(settings: PeerSettings) -> list[str]:
    """The devices that `device` names; one is the usual peer. OperatorError."""
    found = [part.strip() for part in settings.device.split(BETWEEN) if part.strip()]
    if not found:
        raise OperatorError(f"--device {settings.device} names no device; give one such as cuda:0, or auto")
    if len(found) > DEVICES_MAX:
        raise OperatorError(
            f"--device names {len(found)} devices, at most {DEVICES_MAX}; start the others with another --home"
        )
    twice = [it for it in found if it != "cpu" and found.count(it) > 1]
    if twice:
        raise OperatorError(f"--device names {twice[0]} twice: two peers on one GPU would only share it")
    return found


def homes_of(home: Path, device: str | None = None) -> list[Path]:
    """The homes of the peers that a `join` with this home runs: its own, or one for each device. OperatorError."""
    named = _named(home / FILE)
    if not named:
        if device is not None:
            raise OperatorError(f"--device {device}: no `join` for several devices runs with the home {home}")
        return [home]
    folders = [home / folder for folder, name in named.items() if device in (None, folder, name)]
    if not folders:
        raise OperatorError(f"--device {device}: no peer of {home} has it; there are {', '.join(named)}")
    return folders


def _named(path: Path) -> dict[str, str]:
    """Folder and device of each peer; none if the process that wrote the file has ended. OperatorError."""
    try:
        with path.open() as file:
            if not _is_held(file):
                return {}
            return {str(folder): str(device) for folder, device in json.load(file).items()}
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise OperatorError(f"{path}: this user may not read it; run this as the user who owns it") from error
    except (OSError, ValueError, AttributeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}; end its `join`, and start it again") from error


def _is_held(file: IO[str]) -> bool:
    """Whether the process that wrote the file runs. Its number would not do: after a restart another process may have it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def hold(path: Path, named: Mapping[str, str]) -> IO[str]:
    """Name the peers' folders and devices until this process ends, however it ends."""
    replace_bytes(path, json.dumps(named).encode())
    file = path.open()
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def run(link: str, settings: PeerSettings, given: Mapping[str, Any], words: list[str]) -> int:
    """Start a peer for each device, and wait for all. Returns the exit code: 0, 130, or that of the first that failed.

    `given`: the settings of the command line, which the peers get, too. `words`: other options of `join`.
    """
    devices = devices_of(settings)
    for key in ("listen", "metrics_listen"):
        value = getattr(settings, key)
        if value is not None and not value.removesuffix(TCP_ALONE).endswith(":0"):
            raise OperatorError(f"{key} = {value}: several peers cannot have one port; leave {key} out")
    lock, named = lock_home(settings.home, "peer"), _folders(devices)
    try:
        with hold(settings.home / FILE, named):
            return _waited([_started(link, settings.home / folder, it, given, words) for folder, it in named.items()])
    finally:
        remove_left(settings.home / FILE)
        lock.close()


def _folders(devices: list[str]) -> dict[str, str]:
    """A folder of its own for each device: cuda-0, cuda-1, cpu, cpu-2."""
    found: dict[str, str] = {}
    for device in devices:
        plain = "".join(c if c.isalnum() else "-" for c in device)
        again = sum(name == device for name in found.values())
        found[f"{plain}-{again + 1}" if again else plain] = device
    return found


def _started(link: str, home: Path, device: str, given: Mapping[str, Any], words: list[str]) -> subprocess.Popen[str]:
    own = {**{key: it for key, it in given.items() if key not in ("home", "device")}, "home": home, "device": device}
    pairs = [word for key, value in own.items() for word in ("--set", f"{key}={_text(value)}")]
    child = subprocess.Popen(
        (*GUARD, str(os.getpid()), *python_command("-m", "node", "join", "-", *words, *pairs)),
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C comes from here, once
    )
    assert child.stdin is not None
    with child.stdin as pipe:  # not in the command, which every user of the machine can read
        pipe.write(link)
    return child


def _text(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps([str(it) for it in value])
    return str(value).lower() if isinstance(value, bool) else str(value)


def _waited(peers: list[subprocess.Popen[str]]) -> int:
    """Until every peer has ended. A peer that fails stops no other. A stop signal goes to each."""

    def stop(_number: int) -> None:
        for peer in peers:
            if peer.poll() is None:
                peer.send_signal(signal.SIGINT)

    codes: dict[int, int] = {}
    with asked_to_stop(stop):
        while len(codes) < len(peers):
            for number, peer in enumerate(peers):
                if number in codes:
                    continue
                try:
                    code = peer.wait(LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
                codes[number] = BY_SIGNAL - code if code < 0 else code  # as a shell says it: 130 for SIGINT
                if codes[number] not in (0, EXIT_INTERRUPTED):
                    print(
                        f"the peer of device number {number + 1} ended with exit code {codes[number]}", file=sys.stderr
                    )
    failed = [code for code in codes.values() if code not in (0, EXIT_INTERRUPTED)]
    return (failed or [EXIT_INTERRUPTED if EXIT_INTERRUPTED in codes.values() else 0])[0]


def given_to(settings: Any) -> dict[str, Any]:
    """The settings of a command line, from the partial call that loads them."""
    return dict(settings.keywords) if isinstance(settings, functools.partial) else {}
