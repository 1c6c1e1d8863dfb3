"""The command `swarmentum-coordinator web login`: a one-time link to the operator's page. ADR 43."""

from __future__ import annotations

import time

import typer
from rich.console import Console

from coordinator.commands.options import EXIT_CODES, Home, Json, settings
from coordinator.store import logins
from coordinator.store.logins import PageAddress
from protos.json_line import print_json

app = typer.Typer(
    help="Log in at the operator's page, where runs are made and steered in a browser.", no_args_is_help=True
)


@app.callback()
def web() -> None:
    """Log in at the operator's page, where runs are made and steered in a browser."""


@app.command(epilog=EXIT_CODES)
def login(home: Home = None, as_json: Json = False) -> None:
    """Print a link that logs one browser in, once, within five minutes. The link before it counts no more.

    The coordinator serves that page with --operator-web-listen. Keep the link to yourself: its holder can do what the page can.
    """
    folder = settings(home=home).home
    url = PageAddress(folder).read()
    link = f"{url}#login={logins.make(folder, time.time())}"
    seconds = int(logins.LINK_SECONDS_MAX)
    if as_json:
        print_json({"link": link, "seconds": seconds})
        return
    text = f"Open this link within {seconds // 60} minutes. It works once; keep it to yourself:"
    Console(soft_wrap=True).print(text, highlight=False)
    print(link)
