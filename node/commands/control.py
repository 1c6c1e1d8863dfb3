"""The commands for the owner of a running peer: `swarmentum me`, `pause`, `resume`, `set`, `finish` and `leave`.

They call the peer's control door on this machine. They load no torch and ask no coordinator.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from node.commands.options import Json
from node.control import moments, words
from node.control.control_server import call
from protos.amounts import amount, duration
from protos.json_line import as_line, print_json

Home = Annotated[Path | None, typer.Option(help="The peer's home folder (default: as for `swarmentum join`).")]
OUTCOME_WORDS = {"accepted": "green", "paused": "yellow", "skipped": "red", "refused": "red", "late": "yellow"}


def me(
    home: Home = None,
    steps: Annotated[int, typer.Option(min=1, max=100, help="How many of the last steps to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Show what a peer on this machine does: its step, its share, and what became of its votes in each of the last steps."""
    told = call(_home(home), "me", steps=steps)
    if as_json:
        print_json(told)
    else:
        _show(told)


def pause(
    for_: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="For so long, such as 90m, 2h or 1d.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="HH:MM", help="Until this time of the day.")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Stop the training of a peer on this machine. The peer stays in the run, applies the log, and keeps its place."""
    seconds = moments.seconds_of(for_, until, datetime.now())  # noqa: DTZ005 - the owner's clock on the wall
    again = "`swarmentum resume` lets it train again"
    if seconds is not None:
        again = f"it trains again in {duration(seconds)}, or after `swarmentum resume`"
    ends = {} if seconds is None else {"seconds": seconds}
    _do("pause", home, f"paused at step {{step}}; {again}", as_json=as_json, **ends)


def resume(home: Home = None, as_json: Json = False) -> None:
    """Let a paused peer train again."""
    told = call(_home(home), "resume")
    print(as_line(told) if as_json else words.resumed(told))


def finish(home: Home = None, as_json: Json = False) -> None:
    """Let a peer end after the open step, when the log has decided about its votes."""
    _do("finish", home, "ending after the open step (the last one applied is {step})", as_json=as_json)


def leave(home: Home = None, as_json: Json = False) -> None:
    """Let a peer end now, as Ctrl-C in its terminal does."""
    _do("leave", home, "leaving at step {step}", as_json=as_json)


def set_(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="The setting; without it, all are shown.")] = None,
    value: Annotated[
        str | None,
        typer.Argument(metavar="[VALUE]", help="Its new value; off: no limit; default: forget what `set` kept."),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Change a setting of a peer on this machine while it runs, and keep it. Without a value, show the settings."""
    folder = _home(home)
    told = call(folder, "set", **({} if key is None else {"key": key}), **({} if value is None else {"value": value}))
    if as_json:
        print_json(told)
    elif value is None:
        _show_settings(told["settings"])
    else:
        [row] = told["settings"]
        kept = "a restart keeps it" if row["kept"] else "as the peer was started"
        print(f"{row['key']} = {row['shown']}; {told['note'] or kept}")


def _home(given: Path | None) -> Path:
    """The home that `swarmentum join` would have here, with the same flags, environment and swarmentum.toml."""
    from node.config import load_settings

    return load_settings(home=given).home


def _do(command: str, home: Path | None, words: str, *, as_json: bool, **given: float) -> None:
    told = call(_home(home), command, **given)
    print(as_line(told) if as_json else words.format(**told))


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
    print(f"run      {words.cut(told['run'], 64)}: {words.progress(told)}, {loss}")
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
        print(f"refused  the last payload at the door of {words.cut(peer, 16)}: {words.cut(why, 40).replace('_', ' ')}")
    table = Table("step", "votes", "samples", "why", title="the last steps, the newest first", title_justify="left")
    for fate in told["last"]:
        outcome = Text(fate["outcome"], style=OUTCOME_WORDS.get(fate["outcome"], ""))
        samples = f"{fate['samples']} of {fate['all_samples']}"
        table.add_row(str(fate["step"]), outcome, samples, Text(printable(fate["why"], 200)))
    Console().print(table)
