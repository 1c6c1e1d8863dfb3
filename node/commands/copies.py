"""The commands that put into files what a run has: `swarmentum export` its model as it is now, in a folder that Hugging Face
loads, `export-log` its signed log, and `audit-folder` what a group has to show of it. They train nothing.

What the log adds to an export's card (who trained the model, its losses) changes no weights. An export is whole without it: a
coordinator that is away, or a long log, costs the card these lines. An audit folder says how to verify it. It is there whole or
not at all. `audit-folder` refuses a folder that is not empty.

Also the copies of archives in other places: `swarmentum mirror` makes them, and `swarmentum verify ADDRESS` reads them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import structlog
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from node.commands.options import InviteLink, Json, Settings, Verbose, link_from, need_node_extra, option, with_settings
from node.export.card import add_ledger
from node.imports import WAITING, many_imports, slowly
from protos.accounts import loss_of
from protos.address import is_web
from protos.console import configure_logging
from protos.disk import new_folder, temporary_folder, write_bytes
from protos.errors import DataError, NetworkError, OperatorError, RefusedError
from protos.evaluation import figures
from protos.invite import Invite, is_link
from protos.log import SignedEntry
from protos.mistakes import LICENCE, NO_LICENCE, expected
from protos.process import EXIT_INTERRUPTED, leave, leaving_at_once
from protos.run_config import RunConfig
from protos.start import RUN_DIGITS_SHOWN
from protos.text import as_line, print_json, things

if TYPE_CHECKING:
    from node.commands.hugging_face import Uploads
    from node.config import PeerSettings
    from node.mirror.archive_copy import Told

KEPT = 3
Public = Annotated[bool, typer.Option("--public", help="Make a new repository of the hub public.")]
Licence = Annotated[str, typer.Option(help="For the card, as the hub spells it, for example apache-2.0.")]


@leaving_at_once()
@with_settings(
    "home", "threads", "listen", "allow_code", "allow_data", "yes", home="~/.swarmentum/export", device="cpu"
)
def export(
    settings: Settings,
    invite: InviteLink,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="A new or empty folder, or an earlier export (default with a hub: in --home)."
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Follow the run, and export each agreed state at this distance, in steps, into FOLDER."
        ),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="With --every: how many exports stay, the newest ones.")] = KEPT,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="REPO_ID", help="Also upload it to the Hugging Face hub, as owner/name; private unless --public."
        ),
    ] = None,
    public: Public = False,
    licence: Licence = NO_LICENCE,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a run's model as it is now to a folder for Hugging Face, with a model card. Needs no GPU and no data."""
    need_node_extra()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    configure_logging(as_json=as_json, verbose=verbose)
    from node.commands import options

    if not re.search(LICENCE, licence):
        raise OperatorError(f"--licence {licence}: {expected(LICENCE)}")
    to = _Target(options.link_from(invite), folder, push_to_hub, public, every, keep, as_json, licence)
    raise typer.Exit(_export(to, settings()))


@dataclass(frozen=True)
class _Target:
    """Where exports of a run go, and which ones. See `export`."""

    link: str
    folder: Path | None
    repo_id: str | None
    public: bool
    every: int | None
    keep: int
    as_json: bool
    licence: str


def _export(to: _Target, settings: PeerSettings) -> int:
    run_id, folder = Invite.parse(to.link).run_id.hex(), to.folder
    from node.commands import hugging_face

    if folder is None:
        if to.repo_id is None:
            raise OperatorError("give a FOLDER for the model, or --push-to-hub REPO_ID, or both")
        folder = settings.home / "exports" / run_id[:RUN_DIGITS_SHOWN]
    if to.repo_id is not None:
        hugging_face.check(to.repo_id, run_id)  # before a peer joins, so that no work is lost on it
    with many_imports(said=not to.as_json):
        from node.app import join
    from node.admission.consent import MachineRequest, must_ask
    from node.commands import options
    from node.training.exports import Series, check_series

    def agree(asked: MachineRequest) -> None:
        if must_ask(asked, settings, can_ask=not to.as_json and options.can_be_asked()):
            options.show(asked)
            options.ask(asked)

    if to.every is not None:
        check_series(folder, run_id)
        uploads = None
        if to.repo_id is not None:
            done, log = partial(_told, to, "pushed"), structlog.get_logger("peer")
            uploads = hugging_face.Uploads(to.repo_id, done, log, public=to.public)
        series = Series(folder.absolute(), to.every, to.keep, partial(_exported, to, uploads))
        outcome = join(to.link, settings, None, agree, copies=True, series=series, licence=to.licence)
        if outcome.exit_code == EXIT_INTERRUPTED:
            leave()
        if uploads is not None:
            uploads.close()
        return outcome.exit_code
    outcome = join(to.link, settings, folder, agree, copies=True, licence=to.licence)
    if outcome.exit_code == EXIT_INTERRUPTED:
        leave()
    summary = outcome.summary
    add_credits(to.link, folder, summary.step)
    if not to.as_json:
        print(f"{summary.checkpoint}: step {summary.step}, state digest {summary.state_digest[:16]}", flush=True)
    url = None if to.repo_id is None else hugging_face.push(folder, to.repo_id, public=to.public)
    if to.as_json:
        print_json({**asdict(summary), "hub": url})
    elif url is not None:
        print(f"{to.repo_id}: {url}", flush=True)
    return outcome.exit_code


