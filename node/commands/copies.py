"""`swarmentum export`: the model of a run as it is now, in a folder that Hugging Face loads. Trains nothing.

What the log adds to the card (who trained the model, its losses) changes no weights. An export is whole without it: a
coordinator that is away, or a long log, costs the card these lines.

Also the copies of archives in other places: `swarmentum mirror` makes them, and `swarmentum verify ADDRESS` reads them.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import structlog
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from node.commands.options import InviteLink, Json, Settings, Verbose, need_node_extra, with_settings
from node.export.card import add_ledger
from node.imports import many_imports
from protos.accounts import loss_of
from protos.console import configure_logging
from protos.errors import NetworkError, OperatorError, RefusedError
from protos.evaluation import figures
from protos.invite import Invite
from protos.log import SignedEntry
from protos.mistakes import LICENCE, NO_LICENCE, expected
from protos.process import EXIT_INTERRUPTED, leave, leaving_at_once
from protos.start import RUN_DIGITS_SHOWN
from protos.text import print_json

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
    with tempfile.TemporaryDirectory(prefix="swarmentum-verify-") as own:
        folder = into or Path(own) / "archive"  # beside it there is no model of somebody else
        _with_progress(f"copying {run}", lambda told: fetch(run, folder, told))
        yield folder


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
        print(f"{len(index.files)} files, {index.total_bytes} bytes. Anybody verifies it with: {verify}")


def _with_progress(what: str, work: Callable[[Told], T]) -> T:
    """What `work` returns; a bar on stderr meanwhile."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress:
        task = progress.add_task(what, total=None)
        return work(lambda done, of: progress.update(task, completed=done, total=of))
