"""`python -m coordinator.web`: the operator's page beside a coordinator, which starts this process. ADR 43.

This process reads the home's key for the operator's actions. A third process speaks HTTP with the browser, without a key; two
pipes connect it. Its first line says that it is ready, and where. Each further line of its stdout is a request: a number, a
space, and JSON. A line of its stdin is the answer to one. Nothing else of it reaches this side. The end of stdin ends this
process, so the page never outlives its coordinator.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import structlog
import typer

from coordinator.serving.page import ended
from coordinator.serving.throttled_log import ThrottledLog
from coordinator.store.home_files import PageAddress
from coordinator.web.requests import OperatorReply, Requests
from protos.console import configure_logging, exit_with
from protos.process import heeded, python_command
from protos.text import as_line, print_json

MODULE: Final = "node.operator_page.page_routes"
REQUEST_BYTES_MAX: Final = 1 << 20
"""A request with a run.toml of 64 Ki characters, each escaped in JSON as 12 bytes."""
NUMBER_DIGITS_MAX: Final = 15
REQUESTS_MAX: Final = 64
"""Requests that wait for their answers. The process itself sends fewer."""
READY_SECONDS_MAX: Final = 120.0
WRITE_SECONDS_MAX: Final = 10.0


class _EndedError(Exception):
    """The process has closed its stdout."""


class Child:
    """One life of that process."""

    def __init__(self, listen: str, hosts: tuple[str, ...], requests: Requests) -> None:
        named = [word for host in hosts for word in ("--host", host)]
        self._command = python_command("-m", MODULE, "--json", "--listen", listen, *named)
        self._requests = requests
        self._log = structlog.get_logger("operator-page")
        self._caused = ThrottledLog(self._log)

    async def run(self, ready: Callable[[str], None]) -> int:
        """Serve until the process ends; its exit code. `ready` gets the page's URL."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SWARMENTUM_")}
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, env=own, limit=REQUEST_BYTES_MAX
        )
        try:
            await self._serve(child, ready)
        except* _EndedError:
            pass  # the requests that were under way have nobody who waits for them
        except* (TimeoutError, ConnectionError, ValueError) as group:
            self._log.warning("the operator's page gets no answers any more", why=repr(group.exceptions[0]))
        finally:
            await ended(child)
        return -1 if child.returncode is None else child.returncode

    async def _serve(self, child: asyncio.subprocess.Process, ready: Callable[[str], None]) -> None:
        assert child.stdout is not None
        async with asyncio.timeout(READY_SECONDS_MAX):
            first = await child.stdout.readline()
        if not first:
            raise _EndedError
        ready(str(json.loads(first)["url"]))
        places = asyncio.Semaphore(REQUESTS_MAX)
        async with asyncio.TaskGroup() as tasks:
            while line := await child.stdout.readline():  # ValueError for a line that is too long
                await places.acquire()
                task = tasks.create_task(self._one(child, line))
                task.add_done_callback(lambda _: places.release())
            raise _EndedError

    async def _one(self, child: asyncio.subprocess.Process, line: bytes) -> None:
        number, _, data = line.partition(b" ")
        if not number.isdigit() or len(number) > NUMBER_DIGITS_MAX:
            self._caused.warning("the operator's page sent a line that is no request", "lines", bytes=len(line))
            return
        answer = await self._requests.answer(data)
        assert child.stdin is not None
        with suppress(ConnectionError):  # the process is gone, and with it everybody who could be told
            child.stdin.write(line_of(int(number), answer))
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await child.stdin.drain()


def line_of(number: int, answer: OperatorReply) -> bytes:
    """An answer as a line."""
    values = {"id": number, "status": answer.status, "body": answer.body, "cookie": answer.cookie}
    return as_line(values).encode("ascii") + b"\n"


READ_BYTES: Final = 4096

app = typer.Typer(add_completion=False)


@app.command()
def page(
    home: Annotated[Path, typer.Option(help="The home folder of the coordinator.")],
    listen: Annotated[str, typer.Option(help="host:port of the page.")],
    host: Annotated[str | None, typer.Option(help="The name under which browsers find the page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON.")] = False,
) -> None:
    """Serve the operator's page of a home folder until stdin ends."""
    configure_logging(as_json=as_json)
    raise typer.Exit(asyncio.run(serve(home, listen, host)))


async def serve(home: Path, listen: str, host: str | None) -> int:
    """Until stdin ends, a signal comes, or the page's process ends; its exit code, or 0."""
    requests, place = Requests(home), PageAddress(home)

    def ready(url: str) -> None:
        shown = f"https://{host}/" if host else url
        place.write(shown)
        print_json({"event": "serving", "url": shown})

    child = asyncio.ensure_future(Child(listen, (host,) if host else (), requests).run(ready))
    ended = asyncio.ensure_future(_ended())
    tasks: list[asyncio.Future[Any]] = [child, ended]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return 0 if ended.done() else child.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        place.remove()
        requests.close()


async def _ended() -> None:
    """Until the coordinator closes stdin, or a stop signal comes."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in heeded():
        loop.add_signal_handler(number, stop.set)
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    )
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while not stopped.done():
            read = asyncio.ensure_future(reader.read(READ_BYTES))
            await asyncio.wait([read, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                read.cancel()
                with suppress(asyncio.CancelledError):
                    await read
            elif not read.result():
                return
    finally:
        stopped.cancel()
        transport.close()


if __name__ == "__main__":
    exit_with(app)
