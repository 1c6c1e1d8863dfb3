"""The commands `swarmentum-coordinator invite ...`: tickets for runs in admission mode `invite`; and `anchor create`: a link
for processes whose reports on the state of a run count.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.commands.options import EXIT_CODES, Home, Json, RunName, operator_at
from protos.errors import OperatorError
from protos.identity import peer_id, short
from protos.limits import TICKET_MS_MAX, TICKET_USES_MAX
from protos.text import print_json, printable
from protos.v1 import ticket_pb2

UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
NEVER = "never"
SHORT_ID_DIGITS = 8
app = typer.Typer(
    help="Make, list and revoke the invites of a run whose admission.mode is `invite`.", no_args_is_help=True
)


def milliseconds(text: str) -> int:
    """`90m`, `12h`, `7d`, `2w` in ms; 0 for `never`."""
    if text == NEVER:
        return 0
    found = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    length = int(found[1]) * UNITS_MS[found[2]] if found else 0
    if not 0 < length <= TICKET_MS_MAX:
        raise OperatorError(f"--expires {text}: expected a time such as 90m, 12h, 7d or 2w, at most 3650d; or {NEVER}")
    return length


@app.command(epilog=EXIT_CODES)
def create(
    run: RunName,
    expires: Annotated[str, typer.Option(help="How long it counts: 90m, 12h, 7d, 2w; or never.")] = "7d",
    uses: Annotated[int, typer.Option(min=1, max=TICKET_USES_MAX, help="How many peers may join with it.")] = 1,
    label: Annotated[str, typer.Option(help="A label; every person with the link can read it.")] = "",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make an invite, and print its link. A peer that joined with it once may come back until the run ends."""
    length = milliseconds(expires)
    operator = operator_at(home)
    genesis = operator.find(run).genesis
    ticket = operator.create_ticket(genesis, length, uses, label)
    link = operator.invite(genesis, ticket).link()
    if as_json:
        print_json({**row_of(ticket), "invite": link})
        return
    peers = "1 peer" if uses == 1 else f"{uses} peers"
    until = f"until {_when(ticket)}" if ticket.expires_unix_ms else "for ever"
    text = f"Invite [bold]{ticket.ticket_id.hex()[:SHORT_ID_DIGITS]}[/] admits {peers} {until}. On each:"
    Console(soft_wrap=True).print(text, highlight=False)
    print(f"swarmentum join {link}")


@app.command("list", epilog=EXIT_CODES)
def list_invites(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """List a run's invites: the state of each, and the peers that joined with it. With --json also the links."""
    operator = operator_at(home)
    genesis = operator.find(run).genesis
    found = operator.tickets(genesis)
    if as_json:
        for status in found:
            users = [peer_id(key) for key in status.users]
            link = operator.invite(genesis, status.ticket).link()
            print_json({**row_of(status.ticket, status.state, users), "invite": link})
        return
    table = Table("invite", "label", "state", "uses left", "expires", "used by", title="Invites")
    for status in found:
        ticket = status.ticket
        left = f"{ticket.uses - len(status.users)} of {ticket.uses}"
        used_by = ", ".join(short(key) for key in status.users)
        name = ticket.ticket_id.hex()[:SHORT_ID_DIGITS]
        table.add_row(name, Text(printable(ticket.label)), status.state, left, _when(ticket), used_by)
    Console().print(table)


@app.command(epilog=EXIT_CODES)
def revoke(
    run: RunName,
    ticket: Annotated[str, typer.Argument(metavar="INVITE", help="The start of its id, or its label; see `list`.")],
    and_its_peers: Annotated[
        bool, typer.Option("--and-its-peers", help="Peers that joined with it have to leave, too.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Let an invite admit nobody else. Peers that joined with it stay, unless --and-its-peers is given."""
    operator = operator_at(home)
    genesis = operator.find(run).genesis
    found = operator.find_ticket(genesis, ticket)
    operator.revoke_ticket(genesis, found.ticket, with_peers=and_its_peers)
    gone = list(found.users) if and_its_peers else []
    if as_json:
        print_json({"ticket": found.ticket.ticket_id.hex(), "removed": [peer_id(key) for key in gone]})
        return
    name = found.ticket.ticket_id.hex()[:SHORT_ID_DIGITS]
    rest = f"; {len(gone)} peers that joined with it have to leave" if and_its_peers else ""
    Console(soft_wrap=True).print(f"Invite [bold]{name}[/] is revoked: it admits nobody else{rest}.", highlight=False)


def row_of(ticket: ticket_pb2.Ticket, state: str = "open", users: list[str] | None = None) -> dict[str, Any]:
    """A ticket as JSON values. `users`: the peer ids that joined with it."""
    used_by = users or []
    return {
        "ticket": ticket.ticket_id.hex(),
        "label": ticket.label,
        "state": state,
        "uses": ticket.uses,
        "uses_left": ticket.uses - len(used_by),
        "expires": _when(ticket) if ticket.expires_unix_ms else None,
        "used_by": used_by,
    }


def _when(ticket: ticket_pb2.Ticket) -> str:
    if not ticket.expires_unix_ms:
        return NEVER
    return datetime.fromtimestamp(ticket.expires_unix_ms // 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


ANCHOR_USES = 4
anchor_app = typer.Typer(
    help="Make links for anchors: processes that only apply entries, and whose reports on the state count.",
    no_args_is_help=True,
)


@anchor_app.command("create", epilog=EXIT_CODES)
def create_anchor_link(
    run: RunName,
    uses: Annotated[
        int, typer.Option(min=1, max=TICKET_USES_MAX, help="How many anchors may start with it.")
    ] = ANCHOR_USES,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make an anchor link of a run, and print it. The link's holder decides about the run's state, so keep it to yourself.

    From the first anchor on, state digests and snapshots of the run count only from anchors. `invite revoke` revokes the link.
    """
    operator = operator_at(home)
    genesis = operator.find(run).genesis
    link = operator.anchor_link(genesis, uses)
    if as_json:
        print_json({"run": link.run_id.hex(), "anchor": link.link()})
        return
    Console(soft_wrap=True).print(
        "Run it beside the coordinator, or on another machine that is always on (no GPU needed). Keep the link to yourself:",
        highlight=False,
    )
    print(f"swarmentum anchor {link.link()}")
