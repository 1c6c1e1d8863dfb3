"""`swarmentum export`: the model of a run as it is now, in a folder that Hugging Face loads. `swarmentum push`: to the hub.

Both train nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import structlog
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
from protos.errors import NetworkError, OperatorError, RefusedError
from protos.invite import Invite
from protos.signals import EXIT_INTERRUPTED, leave, leaving_at_once
from protos.start import RUN_DIGITS_SHOWN

LEDGER_STEPS_MAX = 20_000
"""The log of a longer run (some 3 kB a step) is not read for the card."""
Public = Annotated[bool, typer.Option("--public", help="Make a new repository of the hub public.")]


@leaving_at_once()
def push(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="An export: of this command, or of `join --export`.")
    ],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="owner/name of a model on the hub.")],
    public: Public = False,
    as_json: Json = False,
) -> None:
    """Upload an export to the Hugging Face hub. The same command goes on with an upload that broke off."""
    need_node_extra()
    configure_logging(as_json=as_json)
    url = _push(folder, repo_id, public=public, as_json=as_json)
    if as_json:
        print(json.dumps({"hub": url}))


def _push(folder: Path, repo_id: str, *, public: bool, as_json: bool) -> str:
    from node.commands import hub

    url = hub.push(folder, repo_id, public=public)
    if not as_json:
        print(f"{repo_id}: {url}", flush=True)
    return url


def _check_hub(repo_id: str, run_id: str) -> None:
    """Known before a peer joins, so that no work is lost on it."""
    from node.commands import hub

    hub.check(repo_id, run_id)


def _add_ledger(link: str, folder: Path, step: int) -> None:
    """Put the run's ledger into the card. Without it the export is whole, too."""
    log = structlog.get_logger("peer")
    if step > LEDGER_STEPS_MAX:
        log.info("the card has no ledger: the log is long; `swarmentum ledger INVITE` shows it", step=step)
        return
    from node.archive.ledger import of
    from node.commands.card import add_ledger

    try:
        add_ledger(folder, of(link).values())
    except (NetworkError, RefusedError) as error:
        log.warning("the card has no ledger: the log cannot be read", step=step, why=str(error))


@leaving_at_once()
def export(
    invite: InviteLink,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="A new folder, or one of an earlier export (default with a hub: in --home)."
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="REPO_ID", help="Also upload it to the Hugging Face hub, as owner/name; private unless --public."
        ),
    ] = None,
    public: Public = False,
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
    run_id = Invite.parse(link).run_id.hex()
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
    if folder is None:
        if push_to_hub is None:
            raise OperatorError("give a FOLDER for the model, or --push-to-hub REPO_ID, or both")
        folder = settings.home / "exports" / run_id[:RUN_DIGITS_SHOWN]
    if push_to_hub is not None:
        _check_hub(push_to_hub, run_id)
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
    _add_ledger(link, folder, summary.step)
    if not as_json:
        print(f"{summary.checkpoint}: step {summary.step}, state digest {summary.digest[:16]}", flush=True)
    url = None if push_to_hub is None else _push(folder, push_to_hub, public=public, as_json=as_json)
    if as_json:
        print(json.dumps({**asdict(summary), "hub": url}), flush=True)
    raise typer.Exit(outcome.exit_code)
