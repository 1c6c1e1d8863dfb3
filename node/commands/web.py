"""`swarmentum web` and `export-page`: the page of runs, served or as files. They need no torch: the base install has them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from node.commands.options import link_from
from node.web.serve import Shown, export_page, serve
from protos.invite import Invite
from protos.text import print_json, printable


def web(links: Sequence[str], listen: str, hosts: Sequence[str], *, as_json: bool) -> None:
    """Serve the page until Ctrl-C. Raises OperatorError for a link that is none, or an address that cannot be used."""
    shown = [Shown(Invite.parse(link_from(link)).public("The page")) for link in links]

    def ready(url: str) -> None:
        if as_json:
            print_json({"event": "serving", "url": url})
            return
        names = ", ".join(printable(one.invite.run_name, 64) for one in shown)
        Console().print(f"The page of {names}: {url}  Ctrl-C stops it.", markup=False, highlight=False, soft_wrap=True)

    asyncio.run(serve(shown, listen, hosts, ready))


def export(link: str, folder: Path, *, as_json: bool) -> None:
    """Write the page of a run as files. Raises OperatorError, NetworkError."""
    steps = export_page(Invite.parse(link_from(link)).public("The page"), folder)
    if as_json:
        print_json({"event": "exported", "folder": str(folder), "steps": steps})
    else:
        print(f"The page of the run, with {steps} entries, is in {folder}. Put the folder on any host of files.")
