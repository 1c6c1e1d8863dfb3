"""Options, settings and exit codes that all commands of `swarmentum-coordinator` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.config import CoordinatorSettings
from protos.toml_file import read_layers

if TYPE_CHECKING:
    from coordinator.commands.operator import Operator

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 unreachable, 4 refused by the coordinator, "
    "130 interrupted."
)
Home = Annotated[
    Path | None,
    typer.Option(help="Folder of the key, the certificate and the journal (default: ~/.swarmentum/coordinator)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line, for programs.")]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Call the Python code that the file names (`model.factory`) to know the layout. Use it only for code you trust.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(help="In a run with operators' keys: the file of yours (default: the coordinator's own key)."),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or the start of its id.")]


def option(key: str, *names: str, note: str = "") -> Any:
    """The option of a setting, whose field says what it is and its default."""
    field = CoordinatorSettings.model_fields[key]
    default = f"default: {field.default}" if isinstance(field.default, str) else ""
    notes = "; ".join(word for word in (note, default) if word)
    return typer.Option(*names, help=str(field.description).rstrip(".") + (f" ({notes})." if notes else "."))


def operator_at(home: Path | None) -> Operator:
    """Who asks the coordinator of this home. gRPC is imported here: `--help` does without it."""
    from coordinator.commands.operator import Operator

    return Operator(settings(home=home).home)


def settings(**flags: Any) -> CoordinatorSettings:
    """Flags over the environment (SWARMENTUM_COORDINATOR_<NAME>) over coordinator.toml; OperatorError says which is wrong."""
    found = read_layers("SWARMENTUM_COORDINATOR_", "coordinator.toml", CoordinatorSettings.model_fields)
    given = {name: value for name, value in flags.items() if value is not None}
    return found.made(CoordinatorSettings, {**found.of_file, **found.of_environment, **given})
