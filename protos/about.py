"""What a person asks of any program first: `--version`, `version` and `help`. Loads no torch: pip wrote the versions."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Final

import typer
from typer.core import TyperGroup

from protos.errors import OperatorError
from protos.log import FORMAT_VERSION
from protos.version import software_version

LIBRARIES: Final = ("torch", "transformers", "hivemind", "grpcio")


def versions() -> dict[str, str]:
    """This program, the format of the wire and of runs that it speaks, and the libraries that decide whether it runs."""
    found = {"swarmentum": software_version(), "format": str(FORMAT_VERSION), "Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found | {"system": f"{platform.system()} {platform.machine()}"}


def add_about(app: typer.Typer, panel: str | None = None) -> None:
    """Give a program `--version`, `version` and `help`, in a panel of its help."""
    app.callback()(_program)
    app.command("version", rich_help_panel=panel)(_version)
    app.command("help", rich_help_panel=panel)(_help)


def _said(asked: bool) -> None:
    if asked:
        print("\n".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


def _program(
    asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_said, help="Print the versions, and end.")
    ] = False,
) -> None:
    """Typer calls this before each command."""


def _version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the versions of this program, of the format that it speaks, and of its libraries: an issue should name them."""
    if as_json:
        print(json.dumps(versions()))
    else:
        _said(True)


def _help(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Of this command.")] = None,
) -> None:
    """Show what the program can do, or how a command is used."""
    at = context.find_root()
    for word in words or ():
        group = at.command
        found = group.get_command(at, word) if isinstance(group, TyperGroup) else None
        if found is None:
            raise OperatorError(f"there is no command {word!r}; `{at.command_path} --help` lists what there is")
        at = typer.Context(found, info_name=word, parent=at)
    print(at.command.get_help(at))
