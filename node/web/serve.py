"""The process of the page: its socket, its runs, and a clean stop.

Invites come as arguments, or as lines on stdin: a coordinator writes those (`coordinator/serving/page.py`), and the ids of
runs that it serves no more. The end of stdin then ends the process, so a page never outlives its coordinator.

`export_page` writes the page of a finished run as files, for any host of files: the same page, with the answers of the API
beside it. The browser checks the exported log as it checks a served one. The folder has no program of a server.

`python -m node.web.serve` shows the runs that come on stdin: a coordinator starts it; people run `swarmentum web`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import structlog
import typer

from node.web import answers, views
from node.web.answers import Answer
from node.web.api_routes import POINTS_MAX, STATIC, app_of
from node.web.followed import Followed
from node.web.server import LISTEN, Channels, listening, message, raise_descriptors, server_of, url_of
from protos.console import configure_logging, exit_with
from protos.disk import new_folder
from protos.errors import NetworkError, OperatorError
from protos.invite import COORDINATORS_MAX, Invite
from protos.limits import ADDRESS_BYTES_MAX, INVITE_BYTES_MAX
from protos.process import heeded
from protos.text import print_json

RUNS_MAX: Final = 64
PUBLISH_SECONDS: Final = 1.0
NEW_POINTS_MAX: Final = 256
LIST: Final = ""


class Site:
    """The runs of one page: a task follows each, and each change goes to the browsers that watch it.

    Messages of a run are at least PUBLISH_SECONDS apart, whatever the speed of the run.

    Runs by their id in hex. Used inside one event loop.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Followed] = {}
        self.channels = Channels()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed: dict[str, asyncio.Event] = {LIST: asyncio.Event()}
        self._publisher = asyncio.ensure_future(self._publish(LIST))

    def add(self, invite: Invite, at: Iterable[str] = ()) -> bool:
        """Follow a run, too. False if the page has it. Raises OperatorError if the page has too many, or no room."""
        name = invite.run_id.hex()
        if name in self.runs:
            return False
        if len(self.runs) >= RUNS_MAX:
            raise OperatorError(f"a page shows at most {RUNS_MAX} runs: start another one with `swarmentum web`")
        run = Followed(invite, at, lambda: self._note(name))
        self._changed[name], self.runs[name] = asyncio.Event(), run
        self._tasks[name] = asyncio.ensure_future(self._both(run))
        self._note(name)
        return True

    async def remove(self, name: str) -> None:
        """Show a run no more, and end its streams: its operator archived or deleted it. Unknown runs are left alone."""
        run = self.runs.pop(name, None)
        if run is None:
            return
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self._changed[name]
        self.channels.end(name)
        run.close()
        self._changed[LIST].set()

    def _note(self, name: str) -> None:
        self._changed[name].set()
        self._changed[LIST].set()

    async def _both(self, run: Followed) -> None:
        """Follow a run, and tell its browsers."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.run())
            tasks.create_task(self._publish(run.run_hex))

    async def _publish(self, name: str) -> None:
        told = 0
        while True:
            await self._changed[name].wait()
            self._changed[name].clear()
            if name == LIST:
                self.channels.publish(LIST, message("runs", self._list().model_dump()))
            else:
                run = self.runs[name]
                if self.channels.watched(name):
                    self._tell(run, told)
                told = run.book.head
            await asyncio.sleep(PUBLISH_SECONDS)

    def _tell(self, run: Followed, told: int) -> None:
        if run.book.head > told:
            steps = run.book.points(told + 1, run.book.head, NEW_POINTS_MAX)
            self.channels.publish(run.run_hex, message("steps", steps.model_dump()))
        self.channels.publish(run.run_hex, message("run", views.run_of(run).model_dump()))

    def _list(self) -> answers.RunList:
        return answers.RunList(runs=[views.line_of(run) for run in self.runs.values()], total=len(self.runs), offset=0)

    async def close(self) -> None:
        """Follow nothing any more, and end the streams."""
        self.channels.close()
        tasks = [self._publisher, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                structlog.get_logger("web").error("a task of the page failed", why=repr(result))
        for run in self.runs.values():
            run.close()


LINE_BYTES_MAX: Final = INVITE_BYTES_MAX + COORDINATORS_MAX * (ADDRESS_BYTES_MAX + 8) + 64


@dataclass(frozen=True)
class Shown:
    """A run to show. `at`: where this process reaches the coordinators, if not at the invite's addresses."""

    invite: Invite
    at: tuple[str, ...] = ()

    @staticmethod
    def from_line(line: str) -> Shown:
        """Read a line of JSON: {"invite": link, "at": [host:port, ...]}. Raises OperatorError."""
        try:
            values = json.loads(line)
            link, at = values["invite"], tuple(map(str, values["at"]))[:COORDINATORS_MAX]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OperatorError(f"stdin: expected lines of JSON with `invite` and `at`, got {line[:64]!r}") from error
        return Shown(Invite.parse(str(link)), at)

    def line(self) -> str:
        """Inverse of `from_line`, with its line break."""
        return json.dumps({"invite": self.invite.link(), "at": self.at}) + "\n"


