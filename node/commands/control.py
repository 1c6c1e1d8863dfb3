"""The commands for the owner of a peer on this machine: `swarmentum me`, `pause`, `resume`, `set`, `finish` and `leave`, which
call the control door of a running one, and `swarmentum service`. They load no torch and ask no coordinator.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from node.commands.options import EXIT_CODES, Json, SettingCommand, given_settings, link_from
from node.control import control_server, words
from node.control.control_server import call
from protos.disk import at_home, replace_bytes, writing
from protos.errors import OperatorError, SwarmentumError
from protos.process import python_command
from protos.text import amount, as_line, duration, print_json
from protos.version import Program

Home = Annotated[Path | None, typer.Option(help="The peer's home folder (default: as for `swarmentum join`).")]
Device = Annotated[
    str | None,
    typer.Option(
        help="If one `join` runs a peer on each of several devices: the device of one peer, such as cuda:1 (default: all)."
    ),
]
OUTCOME_WORDS = {"accepted": "green", "paused": "yellow", "skipped": "red", "refused": "red", "late": "yellow"}


def me(
    home: Home = None,
    device: Device = None,
    steps: Annotated[int, typer.Option(min=1, max=100, help="How many of the last steps to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Show what a peer on this machine does: its step, its share, and whether its votes of the last steps count."""
    _each(home, device, "me", print_json if as_json else _show, steps=steps)


