"""The person at the terminal: reads an invite link that is not on the command line, shows a run, asks once.

Every user of the machine can read a link on the command line (`ps`), its ticket too. Refuses to ask if nobody can answer.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from protos.errors import OperatorError, StoppedError
from protos.pasted import PASTED_CHARACTERS_MAX
from protos.toml_file import WRITTEN

if TYPE_CHECKING:
    from node.admission.consent import MachineRequest

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