def _exported(to: _Target, uploads: Uploads | None, path: Path, step: int) -> None:
    """An export of a series has its name."""
    _told(to, "exported", path, step)
    if uploads is not None:
        uploads.put(path, step)


def _told(to: _Target, event: str, path: Path, step: int, url: str | None = None) -> None:
    if to.as_json:
        print_json({"event": event, "step": step, "folder": str(path), "hub": url})
    else:
        print(f"{event}: {path}{'' if url is None else f', {url}'}", flush=True)


LEDGER_STEPS_MAX: Final = 20_000
"""The log of a longer run (some 3 kB a step) is not read for the card."""


def add_credits(link: str, folder: Path, step: int) -> None:
    """Put the run's ledger and losses into the card of the export of the state after `step`. Raises DiskError."""
    log = structlog.get_logger("peer")
    if step > LEDGER_STEPS_MAX:
        log.info("the card has no ledger: the log is long; `swarmentum ledger INVITE` shows it", step=step)
        return
    from node.archive.ledger import ledger, read

    invite = Invite.parse(link)
    try:
        entries, owners = asyncio.run(read(invite))
    except (NetworkError, RefusedError) as error:
        log.warning("the card has no ledger: the log cannot be read", step=step, why=str(error))
        return
    values = ledger(invite.run_id, entries, owners).values()
    add_ledger(folder, values, losses_of(entries, invite.run_id, step))


def losses_of(entries: Sequence[SignedEntry], run_id: bytes, step: int) -> dict[str, Any]:
    """Facts for the card: the training loss of a step, and the held-out loss of the newest evaluated state up to it."""
    facts: dict[str, Any] = {}
    found = next((signed.entry for signed in reversed(entries) if signed.entry.step == step), None)
    if found is not None:
        facts["loss of the step, nats a token"] = f"{loss_of(found.contributions):.4f}"
    held = [it for it in figures((e for s in entries for e in s.entry.evaluations), run_id) if it.step <= step]
    if held:
        last = max(held, key=lambda it: it.step)
        facts["held-out loss, nats a token"] = (
            f"{last.loss:.4f} after step {last.step}, the median of {last.count} peers"
        )
    return facts


T = TypeVar("T")


@contextmanager
def archive_at(run: str, into: Path | None) -> Iterator[Path]:
    """The folder of an archive; a copy of it where `run` is an address. `into`: the folder of the copy, which stays."""
    from node.mirror.archive_copy import fetch

    if "://" not in run:
        if into is not None:
            raise OperatorError(
                f"--into {into}: {run} is a folder of this machine, and nothing is copied; leave --into out"
            )
        yield Path(run)
        return
    own, remove = temporary_folder("swarmentum-verify-")
    try:
        folder = into or own / "archive"  # beside it there is no model of somebody else
        _with_progress(f"copying {run}", lambda told: fetch(run, folder, told))
        yield folder
    finally:
        remove()


def copy_archive(run: Path, address: str, *, as_json: bool) -> None:
    """Copy the archive in or at `run`, and say how to verify it there."""
    from node.archive.files import find
    from node.mirror.archive_copy import copy_to

    folder = find(run)
    index = _with_progress(f"copying {folder}", lambda told: copy_to(folder, address, told))
    if as_json:
        print_json({"address": address, "files": len(index.files), "bytes": index.total_bytes})
    else:
        verify = f"swarmentum verify {shlex.quote(str(address))}"
        print(f"{things(len(index.files), 'file')}, {index.total_bytes} bytes. Anybody verifies it with: {verify}")


def _with_progress(what: str, work: Callable[[Told], T]) -> T:
    """What `work` returns; a bar on stderr meanwhile, or a line where stderr is a log."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True, highlight=False)
    line = nullcontext() if console.is_terminal else slowly(what)
    with line, Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        return work(lambda done, of: progress.update(task, completed=done, total=of))


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
        facts, sources = _fill(
            fresh, link_from(run), "data" in load_settings(home=Path(), allow_data=allow_data or None).allow
        )
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
    with slowly(WAITING):
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
