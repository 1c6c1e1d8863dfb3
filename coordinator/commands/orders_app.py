"""The commands `swarmentum-coordinator order ...`: make an operator's key, list the orders that wait, sign one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from coordinator.commands.options import EXIT_CODES, Home, Json, Key
from protos.errors import OperatorError
from protos.identity import Identity
from protos.json_line import print_json

if TYPE_CHECKING:
    from coordinator.commands.signing import Operators, OrderState

app = typer.Typer(help="Decide with other operators: list their orders, sign one.", no_args_is_help=True)
RunOrLink = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's link; beside its coordinator, its name or id.")
]


@app.command("key", epilog=EXIT_CODES)
def show_key(
    file: Annotated[Path, typer.Argument(help="The file of your key. Keep it secret: it signs for you.")],
    as_json: Json = False,
) -> None:
    """Make an operator's key, or print the id of the one that is there: for `operators.keys` of run.toml."""
    made = not file.exists()
    key = Identity.load_or_create(file)
    if as_json:
        print_json({"key": key.peer_id, "file": str(file), "made": made})
        return
    _say(
        f"{key.peer_id}\n{'Made' if made else 'Read'} {file}. Give the operator of the run the id, and nobody the file."
    )


@app.command("list", epilog=EXIT_CODES)
def list_orders(run: RunOrLink, key: Key = None, home: Home = None, as_json: Json = False) -> None:
    """List the orders that wait for signatures: what each says, who signed it, and until when it waits."""
    waiting = _of(run, home, key).waiting()
    for order in waiting:
        show_order(order, as_json=as_json)
    if not (waiting or as_json):
        _say("No order waits.")


@app.command("sign", epilog=EXIT_CODES)
def sign(
    run: RunOrLink,
    order: Annotated[str, typer.Argument(help="The order's id, or its beginning; see `order list`.")],
    key: Key = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Sign an order of another operator. With the last signature that it needs it counts, at once."""
    if as_json and not yes:
        raise OperatorError("order sign --json asks nothing: give --yes, too")
    found = _of(run, home, key)
    waiting = found.find(order)
    if not yes:
        typer.confirm(f"{waiting}\nSign it?", abort=True)
    show_order(found.sign(waiting.signed), as_json=as_json)


def _of(run: str, home: Path | None, key: Path | None) -> Operators:
    from coordinator.commands.signing import operators

    found = operators(run, home, key)
    if found is None:
        raise OperatorError(
            "this run has no operators' keys: its coordinator's own key decides alone, and no order waits"
        )
    return found


def show_order(order: OrderState, *, as_json: bool) -> None:
    """An order, for people or programs."""
    if as_json:
        print_json(order.values())
    else:
        _say(str(order))


def _say(text: str) -> None:
    Console(soft_wrap=True).print(text, highlight=False, markup=False)
