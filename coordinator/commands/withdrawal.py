"""The commands `swarmentum-coordinator snapshot ...`: see the agreed snapshots of a run, and withdraw wrong ones."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coordinator.commands.options import EXIT_CODES, Home, Json, RunName, settings
from protos.identity import short
from protos.json_line import print_json
from protos.v1 import coordinator_pb2 as pb

app = typer.Typer(help="List a run's agreed snapshots, withdraw wrong ones.", no_args_is_help=True)


@app.command("list", epilog=EXIT_CODES)
def list_snapshots(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """List the agreed snapshots that joiners are offered, newest first, and what was withdrawn."""
    from coordinator.commands.operator import Operator

    found = Operator(settings(home=home).home).find(run)
    rows = [_row(ref) for ref in ([found.snapshot] if found.HasField("snapshot") else []) + list(found.earlier)]
    gone = [(withdrawn.from_step, withdrawn.to_step) for withdrawn in found.withdrawn]
    if as_json:
        print_json({"snapshots": rows, "withdrawn": gone})
        return
    table = Table("step", "root", "bytes", "held by", title="Agreed snapshots")
    for row in rows:
        table.add_row(str(row["step"]), row["root"][:16], str(row["bytes"]), ", ".join(row["holders"]))
    console = Console()
    console.print(table if rows else "No snapshot is agreed.")
    for first, last in gone:
        console.print(f"Withdrawn: the agreed snapshots and digests of steps {first} to {last}.", highlight=False)


@app.command(epilog=EXIT_CODES)
def withdraw(
    run: RunName,
    step: Annotated[int, typer.Option(min=1, help="The step of the first snapshot that is wrong; see `list`.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Withdraw the agreed snapshots of a step and of all later steps, and the state digests since.

    Joiners start from the snapshot before. A peer that stopped because its own state differed can
    continue: start it again.
    """
    from coordinator.commands.operator import Operator

    operator = Operator(settings(home=home).home)
    found = operator.find(run)
    operator.withdraw_snapshot(found.genesis, step)
    if as_json:
        print_json({"withdrawn_from_step": step, "head_step": found.head_step})
        return
    text = f"The agreed snapshots and digests of steps {step} to {max(found.head_step, step)} are withdrawn."
    Console(soft_wrap=True).print(text, highlight=False)


def _row(ref: pb.SnapshotRef) -> dict[str, Any]:
    holders = [short(key) for key in ref.holders]
    return {"step": ref.step, "root": ref.root.hex(), "bytes": ref.total_bytes, "holders": holders}
