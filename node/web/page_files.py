"""The page of a finished run as files, for any host of files: the same page, with the answers of the API beside it.

The browser checks the exported log as it checks a served one. The folder has no program of a server.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Final

from node.web import views
from node.web.answers import Answer
from node.web.api_routes import POINTS_MAX, STATIC
from node.web.followed import Followed
from protos.disk import writing
from protos.errors import NetworkError, OperatorError
from protos.invite import Invite

SECONDS_MAX: Final = 600.0
"""Of reading a whole log."""
IDENTITIES_MAX: Final = 2000
NOT_COPIED: Final = ("package.json",)
OPENING: Final = '<html lang="en">'


def export_page(invite: Invite, folder: Path) -> int:
    """Read a run's whole log and write its page into `folder`, which is new or empty. Returns the last step.

    Raises OperatorError for a folder that has files, NetworkError if the coordinator does not give the whole log.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OperatorError(f"{folder} has files already: give a new or an empty folder")
    run = asyncio.run(_read(invite))
    try:
        write(run, folder)
        return run.book.head
    finally:
        run.close()


async def _read(invite: Invite) -> Followed:
    """A run that was read to the end of its log. Raises NetworkError."""
    changed = asyncio.Event()
    run = Followed(invite, changed=changed.set)
    following = asyncio.ensure_future(run.run())
    try:
        async with asyncio.timeout(SECONDS_MAX):
            while run.facts is None or run.problem or run.book.head < run.head_step:
                if following.done():
                    raise NetworkError(f"the log of the run was not read to its end: {run.problem}")
                waiting = asyncio.ensure_future(changed.wait())
                await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                changed.clear()
    except BaseException as error:
        run.close()
        if isinstance(error, TimeoutError):
            raise NetworkError(f"the log was not read within {SECONDS_MAX:.0f} s: {run.problem}") from error
        raise
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return run


def write(run: Followed, folder: Path) -> None:
    """Write the page of a run that was read to its end. Raises DiskError."""
    assert run.facts is not None, "the coordinator has answered"
    with writing(folder):
        shutil.copytree(STATIC, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        page = folder / "index.html"
        text = page.read_text(encoding="utf-8")
        assert OPENING in text, "the page begins as this module expects it"
        page.write_text(text.replace(OPENING, f'<html lang="en" data-run="{run.run_hex}">'), encoding="utf-8")
        data = folder / "data"
        (data / "log").mkdir(parents=True, exist_ok=True)
        _answer(data / "run.json", views.run_of(run))
        _answer(data / "steps.json", views.steps_of(run, 1, run.book.head, POINTS_MAX))
        _answer(data / "ledger.json", views.ledger_of(run, 0, IDENTITIES_MAX))
        _answer(data / "invite.json", views.invite_of(run))
        _answer(data / "samples.json", views.samples_of(run))
        (data / "genesis.bin").write_bytes(run.facts.genesis.SerializeToString(deterministic=True))
        _log(run, data / "log")


def _answer(path: Path, answer: Answer) -> None:
    path.write_text(answer.model_dump_json(), encoding="utf-8")


def _log(run: Followed, folder: Path) -> None:
    """The pages of the log, each named by its first step, and the list of these steps."""
    first, firsts = 1, []
    while first <= run.spool.head:
        page, last, _ = run.spool.page(first)
        (folder / f"{first}.bin").write_bytes(page)
        firsts.append(first)
        first = last + 1
    (folder / "index.json").write_text(json.dumps(firsts), encoding="utf-8")
