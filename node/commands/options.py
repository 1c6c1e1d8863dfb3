"""What several commands of `swarmentum` share: options, the exit codes that each prints in its help, and the person at the
terminal.

The person gives an invite link that is not on the command line (every user of the machine can read that, `ps`, its ticket
too), sees a run, and is asked once. Refuses to ask if nobody can answer.
"""

from __future__ import annotations

import os
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.commands.setting_options import FIRST, OUTPUT, option
from protos.errors import OperatorError, StoppedError
from protos.invite import PASTED_CHARACTERS_MAX
from protos.toml_file import WRITTEN

if TYPE_CHECKING:
    from node.admission.consent import MachineRequest

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


STDIN = "-"
COLUMNS_MIN = 40


def link_from(given: str | None, file: Path | None = None) -> str:
    """The invite link: as given, from stdin (`-`), or from a file. A terminal gives one line; a pipe and a file may have
    broken the link over several lines."""
    if (given is None) == (file is None):
        raise OperatorError(
            "give exactly one of these: the invite link, `-` to read the link from stdin, or --invite-file PATH"
        )
    if file is not None:
        try:
            with file.open(encoding=WRITTEN) as opened:
                text = opened.read(PASTED_CHARACTERS_MAX)
        except OSError as error:
            raise OperatorError(f"--invite-file {file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise OperatorError(f"--invite-file {file}: is not UTF-8 text: save it as UTF-8") from error
        return _some(text, f"--invite-file {file}")
    assert given is not None, "one of them is"
    given = given.strip()
    if given != STDIN:
        return given
    read = sys.stdin.readline if sys.stdin.isatty() else sys.stdin.read
    return _some(read(PASTED_CHARACTERS_MAX), "stdin")


def _some(text: str, where: str) -> str:
    if not text.strip():
        raise OperatorError(f"{where}: nothing is there; put the invite link, swarmentum://..., there")
    return text.strip()


def can_be_asked() -> bool:
    """Whether a person reads stderr and writes to stdin."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def show(asked: MachineRequest) -> None:
    """On stderr: stdout is for results."""
    print("\n".join(asked.lines()), file=sys.stderr, flush=True)


def fitted(line: str) -> str:
    """The line, broken between words where stdout is a terminal that is too narrow for it."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, max(os.get_terminal_size(sys.stdout.fileno()).columns, COLUMNS_MIN))


def agreed_before(asked: MachineRequest) -> None:
    """The person has agreed to this run already: a peer takes part again after its disk was full."""


def ask(asked: MachineRequest) -> None:
    """Ask the person to join. Raises StoppedError unless the answer is yes; an empty line is a yes."""
    print("Join this run? [Y/n] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer or answer.strip().lower() not in ("", "y", "yes"):
        raise StoppedError(f"the answer was no: this machine does not join the run {asked.run}")
