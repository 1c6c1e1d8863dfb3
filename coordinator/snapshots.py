"""The commands `swarmentum-coordinator snapshot ...`: see the agreed snapshots of a run, and withdraw wrong ones."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coordinator.options import EXIT_CODES, Home, Json, RunName, settings
from protos.identity import short
from protos.v1 import coordinator_pb2 as pb

app = typer.Typer(help="List a run's agreed snapshots, withdraw wrong ones.", no_args_is_help=True)


@app.command("list", epilog=EXIT_CODES)
def list_snapshots(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """List the agreed snapshots that joiners are offered, newest first, and what was withdrawn."""
    from coordinator.operator import Operator

    found = Operator(settings(home=home).home).find(run)
    rows = [_row(ref) for ref in ([found.snapshot] if found.HasField("snapshot") else []) + list(found.earlier)]
    gone = [(withdrawn.from_step, withdrawn.to_step) for withdrawn in found.withdrawn]
    if as_json:
        print(json.dumps({"snapshots": rows, "withdrawn": gone}))
        return
    table = Table("step", "root", "bytes", "held by", title="Agreed snapshots")
    for row in rows:
        table.add_row(str(row["step"]), row["root"][:16], str(row["bytes"]), ", ".join(row["holders"]))
    console = Console()
    console.print(table if rows else "No snapshot is agreed.")
    for first, last in gone:
        console.print(f"Withdrawn: what was agreed about the states after steps {first} to {last}.", highlight=False)


@app.command(epilog=EXIT_CODES)
def withdraw(
    run: RunName,
    step: Annotated[int, typer.Option(min=1, help="The step of the first snapshot that is wrong; see `list`.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Let the snapshots of a step and of all later ones not count any more, nor the state digests since.

    Joiners start from the snapshot before. A peer that stopped because its own state contradicts what is withdrawn goes on
    when it is started again.
    """
    from coordinator.operator import Operator

    operator = Operator(settings(home=home).home)
    found = operator.find(run)
    operator.withdraw_snapshot(found.genesis, step)
    if as_json:
        print(json.dumps({"withdrawn_from_step": step, "head_step": found.head_step}))
        return
    text = f"What was agreed about the states after steps {step} to {max(found.head_step, step)} is withdrawn."
    Console(soft_wrap=True).print(text, highlight=False)


def _row(ref: pb.SnapshotRef) -> dict[str, Any]:
    holders = [short(key) for key in ref.holders]
    return {"step": ref.step, "root": ref.root.hex(), "bytes": ref.total_bytes, "holders": holders}
