"""`python -m node.web`: the page of the runs that come on stdin. A coordinator starts it; people run `swarmentum web`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from node.web.serve import serve
from node.web.server import LISTEN
from protos.console import configure_logging, exit_with
from protos.text import print_json

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
