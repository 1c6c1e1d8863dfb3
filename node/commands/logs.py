"""`swarmentum export-log`: the signed log of a run as a file. A bar shows how far it is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from node.archive.log_file import export_log
from node.commands.options import link_from
from protos.invite import Invite
from protos.json_line import print_json


def export(link: str, file: Path, *, as_json: bool) -> None:
    """Write the log, and print what it is."""
    invite = Invite.parse(link_from(link))
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as progress:
        task = progress.add_task("reading the log", total=None)
        steps = export_log(invite, file, lambda step, of: progress.update(task, completed=step, total=of))
    if as_json:
        values = {"event": "exported", "file": str(file), "steps": steps, "bytes": file.stat().st_size}
        print_json({**values, "run": invite.run_id.hex()})
        return
    print(
        f"The log of run {invite.run_id.hex()[:16]}, steps 1 to {steps}, is in {file}. `swarmentum ledger {file}` checks it."
    )
