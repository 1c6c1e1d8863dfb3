"""`python -m coordinator.web`: the operator's page beside a coordinator, which starts this process. ADR 43.

This process reads the home's key for the operator's actions. The process that speaks with browsers is a third one (child.py).
The end of stdin ends this process, so the page never outlives its coordinator.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from coordinator.store.logins import PageAddress
from coordinator.web.child import Child
from coordinator.web.requests import Requests
from protos.console import configure_logging, exit_with
from protos.json_line import print_json
from protos.signals import heeded

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
