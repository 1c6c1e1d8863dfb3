"""`swarmentum audit-folder` and `export-log`: what a group has to show of a run, in one folder that says how to verify it; and
the signed log alone.

The folder is there whole or not at all. Refuses a folder that is not empty.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from node.commands.options import Json, link_from, need_node_extra, option
from node.imports import many_imports
from protos.address import is_web
from protos.console import configure_logging
from protos.disk import new_folder, write_bytes
from protos.errors import DataError, NetworkError, OperatorError
from protos.invite import Invite, is_link
from protos.process import leaving_at_once
from protos.run_config import RunConfig
from protos.text import as_line, print_json


@leaving_at_once()  # what is written so far is no folder yet
def audit_folder(
    run: Annotated[
        str, typer.Argument(metavar="INVITE|FILE", help="An invite link, a file of export-log, or - (a link on stdin).")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")],
    allow_data: Annotated[bool, option("allow_data")] = False,
    as_json: Json = False,
) -> None:
    """Write one folder that accounts for a run: log, peers, exclusions with evidence, settings, texts, and how to verify it."""
    need_node_extra()
    configure_logging(as_json=as_json)
    with many_imports(said=not as_json):
        from node.archive import audit
    from node.config import load_settings

    with new_folder(folder) as fresh:
        facts, sources = _fill(fresh, link_from(run), "data" in load_settings(allow_data=allow_data or None).allow)
        write_bytes(fresh / audit.README, audit.readme(facts, sources).encode())
        write_bytes(fresh / audit.SUMS, audit.sums(fresh).encode())
    missing = [source["source"] for source in sources if source["why_not"]]
    if as_json:
        print_json({"folder": str(folder), "run": facts["run"], "steps": facts["last_step"], "not_had": missing})
        return
    print(
        f"Run {facts['run'][:16]}, steps 1 to {facts['last_step']}, is in {folder}; {audit.README} there says how to verify it."
    )
    for source in sources:
        if source["why_not"]:
            print(f"Without the manifest of {source['source']}: {source['why_not']}")


def _fill(fresh: Path, run: str, private: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write everything but README and sums. Without a link: what follows from the log file. `private`: see `Mirrors`."""
    from node.archive import audit
    from node.archive.ledger import export_log
    from node.commands.status import as_values
    from node.link.run_reader import read_facts

    log = fresh / audit.LOG
    if not is_link(run):
        try:
            shutil.copyfile(run, log)
        except OSError as error:
            raise OperatorError(f"{run} is no invite link, and no file that can be read: {error.strerror}") from error
        try:
            return audit.write_from_log(log, fresh / audit.FROM_LOG), []
        except OperatorError as error:  # of the copy, which goes
            raise OperatorError(str(error).replace(str(log), run)) from error
    invite = Invite.parse(run)
    export_log(invite, log)
    facts = audit.write_from_log(log, fresh / audit.FROM_LOG)
    found, config = asyncio.run(read_facts(invite))
    told = fresh / audit.FROM_COORDINATOR
    told.mkdir()
    write_bytes(told / "status.json", (as_line(as_values(found, config, invite.run_id)) + "\n").encode())
    if found.HasField("end"):
        write_bytes(told / "end", found.end.SerializeToString(deterministic=True))
    (fresh / audit.DATA).mkdir()
    sources = [_source(config, number, fresh / audit.DATA, private) for number in range(len(config.data.sources()))]
    write_bytes(fresh / audit.DATA / "sources.json", (json.dumps(sources, indent=1) + "\n").encode())
    return facts, sources


def _source(config: RunConfig, number: int, folder: Path, private: bool) -> dict[str, Any]:
    """One text of the run, and its manifest's file, if the web has it."""
    from node.data.download import Mirrors

    source, mirrors, sha256 = config.data.sources()[number]
    made: dict[str, Any] = {"source": source, "mirrors": mirrors, "sha256": sha256, "manifest": None, "why_not": ""}
    if not is_web(source) or sha256 is None:
        return made
    try:
        data = Mirrors([source, *mirrors], private=private).manifest(sha256)
    except (DataError, NetworkError) as error:  # a text that is gone is a finding, and no reason to keep nothing
        return made | {"why_not": str(error)}
    name = f"manifest-{number + 1}.json"
    write_bytes(folder / name, data)
    return made | {"manifest": name}


def export_log_file(link: str, file: Path, *, as_json: bool) -> None:
    """Write the log, and print what it is."""
    from node.archive.ledger import export_log

    invite = Invite.parse(link_from(link))
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as progress:
        task = progress.add_task("reading the log", total=None)
        steps = export_log(invite, file, lambda step, of: progress.update(task, completed=step, total=of))
    if as_json:
        values = {"event": "exported", "file": str(file), "steps": steps, "bytes": file.stat().st_size}
        print_json({**values, "run": invite.run_id.hex()})
        return
    check = f"swarmentum ledger {shlex.quote(str(file))}"
    print(f"The log of run {invite.run_id.hex()[:16]}, steps 1 to {steps}, is in {file}. `{check}` checks it.")
