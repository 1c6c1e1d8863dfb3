"""`swarmentum runs`: a public list of runs, from a file or the web. Joins nothing, and asks no coordinator.

The list is a stranger's: its size, its redirects and the time that it may take are bounded. Refuses http, but to this machine.
"""

from __future__ import annotations

import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from node.commands.options import Json, need_node_extra
from node.imports import slowly
from protos.address import is_web, web_problem
from protos.errors import NetworkError, OperatorError, Refusal, RefusedError
from protos.run_facts import AHEAD_SECONDS, LIST_BYTES_MAX, open_runs
from protos.text import count, duration, print_json, printable

if TYPE_CHECKING:
    import httpx2

LIST_SECONDS_MAX: Final = 60.0
OLD_SECONDS: Final = 86_400


def runs(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="URL|FILE",
            help="The list: an https address, or a file of `swarmentum-coordinator run list --public`.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the runs of a public list: what each trains, its free places, and the command that joins it."""
    if source is None:
        raise OperatorError("name a list of runs, an https address or a file: there is no list that everybody uses")
    try:
        found, left_out = open_runs(_read(source), time.time())
    except Refusal as refusal:
        raise OperatorError(f"{source}: {refusal.detail}") from refusal
    rows = [run.values() for run in found]
    if as_json:
        print_json({"runs": rows, "left_out": left_out})
    else:
        for row in rows:
            _show(row)
        if not rows and not left_out:
            print("This list has no runs.")
    for why in left_out:
        print(printable(why), file=sys.stderr)
    if left_out and not rows:
        raise RefusedError(f"{source}: no entry of this list is what its coordinator signed")


def _read(source: str) -> bytes:
    if is_web(source):
        need_node_extra()
        return _fetched(source)
    try:
        with Path(source).open("rb") as file:
            return file.read(LIST_BYTES_MAX + 1)
    except OSError as error:
        raise OperatorError(f"{source} cannot be read: {error.strerror}") from error


def _fetched(url: str) -> bytes:
    """Raises OperatorError for an address that cannot be used, and NetworkError."""
    import httpx2

    from node.data.download import WebReader, one_line

    if why := web_problem(url):
        raise OperatorError(f"{url!r} is no address of a list: {why}")
    here = _is_this_machine(httpx2.URL(url))
    if httpx2.URL(url).scheme != "https" and not here:
        raise OperatorError(f"{url}: expected https, because anybody on the way can change what http brings")

    def check(request: httpx2.Request) -> None:
        if request.url.scheme != "https" and not (here and _is_this_machine(request.url)):
            raise OSError(f"it leads to {request.url}, which is no https address")

    until, found = time.monotonic() + LIST_SECONDS_MAX, bytearray()
    try:
        with slowly(f"waiting for {url}"):
            for block in WebReader(check=check).blocks(url, 0, LIST_BYTES_MAX):
                found += block
                if time.monotonic() > until:
                    raise OSError(f"it took more than {LIST_SECONDS_MAX:.0f} s")
    except (httpx2.HTTPError, OSError) as error:
        raise NetworkError(f"the list of runs at {url} cannot be had: {one_line(error)}") from error
    return bytes(found)


def _is_this_machine(url: httpx2.URL) -> bool:
    try:
        return url.scheme == "http" and (url.host == "localhost" or ip_address(url.host).is_loopback)
    except ValueError:
        return False


def _show(row: dict[str, Any]) -> None:
    """One run, for people. Its words are its operator's: never markup."""
    loss = "" if row["loss"] is None else f", loss {row['loss']:.4f}"
    size = "" if row["parameters"] is None else f" of {count(row['parameters'])} parameters"
    for line in (
        f"{row['name']} ({row['run'][:16]}): {row['phase']}, step {row['step']} of {row['steps']}{loss}",
        f"  trains {row['model']}{size} on {', '.join(row['data'])}, {row['context']} tokens a sample",
        f"  {row['places_free']} of {row['places']} places are free; {_admits(row)}",
        f"  as its coordinator signed it {_ago(time.time() - row['as_of'])}",
        f"  swarmentum {'join' if _joinable(row) else 'status'} {row['invite']}",
    ):
        Console(soft_wrap=True).print(line, highlight=False, markup=False)


def _ago(age: float) -> str:
    asked = "`swarmentum status` asks the coordinator"
    if age < -AHEAD_SECONDS:
        return f"at a time that is {duration(-age)} ahead: its clock or this machine's is wrong; {asked}"
    return f"{duration(max(age, 0))} ago" + (f", which is old: {asked}" if age > OLD_SECONDS else "")


def _joinable(row: dict[str, Any]) -> bool:
    return row["admission"] == "open" and row["phase"] not in ("finished", "archived")


def _admits(row: dict[str, Any]) -> str:
    if row["phase"] in ("finished", "archived"):
        return "the run is over"
    if row["admission"] == "open":
        return (
            f"peers in the line: {row['in_line']}" if row["in_line"] or not row["places_free"] else "anybody may join"
        )
    who = "with an invite" if row["admission"] == "invite" else "that it lists"
    return f"its operator admits only peers {who}"
