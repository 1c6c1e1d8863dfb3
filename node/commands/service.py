"""`swarmentum service`: a peer that starts with the machine, is started again after a failure, and ends with its run.

The invite goes into a file that only its owner can read. Refuses options that `swarmentum join` would refuse.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from node.commands.options import EXIT_CODES, Json, SettingCommand, given_settings, link_from
from protos.disk import replace_bytes, writing
from protos.errors import OperatorError
from protos.process import python_command
from protos.text import as_line, print_json

PRIVATE = 0o600
KEPT_VARIABLES = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")
KEPT_PREFIX = "SWARMENTUM_"
"""Settings of the person's shell that a peer needs as a service, too."""

app = typer.Typer(help="Run a peer as a service: it starts with the machine.", no_args_is_help=True)


@app.command("install", epilog=EXIT_CODES, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def install(
    context: typer.Context,
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="The invite link, or - to read it from stdin.")],
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start it now and with the machine.")] = True,
    as_json: Json = False,
) -> None:
    """Install a service that joins a run. Options of `swarmentum join` may follow the link.

    Nobody can be asked later: add --yes if the run downloads something, and --allow-code or --allow-data if it needs them.
    """
    from node.service.manager import Service, manager
    from protos.invite import Invite

    here, link = manager(), link_from(invite)
    told = Invite.parse(link).public("A service that joins")
    home = _home_of(link, context.args)
    run_id = told.run_id.hex()[:16]
    file = _link_file(run_id)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(parents=True, exist_ok=True)
        replace_bytes(file, link.encode() + b"\n", mode=PRIVATE)
    command = python_command("-m", "node", "join", "--invite-file", str(file), *context.args)
    kept = (*KEPT_VARIABLES, *(name for name in os.environ if name.startswith(KEPT_PREFIX)))
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    service = Service(run_id, told.run_name, command, home, Path.cwd(), {"PYTHONUNBUFFERED": "1", **environment})
    where, warnings = here.install(service, start=start)
    if as_json:
        print_json(
            {"run": run_id, "file": str(where), "invite_file": str(file), "started": start, "warnings": warnings}
        )
        return
    print(f"{where}: written." + ("" if start else " Nothing is started, as --no-start says."))
    for warning in warnings:
        print(warning, file=sys.stderr)
    if start:
        print(
            "The peer is started, now and with this machine. `swarmentum service status` shows it, `swarmentum me` its votes."
        )


@app.command("status", epilog=EXIT_CODES)
def status(as_json: Json = False) -> None:
    """Show the peers that are services of this user."""
    from node.service.manager import manager

    found = manager().installed()
    if as_json:
        print_json([{**asdict(it), "file": str(it.file)} for it in found])
        return
    if not found:
        print("No peer is a service here. `swarmentum service install INVITE` makes one.")
    for it in found:
        print(f"{it.run}  {it.state}" + (f" ({it.detail})" if it.detail else ""))
        print(f"  file: {it.file}")
        print(f"  log:  {it.logs}")


@app.command("uninstall", epilog=EXIT_CODES)
def uninstall(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="The start of the run's id; not needed if there is one service."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Stop a service, and remove it. The peer's identity, momentum and snapshots stay in its home."""
    from node.service.manager import manager

    here = manager()
    ids = [it.run for it in here.installed()]
    found = [one for one in ids if one.startswith(run or "")]
    if len(found) != 1:
        raise OperatorError(
            f"{len(found)} services fit {run or 'no name'!r}; installed are: {', '.join(ids) or 'none'}"
        )
    file = here.remove(found[0])
    _link_file(found[0]).unlink(missing_ok=True)
    print(as_line({"run": found[0], "removed": str(file)}) if as_json else f"{file}: removed.")


def _link_file(run_id: str) -> Path:
    """The file with the invite of a service: a unit may be read by every user, and the link may hold a ticket."""
    return Path.home() / ".swarmentum" / "services" / f"{run_id}.invite"


def _home_of(link: str, arguments: list[str]) -> Path:
    """The home that `swarmentum join` would take with these options. Wrong options end the command, as they end `join`."""
    from node.commands.join import join
    from node.config import load_settings

    joins = typer.Typer(add_completion=False)
    joins.command("join", cls=SettingCommand)(join)
    values: dict[str, Any] = typer.main.get_command(joins).make_context("swarmentum join", [link, *arguments]).params
    return load_settings(**given_settings({"home": values["home"]}, values["set_"] or [])).home
