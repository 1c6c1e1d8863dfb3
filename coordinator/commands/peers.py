"""The commands `swarmentum-coordinator peer ...`: list a run's peers, exclude a peer, readmit a peer."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from coordinator.commands.options import EXIT_CODES, Home, Json, Key, RunName, operator_at
from coordinator.commands.signing import show_order
from protos.errors import OperatorError
from protos.identity import peer_id, public_key_of
from protos.owner import NOBODY, shown_owner
from protos.run_facts import peer_values
from protos.text import print_json, printable
from protos.v1 import coordinator_pb2 as pb

NAMES_SHOWN_MAX = 5
PEER_SHOWN = 8
"""The end of a peer id, as `swarmentum status` and logs show it; `--json` has the whole."""
PeerName = Annotated[
    str, typer.Argument(metavar="PEER", help="Its peer id, or the beginning or the end of it; see `list`.")
]
app = typer.Typer(help="List a run's peers, exclude one, admit it again.", no_args_is_help=True)


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
