"""Command lines of Python child processes. A child never imports a module because of the folder that a person stands in.

`python -m` puts the working folder first on the module path. A file beside somebody's run.toml would then run in the place of
a library. `-P` (Python 3.11) leaves that folder out. `PYTHONSAFEPATH` does so for processes that a child or a library starts.
Refuses no module that is installed, or that lies in a folder which PYTHONPATH names. A run's own module (`model.factory`) is
imported from the working folder only after the person has agreed (`import_from_working_folder`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

SAFE_PATH_FLAG: Final = "-P"
SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"


def python_command(*words: str, python: str | None = None) -> tuple[str, ...]:
    """The command that runs Python with `words`, such as `-m` and a module. `python`: another one than runs this program."""
    return (python or sys.executable, SAFE_PATH_FLAG, *words)


def keep_path_safe(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let each Python that this process, its children or its libraries start leave the working folder out, too."""
    environment[SAFE_PATH_VARIABLE] = "1"


def safe_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A copy of an environment in which each Python leaves the working folder out."""
    made = dict(environment)
    keep_path_safe(made)
    return made


def import_from_working_folder() -> None:
    """Let this process import from the working folder, for a person who has agreed to code that a run names.

    The folder comes last, so no file in it takes the place of a library.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
