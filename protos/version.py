"""Which programs understand each other: the format of a run, and the releases of swarmentum that know a format.

A run has one format for life (Genesis.format_version). Refuses nothing itself: `misfit` gives the reason, and both sides of a
join refuse with it. Pure, but for `software_version`, which reads the version that is installed.

What a person asks of any program first (`--version`, `version`, `help`) is here, too. It loads no torch: pip wrote the
versions.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from protos.errors import OperatorError
from protos.log import FORMAT_VERSION
from protos.text import printable
from protos.v1 import log_pb2

RELEASES: Mapping[int, str] = {1: "0.1.0"}
"""The first release that knows a format."""

UNNAMED_FORMAT = 1
"""The format of a peer that names none: such peers are older than the field."""

VERSION_CHARACTERS_MAX = 32


def software_version() -> str:
    """This package's version."""
    try:
        return version("swarmentum")
    except PackageNotFoundError:
        return "unknown"


def release_of(genesis: log_pb2.Genesis) -> str:
    """The first release that can take part in a run, as its genesis says; else as this program knows."""
    named = printable(genesis.software_version_min, VERSION_CHARACTERS_MAX)
    return named or RELEASES.get(genesis.format_version, "")


def misfit(genesis: log_pb2.Genesis, speaks: int, installed: str) -> str:
    """Why a peer that speaks this format, with this release, cannot take part, and what to install; empty: it can.

    A format of 0 in a genesis is one that nobody wrote: only tests have it, and it counts as the first.
    """
    needs, installed = (
        genesis.format_version or UNNAMED_FORMAT,
        printable(installed, VERSION_CHARACTERS_MAX) or "unknown",
    )
    if speaks == needs:
        return ""
    formats = f"the run has format {needs}, this peer speaks {speaks}"
    if speaks < needs:
        release = release_of(genesis) or "a newer version"
        return f"this run needs swarmentum >= {release}, installed is {installed} ({formats}): upgrade swarmentum"
    release = release_of(genesis) or "an older version"
    return f"this run needs swarmentum {release}, installed is {installed}, which is too new for it ({formats})"


def own_misfit(genesis: log_pb2.Genesis) -> str:
    """`misfit` of this program."""
    return misfit(genesis, FORMAT_VERSION, software_version())


JSON_VERSION: Final = 2
"""Of docs/json.md: it grows when a key gets another name or meaning, not when one is added."""
LIBRARIES: Final = ("torch", "transformers", "hivemind", "grpcio")


def versions() -> dict[str, str]:
    """This program, the format of the wire and of runs that it speaks, and the libraries that decide whether it runs."""
    found = {"swarmentum": software_version(), "format": str(FORMAT_VERSION), "json": str(JSON_VERSION)}
    found["Python"] = platform.python_version()
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found | {"system": f"{platform.system()} {platform.machine()}"}


PEER, COORDINATOR = "swarmentum", "swarmentum-coordinator"
PROGRAMS: Final[Mapping[str, tuple[str, ...]]] = {
    PEER: (
        *("join", "doctor", "me", "leave", "set", "relay", "status", "watch", "runs", "export", "evaluate", "settings"),
        *("audit-folder", "export-page", "demo", "verify", "mirror", "ledger", "export-log", "layout", "start-from"),
        *("service", "service install", "service uninstall", "data", "data build", "data survey", "data tokenizer"),
    ),
    COORDINATOR: (
        *("run", "run create", "run example", "run check", "run invite", "run list", "run show", "run change"),
        *("run decay", "run fork", "run archive", "run delete", "invite", "invite create", "invite list"),
        *("invite revoke", "peer", "peer list", "peer exclude", "peer readmit", "snapshot", "snapshot list"),
        *("snapshot withdraw", "order", "order key", "order list", "order sign", "anchor create", "web login"),
        *("serve", "health", "backup", "restore"),
    ),
}
"""Commands that one of the programs alone has, not to be looked for in vain in the other one."""


class Program(TyperGroup):
    """A program that says where a command is that it lacks: in a group of its own, or in the other program."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the base does; an unknown command ends with exit code 2."""
        if args and args[0] not in self.commands and (places := self._places(args[0], ctx.find_root().command)):
            ctx.fail(f"No such command {args[0]!r}: it is {' or '.join(f'`{place}`' for place in places)}.")
        for before, word in pairwise(["", *args]):
            # a path would be the working folder
            if not word or (word.startswith("--") and word.find("=") == len(word) - 1):
                after = word.rstrip("=") or before
                ctx.fail(f"Nothing is given{after and f' after {after}'}: is a variable of the shell not set?")
        return super().resolve_command(ctx, args)

    def _places(self, word: str, root: Any) -> list[str]:
        groups = {name: group for name, group in root.commands.items() if isinstance(group, TyperGroup)}
        own = COORDINATOR if "serve" in root.commands else PEER
        inside = [f"{own} {name} {word}" for name, group in groups.items() if word in group.commands]
        if self is not root and word in root.commands:
            inside.insert(0, f"{own} {word}")
        others = ((program, words) for program, words in PROGRAMS.items() if program != own)
        return inside + [f"{program} {at}" for program, words in others for at in words if word == at.split()[-1]]


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
