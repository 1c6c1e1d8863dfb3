"""`swarmentum export`: the model of a run as it is now, in a folder that Hugging Face loads. Trains nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from node.commands.options import (
    AllowCode,
    Bootstrap,
    Home,
    InviteLink,
    Json,
    Listen,
    Reachability,
    Relays,
    Threads,
    Verbose,
    Yes,
    need_node_extra,
)
from node.imports import many_imports
from protos.console import configure_logging
from protos.signals import EXIT_INTERRUPTED, leave, leaving_at_once


@leaving_at_once()
def export(
    invite: InviteLink,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, or one of an earlier export.")],
    home: Home = None,
    threads: Threads = None,
    listen: Listen = None,
    bootstrap: Bootstrap = None,
    relays: Relays = None,
    reachability: Reachability = None,
    allow_code: AllowCode = False,
    yes: Yes = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a run's model as it is now to a folder, with a card that says how to verify it. Needs no GPU and no data."""
    need_node_extra()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    configure_logging(as_json=as_json, verbose=verbose)
    from node.commands import person
    from node.config import load_settings

    link = person.link_from(invite)
    settings = load_settings(
        home=home or Path.home() / ".swarmentum" / "export",
        device="cpu",
        threads=threads,
        listen=listen,
        bootstrap=bootstrap,
        relays=relays,
        reachability=reachability,
        allow_code=allow_code or None,
        yes=yes or None,
    )
    with many_imports():
        from node.app import join
    from node.commands.consent import Request, must_ask

    def agree(asked: Request) -> None:
        if must_ask(asked, settings, can_ask=not as_json and person.can_be_asked()):
            person.show(asked)
            person.ask(asked)

    outcome = join(link, settings, folder, agree, copies=True)
    if outcome.exit_code == EXIT_INTERRUPTED:
        leave()
    summary = outcome.summary
    print(
        summary.json() if as_json else f"{summary.checkpoint}: step {summary.step}, state digest {summary.digest[:16]}"
    )
    raise typer.Exit(outcome.exit_code)