def pause(
    for_: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="For so long, such as 90m, 2h or 1d.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="HH:MM", help="Until this time of the day.")] = None,
    home: Home = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Pause the training of a peer on this machine. The peer stays in the run, follows it, and keeps its place."""
    if until is not None:
        from node.donor.owner_machine import zone_fault

        if fault := zone_fault(os.environ):
            raise OperatorError(f"--until {until}: {fault}, or give --for")
    seconds = control_server.seconds_of(for_, until, datetime.now())  # noqa: DTZ005 - the owner's clock on the wall
    again = "`swarmentum resume` lets it train again"
    if seconds is not None:
        again = f"it trains again in {duration(seconds)}, or after `swarmentum resume`"
    ends = {} if seconds is None else {"seconds": seconds}
    said = f"paused at step {{step}}; {again}"
    _each(home, device, "pause", print_json if as_json else _says(said), **ends)


def resume(home: Home = None, device: Device = None, as_json: Json = False) -> None:
    """Let a paused peer train again."""
    _each(home, device, "resume", print_json if as_json else lambda told: print(words.resumed(told)))


def finish(home: Home = None, device: Device = None, as_json: Json = False) -> None:
    """End a peer on this machine after its open step, so that its votes still count."""
    said = "ending after the open step (the last one applied is {step})"
    _each(home, device, "finish", print_json if as_json else _says(said))


def leave(home: Home = None, device: Device = None, as_json: Json = False) -> None:
    """End a peer on this machine now, as Ctrl-C in its terminal does. `finish` waits for the open step."""
    _each(home, device, "leave", print_json if as_json else _says("leaving at step {step}"))


def set_(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="The setting; without it, all are shown.")] = None,
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="[VALUE]", help="Its new value; off: no limit; default: forget the value that `set` stored."
        ),
    ] = None,
    home: Home = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Change a setting of a running peer on this machine, and keep it. Without a value, show what can be changed.

    Example: `swarmentum set upload_mbit 5`. `swarmentum settings` prints all settings, also those that need a restart.
    """

    def show(told: dict[str, Any]) -> None:
        if value is None:
            _show_settings(told["settings"])
            return
        [row] = told["settings"]
        kept = "a restart keeps it" if row["kept"] else "as the peer was started"
        print(f"{row['key']} = {row['shown']}; {told['note'] or kept}")

    given = {name: text for name, text in (("key", key), ("value", value)) if text is not None}
    _each(home, device, "set", print_json if as_json else show, **given)


def _each(
    given: Path | None, device: str | None, command: str, show: Callable[[dict[str, Any]], None], **values: Any
) -> None:
    """Ask the peer of the home that `swarmentum join` would have here, or the peers of several devices; show each answer.

    A peer that does not answer keeps no other from its answer; the first such error is raised at the end.
    """
    from node.commands.join import homes_of
    from node.config import load_settings

    home, wrong = load_settings(home=given).home, list[SwarmentumError]()
    homes = homes_of(home, device)
    for folder in homes:
        try:
            told = call(folder, command, **values)
        except SwarmentumError as error:
            wrong.append(error)
            continue
        if folder == home:
            show(told)
        elif show is print_json:
            print_json({**told, "home": str(folder)})
        else:
            print(f"{folder.name}:", end="\n" if command in ("me", "set") else " ")
            show(told)
    if wrong:
        raise wrong[0]


def _says(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda told: print(text.format(**told))


def _show_settings(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "what it means", box=None)
    for row in rows:
        by = " (by set)" if row["kept"] else ""
        table.add_row(row["key"], Text(f"{row['shown']}{by}"), Text(f"{row['meaning']}\nValues: {row['expected']}"))
    Console().print(table)


def _show(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from protos.text import printable

    loss = "no loss yet" if told["loss"] is None else f"loss {told['loss']:.4g}"
    print(f"run      {words.cut(told.get('name', told['run']), 64)}: {words.progress(told)}, {loss}")
    print(f"state    {words.state(told)[0]}")
    print(f"time     {words.clock(told)}")
    print(f"given    {words.given(told)}")
    print(f"traffic  {amount(told['wire_bytes_sent'])} up, {amount(told['wire_bytes_received'])} down")
    month = told["month"]
    up, down = words.monthly(month["up"], month["upload_gb"]), words.monthly(month["down"], month["download_gb"])
    print(f"month    {up} up, {down} down")
    print(f"device   {words.device(told)}")
    print(f"reached  {words.link(told['access'])}")
    print(f"peers    {words.peers(told['access'], told['last'])}")
    for peer, why in told["doors"].items():
        print(f"refused  the last payload, by the peer {words.cut(peer, 16)}: {words.cut(why, 40).replace('_', ' ')}")
    table = Table("step", "votes", "samples", "why", title="the last steps, the newest first", title_justify="left")
    for fate in told["last"]:
        outcome = Text(fate["outcome"], style=OUTCOME_WORDS.get(fate["outcome"], ""))
        samples = f"{fate['samples']} of {fate['all_samples']}"
        table.add_row(str(fate["step"]), outcome, samples, Text(printable(fate["why"], 200)))
    Console().print(table)


# `swarmentum service`: a peer that starts with the machine, is started again after a failure, and ends with its run. The
# invite goes into a file that only its owner can read. Refuses options that `swarmentum join` would refuse.


PRIVATE = 0o600
KEPT_VARIABLES = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")
KEPT_PREFIX = "SWARMENTUM_"
"""Settings of the person's shell that a peer needs as a service, too."""

service = typer.Typer(cls=Program, help="Run a peer as a service: it starts with the machine.", no_args_is_help=True)


@service.command(
    "install", epilog=EXIT_CODES, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
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
    try:
        where, warnings = here.install(service, start=start)
    except OperatorError:
        if all(it.run != run_id for it in here.installed()):
            file.unlink()  # there may be a ticket in the link, and no `uninstall` would find it
        raise
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


@service.command("status", epilog=EXIT_CODES)
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


@service.command("uninstall", epilog=EXIT_CODES)
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
    found = [one for one in ids if run is None or (run and one.startswith(run))]  # an unset variable names none
    if len(found) != 1:
        raise OperatorError(
            f"{len(found)} services fit {run or 'no name'!r}; installed are: {', '.join(ids) or 'none'}"
        )
    file = here.remove(found[0])
    _link_file(found[0]).unlink(missing_ok=True)
    print(as_line({"run": found[0], "removed": str(file)}) if as_json else f"{file}: removed.")


def _link_file(run_id: str) -> Path:
    """The file with the invite of a service: a unit may be read by every user, and the link may hold a ticket."""
    return at_home("~/.swarmentum/services") / f"{run_id}.invite"


def _home_of(link: str, arguments: list[str]) -> Path:
    """The home that `swarmentum join` would take with these options. Wrong options end the command, as they end `join`."""
    from node.commands.join import join
    from node.config import load_settings

    joins = typer.Typer(add_completion=False)
    joins.command("join", cls=SettingCommand)(join)
    values: dict[str, Any] = typer.main.get_command(joins).make_context("swarmentum join", [link, *arguments]).params
    return load_settings(**given_settings({"home": values["home"]}, values["set_"] or [])).home
