"""The person at the terminal: reads an invite link that is not on the command line, shows a run, asks once.

Every user of the machine can read a link on the command line (`ps`), its ticket too. Refuses to ask where nobody answers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from protos.errors import OperatorError, StoppedError
from protos.limits import INVITE_BYTES_MAX

if TYPE_CHECKING:
    from node.commands.consent import Request

STDIN = "-"


def link_from(given: str | None, file: Path | None = None) -> str:
    """The invite link: as given, from the first line of stdin (`-`), or from the first line of a file."""
    if (given is None) == (file is None):
        raise OperatorError(
            "give the invite link, `-` to read it from stdin, or --invite-file PATH: exactly one of them"
        )
    if file is not None:
        try:
            with file.open(encoding="utf-8") as opened:
                line = opened.readline(INVITE_BYTES_MAX + 2)
        except (OSError, UnicodeDecodeError) as error:
            raise OperatorError(f"--invite-file {file}: cannot be read: {error}") from error
        return _some(line, f"--invite-file {file}")
    assert given is not None, "one of them is"
    return _some(sys.stdin.readline(INVITE_BYTES_MAX + 2), "stdin") if given == STDIN else given


def _some(line: str, where: str) -> str:
    if not line.strip():
        raise OperatorError(f"{where}: the first line is empty; it has to be the invite link, swarmentum://...")
    return line.strip()


def can_be_asked() -> bool:
    """Whether somebody reads stderr and writes to stdin."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def show(asked: Request) -> None:
    """On stderr: stdout is for results."""
    print("\n".join(asked.lines()), file=sys.stderr, flush=True)


def ask(asked: Request) -> None:
    """Raises StoppedError unless the answer is yes (which an empty line is)."""
    print("Join this run? [Y/n] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer or answer.strip().lower() not in ("", "y", "yes"):
        raise StoppedError(f"the run {asked.run} is not joined")
