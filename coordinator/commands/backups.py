"""`swarmentum-coordinator backup` and `restore`: a coordinator's keys and journal in one file, also while it serves."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.options import Home, Json, settings
from coordinator.store import backup as store
from protos.console import lock_home
from protos.errors import OperatorError
from protos.text import as_line, print_json

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The backup. A person who has it can act as this coordinator.")
]


def backup(file: File, home: Home = None, as_json: Json = False) -> None:
    """Write the keys and the journal of --home to FILE, as they are at one moment. The coordinator may go on meanwhile."""
    chosen = settings(home=home)
    if chosen.database is not None:
        raise OperatorError(
            "the journal is in a database of its own: back that up (pg_dump), and copy the three key files"
        )
    about = store.make(chosen.home, file)
    if as_json:
        print_json({"file": str(file), **asdict(about)})
        return
    steps = ", ".join(f"{run[:16]} at step {step}" for run, step in about.runs.items()) or "no run"
    print(f"{file}: {steps}. Keep it as you keep a private key.")


def restore(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The backup to restore into --home.")] = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "--go-on", help="The log of a restored home is whole: let steps open again. Stop the coordinator first."
        ),
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write the home that a backup holds; then `serve` it, let peers give back newer entries, and end with --go-on."""
    folder = settings(home=home).home
    if (file is None) is not go_on:
        raise OperatorError("give exactly one of these: FILE, to restore it, or --go-on")
    if file is None:
        lock_home(folder, "coordinator").close()  # it reads the mark only when it starts
        store.go_on(folder)
        print(
            as_line({"home": str(folder), "held": False})
            if as_json
            else f"{folder}: steps open again at the next start."
        )
        return
    about = store.restore(file, folder)
    if as_json:
        print_json({"home": str(folder), "held": True, **asdict(about)})
        return
    at = shlex.quote(str(folder))
    print(f"{folder}: restored. Next:")
    print("1. Make sure that the old coordinator never starts again: two with one key would make two logs.")
    print(f"2. Start it: swarmentum-coordinator serve --home {at}")
    print("3. Peers give back the entries that the backup lacks. `run list` shows the step; no step opens meanwhile.")
    print("4. When that is the newest step that any peer knows (`swarmentum me`), stop the coordinator, and run:")
    print(f"   swarmentum-coordinator restore --go-on --home {at}")
    print("5. Start it again.")
