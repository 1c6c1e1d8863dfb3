"""The commands that take part in a run: `swarmentum join` trains, `swarmentum anchor` applies every step without training.

`join --device cuda:0,cuda:1` starts one peer for each of several devices: each has its own key, state and votes. The peers'
homes are folders of the home. A file names them, and is locked while the peers run, so the owner's commands find all of them,
or the one of a device. The command refuses to be a peer itself then, and to share anything between the peers.
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
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NoReturn

import structlog
import typer

from node.commands.options import (
    OUTPUT,
    PANEL_OF,
    STORAGE,
    InviteFile,
    InviteOrStdin,
    Json,
    Settings,
    Verbose,
    link_from,
    need_node_extra,
    with_settings,
)
from node.earlier_settings import TCP_ALONE
from node.imports import many_imports
from protos.console import configure_logging, lock_home
from protos.disk import remove_left, replace_bytes
from protos.errors import OperatorError
from protos.process import EXIT_INTERRUPTED, asked_to_stop, guarded, leave, leaving_at_once, python_command

if TYPE_CHECKING:
    from node.config import PeerSettings
    from node.terminal.stage import Stage

NAME_CHARACTERS_MAX = 64


@leaving_at_once()  # a signal ends the program at once, until it has something to save and handles signals itself
@with_settings(*PANEL_OF)
def join(
    settings: Settings,
    invite: InviteOrStdin = None,
    invite_file: InviteFile = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Folder for the Hugging Face model at the end of the run.", rich_help_panel=STORAGE),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Print log lines instead of the terminal view, also on a terminal.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Take part in a run until it is finished. Ctrl-C leaves cleanly; the other peers go on.

    Example: `swarmentum join swarmentum://... --upload-mbit 5 --export ./model`. Check this machine first: `swarmentum doctor`.
    """
    need_node_extra()
    # A donor's machine has other work too, so waiting threads sleep instead of spinning. OpenMP reads this when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from node.ranks import launched
    from node.terminal.stage import Stage

    launch = launched(os.environ)
    stage = Stage(wanted=not (plain or as_json or launch is not None))  # other ranks write to the same terminal
    configure_logging(as_json=as_json, verbose=verbose, target=stage, seen=stage.recent)
    link = _read(invite, invite_file, as_json=as_json, anchor=False) if launch is None or not launch.rank else ""
    chosen = settings()
    if "," in chosen.device:
        _one_each(link, chosen, settings, export, alone=launch is None, as_json=as_json, verbose=verbose)
    if launch is not None and launch.rank:
        with many_imports():
            from node.ranks.shard import follow

        follow(launch, chosen)
        return
    _take_part(link, chosen, export, stage, as_json=as_json)


def _one_each(
    link: str,
    chosen: PeerSettings,
    settings: Settings,
    export: Path | None,
    *,
    alone: bool,
    as_json: bool,
    verbose: bool,
) -> NoReturn:
    """A peer for each device, in processes of their own."""
    from protos.errors import OperatorError

    if not alone or export is not None:
        what = "--export" if alone else "torchrun"
        raise OperatorError(f"{what} needs one peer, and --device {chosen.device} starts several; name one device")
    words = ["--plain", *(["--json"] if as_json else []), *(["--verbose"] if verbose else [])]
    raise typer.Exit(run(link, chosen, given_to(settings), words))


def _read(invite: str | None, invite_file: Path | None, *, as_json: bool, anchor: bool) -> str:
    """The link, checked and answered on the screen at once: torch takes seconds to load, a damaged link none to see."""
    from protos.invite import Invite
    from protos.text import printable

    link = link_from(invite, invite_file)
    told = Invite.parse(link) if anchor else Invite.parse(link).public("`swarmentum join`")
    if not as_json:
        name, coordinators = printable(told.run_name, NAME_CHARACTERS_MAX), ", ".join(told.coordinators)
        print(f"Run {name}: loading torch, then asking {printable(coordinators, 200)} ...", file=sys.stderr, flush=True)
    return link


def _take_part(
    link: str,
    settings: PeerSettings,
    export: Path | None,
    stage: Stage,
    *,
    as_json: bool,
    anchor: bool = False,
) -> NoReturn:
    """Show the person what the run requests, take part, and print the result."""
    with many_imports():
        from node.app import Outcome
        from node.app import join as join_run
    from node.admission.consent import MachineRequest, must_ask
    from node.commands import options
    from node.control import words
    from node.full_disk import outlasting
    from node.owner_commands import Stop
    from node.ranks import launched

    stop, log = Stop(stage.close), structlog.get_logger("peer")

    def agree(asked: MachineRequest) -> None:
        if not as_json:
            options.show(asked)
        if must_ask(asked, settings, can_ask=not as_json and options.can_be_asked()):
            options.ask(asked)

    def take_part(first: bool) -> Outcome:
        asks = agree if first else options.agreed_before
        return join_run(link, settings, export, asks, anchor=anchor, stage=stage, stop=stop)

    if launched(os.environ) is None:
        outcome = outlasting(take_part, settings.home, log, settings.metrics_listen, stop)
    else:
        outcome = take_part(True)  # the other ranks have ended, and torchrun ends this one
    summary = outcome.summary
    if summary.checkpoint and outcome.exit_code == 0:
        from node.commands.copies import add_credits

        add_credits(link, Path(summary.checkpoint), summary.step)
    if as_json:
        print(summary.json(), flush=True)
    else:
        kept = f"; model: {summary.checkpoint}" if summary.checkpoint else ""
        print(f"step {summary.step}, state digest {summary.state_digest[:16]}{kept}", flush=True)
        print(options.fitted(words.farewell(asdict(summary), anchor=anchor)), flush=True)
    if outcome.exit_code == EXIT_INTERRUPTED:
        leave()  # everything is saved and closed; the interpreter's own shutdown would take over a second
    raise typer.Exit(outcome.exit_code)


@leaving_at_once()  # a signal ends the program at once, until it has something to save and handles signals itself
@with_settings(
    "home", "owner", "yes", "allow_data", "allow_code", "nice", "threads", "listen", "mirror",
    home="~/.swarmentum/anchor", device="cpu",
)  # fmt: skip
def anchor(
    settings: Settings,
    invite: InviteOrStdin = None,
    invite_file: InviteFile = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run an anchor: a peer that applies every step without training, and whose state digests count. Needs no GPU.

    The run's operator starts it beside the coordinator. An anchor serves the newest state, so that peers can always join.
    With `--mirror` it also copies the agreed states to a folder or a bucket, from where peers take them without its uplink.
    """
    need_node_extra()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from node.terminal.stage import Stage

    stage = Stage()  # an anchor runs unattended
    configure_logging(as_json=as_json, verbose=verbose, target=stage, seen=stage.recent)
    link = _read(invite, invite_file, as_json=as_json, anchor=True)
    _take_part(link, settings(), None, stage, as_json=as_json, anchor=True)


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
        guarded(*python_command("-m", "node", "join", "-", *words, *pairs)),
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
