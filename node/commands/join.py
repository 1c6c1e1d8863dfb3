"""The commands that take part in a run: `swarmentum join` trains, `swarmentum anchor` applies every step without training."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

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
from node.imports import many_imports
from protos.console import configure_logging
from protos.process import EXIT_INTERRUPTED, leave, leaving_at_once

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
    from node.ranks.channel import launched
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
    from node.commands.several_devices import given_to, run
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
    from node.ranks.channel import launched

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
