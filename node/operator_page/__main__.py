"""`python -m node.operator_page`: HTTP for the operator's browser. `coordinator/web` starts it, and answers its requests."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from node.operator_page.page_routes import Pipe, app_of
from node.web.server import listening, server_of, url_of
from protos.console import configure_logging, exit_with
from protos.signals import heeded
from protos.text import print_json

CONNECTIONS_MAX = 64

app = typer.Typer(add_completion=False)


@app.command()
def page(
    listen: Annotated[str, typer.Option(help="host:port of the page.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name under which browsers find the page; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON.")] = False,
) -> None:
    """Serve the operator's page until stdin ends."""
    configure_logging(as_json=as_json)
    asyncio.run(serve(listen, tuple(host or ())))


async def serve(listen: str, hosts: tuple[str, ...]) -> None:
    """Until a stop signal, or the end of stdin."""
    made, pipe, stop = listening(listen), Pipe(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in heeded():
        loop.add_signal_handler(number, stop.set)
    server = server_of(app_of(pipe, hosts), CONNECTIONS_MAX)
    serving = asyncio.ensure_future(server.serve(sockets=[made]))
    print_json({"event": "serving", "url": url_of(made)})
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(pipe.run()), serving]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        server.should_exit = True
        for task in waits:
            if task is not serving:
                task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        made.close()


if __name__ == "__main__":
    exit_with(app)
