"""The commands about peers of a run: `swarmentum-coordinator peer ...` lists, excludes and readmits them; `invite ...` makes
tickets for runs in admission mode `invite`; and `anchor create` makes a link for processes whose reports on the state of a run
count.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from coordinator.commands.operator import operator_at
from coordinator.commands.signing import show_order
from coordinator.config import EXIT_CODES, Home, Json, Key, RunName
from protos.accounts import NOBODY, shown_owner
from protos.errors import OperatorError
from protos.identity import peer_id, public_key_of, short
from protos.limits import TICKET_MS_MAX, TICKET_USES_MAX
from protos.run_facts import peer_values
from protos.text import print_json, printable
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import ticket_pb2
from protos.version import Program

UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
NEVER = "never"
SHORT_ID_DIGITS = 8
invites = typer.Typer(
    cls=Program,
    help="Make, list and revoke the invites of a run whose admission.mode is `invite`.",
    no_args_is_help=True,
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


@invites.command(epilog=EXIT_CODES)
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


@invites.command("list", epilog=EXIT_CODES)
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


@invites.command(epilog=EXIT_CODES)
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
    cls=Program,
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


NAMES_SHOWN_MAX = 5
PEER_SHOWN = 8
"""The end of a peer id, as `swarmentum status` and logs show it; `--json` has the whole."""
PeerName = Annotated[
    str, typer.Argument(metavar="PEER", help="Its peer id, or the beginning or the end of it; see `list`.")
]
app = typer.Typer(cls=Program, help="List a run's peers, exclude one, admit it again.", no_args_is_help=True)


@app.command("list", epilog=EXIT_CODES)
def list_peers(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """List a run's peers, those that are away and those that are excluded too, with the reason."""
    rows = rows_of(operator_at(home).find(run))
    if as_json:
        for row in rows:
            print_json(row)
        return
    table = Table(Column("peer", no_wrap=True), "phase", "standing", "step", "votes", "device", "why", title="Peers")
    for row in rows:
        figures = str(row["applied_step"]), str(row["votes_accepted"])
        table.add_row(
            row["id"][-PEER_SHOWN:],
            row["phase"],
            Text(row["standing"]),
            *figures,
            Text(row["device"]),
            Text(row["standing_reason"]),
        )
    Console().print(table if rows else "No peer has come yet.")


@app.command(epilog=EXIT_CODES)
def exclude(
    run: RunName,
    peer: PeerName,
    reason: Annotated[str, typer.Option(help="Why: the peer and all who read the log see it.")],
    key: Key = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Let a peer take part no more, from the open step on. A strict run no longer waits for it.

    By its whole peer id also one that never came. In a run with operators' keys this is an order, which others of them have to
    sign, too: `order sign`.
    """
    from coordinator.commands.signing import operators

    if (ordering := operators(run, home, key)) is not None:
        excludes = peer_named(ordering.facts, peer)
        show_order(ordering.give(excludes=excludes, reason=reason), as_json=as_json)
        return
    operator = operator_at(home)
    found = operator.find(run)
    public_key = peer_named(found, peer)
    operator.exclude_peer(found.genesis, public_key, reason)
    known = public_key in _known(found)
    if as_json:
        print_json({"id": peer_id(public_key), "excluded": True, "reason": reason, "known": known})
        return
    told = "and told why" if known else "though this run has not seen it yet; it is told why if it comes"
    text = f"Peer [bold]{peer_id(public_key)}[/] is excluded, {told}; the next entry of the log says so."
    Console(soft_wrap=True).print(text, highlight=False)


@app.command(epilog=EXIT_CODES)
def readmit(run: RunName, peer: PeerName, home: Home = None, as_json: Json = False) -> None:
    """Let an excluded peer join again, unless it was excluded for two payloads for one step."""
    operator = operator_at(home)
    found = operator.find(run)
    public_key = peer_named(found, peer)
    operator.readmit_peer(found.genesis, public_key)
    if as_json:
        print_json({"id": peer_id(public_key), "excluded": False})
        return
    text = f"Peer [bold]{peer_id(public_key)}[/] may join again."
    Console(soft_wrap=True).print(text, highlight=False)


def peer_named(run: pb.GetRunResponse, name: str) -> bytes:
    """The public key of the run's one peer whose id begins or ends with `name`, or of a whole peer id; else OperatorError."""
    try:
        return public_key_of(name)
    except OperatorError:
        pass  # not a whole one
    known = map(peer_id, sorted(_known(run)))
    found = [whole for whole in known if name and (whole.startswith(name) or whole.endswith(name))]
    if len(found) == 1:
        return public_key_of(found[0])
    if not found:
        raise OperatorError(
            f"no peer of this run is called {name!r}: `swarmentum-coordinator peer list` shows them; "
            "name a peer that never came by its whole peer id (12D3Koo...)"
        )
    shown = ", ".join(found[:NAMES_SHOWN_MAX]) + (", ..." if len(found) > NAMES_SHOWN_MAX else "")
    raise OperatorError(f"{len(found)} peers of this run are called {name!r}: {shown}; give more of the id")


def _known(run: pb.GetRunResponse) -> set[bytes]:
    """The public keys that the coordinator named."""
    return {peer.public_key for peer in run.peers} | {excluded.public_key for excluded in run.exclusions}


def rows_of(run: pb.GetRunResponse) -> list[dict[str, Any]]:
    """Peers as the run knows them, then those that it only knows to be excluded."""
    excluded = {it.public_key: it for it in run.exclusions}
    rows = []
    for peer in run.peers:
        by_operator = peer.public_key in excluded and excluded.pop(peer.public_key).by_operator
        rows.append({**peer_values(peer, shown_owner(peer.owner)), "by_operator": by_operator})
    for key, it in excluded.items():
        row = peer_values(
            pb.PeerStatus(public_key=key, phase=pb.PeerPhase.PEER_PHASE_ABSENT, standing="excluded"), NOBODY
        )
        rows.append({**row, "standing_reason": printable(it.reason), "by_operator": it.by_operator})
    return rows
