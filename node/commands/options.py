"""Options that several commands of `swarmentum` share, and the exit codes that each command prints in its help."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from node.commands.setting_options import FIRST, OUTPUT, option
from protos.errors import OperatorError

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed (demo: digests differ or the loss did not fall; verify: a step does not hold; "
    "doctor: this machine cannot take part), 2 wrong use or configuration, "
    "3 unreachable, 4 refused, 5 replicas differ, 130 interrupted (left cleanly)."
)
InviteLink = Annotated[
    str, typer.Argument(metavar="INVITE", help="The run's invite link, swarmentum://..., or - to read it from stdin.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs; logs go to stderr.", rich_help_panel=OUTPUT)
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more log lines.", rich_help_panel=OUTPUT)]
MaybeInvite = Annotated[
    str | None,
    typer.Argument(
        metavar="[INVITE]", help="A run's invite link, or - to read it from stdin; without it, the machine alone."
    ),
]
InviteOrStdin = Annotated[
    str | None, typer.Argument(metavar="INVITE", help="The run's invite link, or - to read it from stdin.")
]
InviteFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the link. All users of a machine can see a link on the command line.", rich_help_panel=FIRST
    ),
]
Home = Annotated[Path | None, option("home")]
AllowCode = Annotated[bool, option("allow_code")]
AllowLeftOut = Annotated[bool, option("allow_left_out")]


def need_node_extra() -> None:
    """OperatorError with the install command if torch is missing: the base install serves a coordinator only."""
    missing = [
        name for name in ("torch", "hivemind", "transformers", "safetensors", "zstandard") if find_spec(name) is None
    ]
    if missing:
        raise OperatorError(
            f"this command needs {', '.join(missing)}: pip install '.[node]' in the folder of the repository"
        )