def gone_in(line: str) -> str:
    """The run that a line of JSON, {"gone": run id}, takes off the page; empty for another line."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return str(values["gone"]) if isinstance(values, dict) and "gone" in values else ""


async def serve(
    shown: Sequence[Shown], listen: str, hosts: Sequence[str], ready: Callable[[str], None], *, from_stdin: bool = False
) -> None:
    """Serve until a stop signal, or, with `from_stdin`, until stdin ends. `ready` gets the page's URL."""
    made = listening(listen)
    raise_descriptors()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in heeded():
        loop.add_signal_handler(number, stop.set)
    site = Site()
    server = server_of(app_of(site, hosts))
    serving = asyncio.ensure_future(server.serve(sockets=[made]))
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait()), serving]
    try:
        for one in shown:
            site.add(one.invite, one.at)
        if from_stdin:
            waits.append(asyncio.ensure_future(_take_lines(site)))
        ready(url_of(made))
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await site.close()
        server.should_exit = True
        for task in waits:
            if task is not serving:
                task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        made.close()


async def _take_lines(site: Site) -> None:
    """Show the runs that come on stdin, until it ends."""
    log = structlog.get_logger("web")
    async for line in _lines():
        try:
            gone = gone_in(line)
            if gone:
                await site.remove(gone)
                continue
            one = Shown.from_line(line)
            if site.add(one.invite, one.at):
                log.debug("the page shows a run", run=one.invite.run_id.hex()[:16])
        except OperatorError as error:
            log.warning("a run is not shown", why=str(error))


async def _lines() -> AsyncIterator[str]:
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    )
    try:
        with suppress(ValueError):  # a line beyond the limit ends the reading, and with it the process
            while line := await reader.readline():
                yield line.decode("utf-8", "replace")
    finally:
        transport.close()


SECONDS_MAX: Final = 600.0
"""Of reading a whole log."""
IDENTITIES_MAX: Final = 2000
NOT_COPIED: Final = ("package.json",)
OPENING: Final = '<html lang="en">'


def export_page(invite: Invite, folder: Path) -> int:
    """Read a run's whole log and write its page into `folder`, which is new or empty. Returns the last step.

    Raises OperatorError for a folder that has files, NetworkError if the coordinator does not give the whole log.
    """
    with new_folder(folder) as fresh:
        run = asyncio.run(_read(invite))
        try:
            write(run, fresh)
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
    """Write the page of a run that was read to its end into an empty folder. Raises OSError."""
    assert run.facts is not None, "the coordinator has answered"
    for path in sorted(STATIC.rglob("*")):
        if path.is_file() and path.name not in NOT_COPIED:
            copy = folder / path.relative_to(STATIC)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    page = folder / "index.html"
    text = page.read_text(encoding="utf-8")
    assert OPENING in text, "the page begins as this module expects it"
    page.write_text(text.replace(OPENING, f'<html lang="en" data-run="{run.run_hex}">'), encoding="utf-8")
    data = folder / "data"
    (data / "log").mkdir(parents=True, exist_ok=True)
    _answer(data / "run.json", views.run_of(run))
    _answer(data / "steps.json", run.book.points(1, run.book.head, POINTS_MAX))
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


app = typer.Typer(add_completion=False)


@app.command()
def page(
    listen: Annotated[str, typer.Option(help="host:port of the page.")] = LISTEN,
    host: Annotated[
        list[str] | None, typer.Option(help="A name under which browsers find the page; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON.")] = False,
) -> None:
    """Show the runs whose invites come on stdin, one line of JSON each, until stdin ends."""
    configure_logging(as_json=as_json)

    def ready(url: str) -> None:
        print_json({"event": "serving", "url": url})

    asyncio.run(serve((), listen, host or (), ready, from_stdin=True))


if __name__ == "__main__":
    exit_with(app)
