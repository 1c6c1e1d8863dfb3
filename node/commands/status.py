"""The commands that look at a run from outside, and join nothing: `status`, `watch`, and the page, served (`web`) or as files
(`export-page`).

The text of the facts is a stranger's: it is shown printable, and never as markup. None of them needs torch: the base install
has them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.commands.options import link_from
from node.imports import WAITING, slowly
from node.link.run_reader import RunReader, read_facts
from protos.accounts import NOBODY, groups, owners_of
from protos.changes import changed_values
from protos.clocks import Waits
from protos.errors import NetworkError
from protos.evaluation import figures
from protos.identity import peer_id
from protos.invite import Invite
from protos.run_config import RunConfig
from protos.run_facts import peer_values, run_values, unconfirmed_words
from protos.start import fork_values, fork_words
from protos.text import amount, as_line, print_json, printable
from protos.v1 import coordinator_pb2 as pb

LINE_SECONDS = 2.0
FIGURES_READ_MAX = 64
COLUMNS_OF_ONE_TABLE = 130
NEVER_WRAPPED = {"peer", "step", "state digest", "votes", "samples/s", "loss", "score"}


def as_values(facts: pb.GetRunResponse, config: RunConfig, run_id: bytes) -> dict[str, Any]:
    """The facts as JSON values."""
    snapshot = facts.snapshot if facts.HasField("snapshot") else None
    owners = owners_of(facts.peers)
    return {
        **run_values(facts, config, run_id),
        "in_line": facts.in_line,
        "head": facts.head_hash.hex(),
        "payload_bytes": facts.payload_bytes_total,
        "anchored": facts.anchored,
        "unconfirmed_steps": facts.unconfirmed_steps,
        "fork": fork_values(facts.genesis),
        "changed": changed_values(facts.changed),
        "held_out": [{**it.values(), "text": str(it)} for it in figures(facts.evaluations[:FIGURES_READ_MAX], run_id)],
        "snapshot_step": None if snapshot is None else snapshot.step,
        "snapshot_root": None if snapshot is None else snapshot.root.hex(),
        "peers": [peer_values(peer, owners.get(peer.public_key, NOBODY)) for peer in facts.peers],
        "owners": _owners(facts),
        "exclusions": [
            {
                "id": peer_id(excluded.public_key),
                "step": excluded.step or None,
                "reason": printable(excluded.reason),
                "proven": excluded.proven,
                "by_operator": excluded.by_operator,
            }
            for excluded in facts.exclusions
        ],
    }


def _owners(facts: pb.GetRunResponse) -> list[dict[str, Any]]:
    """The peers by owner, the most accepted votes first."""
    peers = {peer.public_key: peer for peer in facts.peers}
    return [
        {
            "name": group.owner.name,
            "peers": [peer_id(key) for key in group.peers],
            "votes_accepted": sum(peers[key].votes_accepted for key in group.peers),
            "samples_per_second": sum(
                peers[key].samples_per_second
                for key in group.peers
                if peers[key].phase != pb.PeerPhase.PEER_PHASE_ABSENT
            ),
        }
        for group in groups(owners_of(facts.peers), lambda key: peers[key].votes_accepted)
    ]


def show(values: dict[str, Any]) -> None:
    """Print the facts for people."""
    loss = "-" if values["loss"] is None else f"{values['loss']:.4f}"
    console = Console()
    head = Text(values["name"], style="bold")
    console.print(head.append(f" ({values['run'][:16]}): {_phase(values)}", style="not bold"))
    console.print(
        f"step {values['step']} of {values['steps']}, loss {loss}, head {values['head'][:16]}", highlight=False
    )
    if unconfirmed := unconfirmed_words(values["unconfirmed_steps"], anchored=values["anchored"]):
        console.print(unconfirmed, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if values["fork"] is not None:
        console.print(fork_words(values["fork"]), highlight=False, markup=False)
    if values["held_out"]:
        console.print(f"held-out loss {values['held_out'][-1]['text']}", highlight=False, markup=False)
    for row in values["changed"]:
        since = f"{row['key']} = {row['value']}, changed by the operator from step {row['from_step']} on"
        console.print(since, highlight=False, markup=False)
    for table in peer_tables(values["peers"], console.width):
        console.print(table)
    for peer in values["peers"]:
        if peer["standing_reason"] and peer["phase"] != "absent":
            console.print(f"{_peer(peer)}: {peer['standing_reason']}", highlight=False, markup=False, soft_wrap=True)
    for owner in values["owners"]:
        many = f"{len(owner['peers'])} peers" if len(owner["peers"]) > 1 else "1 peer"
        what = f"{many}, {owner['votes_accepted']} votes, {owner['samples_per_second']:.1f} samples/s"
        console.print(f"{owner['name']}: {what}", highlight=False, markup=False, soft_wrap=True)
    for excluded in values["exclusions"]:
        when = "from the next entry on" if excluded["step"] is None else f"step {excluded['step']}"
        console.print(f"{excluded['id']}, {when}: {excluded['reason']}", highlight=False, markup=False, soft_wrap=True)


def peer_tables(peers: list[dict[str, Any]], columns: int) -> list[Table]:
    """The peers in one table, or in two where the window is too narrow for one. Nothing in them is cut: words wrap."""
    if columns >= COLUMNS_OF_ONE_TABLE:
        return [_table({"peer": _peer, **_WHOSE, **_WORK}, peers)]
    return [_table({"peer": _peer, **_WORK}, peers), _table({"peer": _peer, **_WHOSE}, peers)][: 1 + bool(peers)]


def _table(columns: dict[str, Callable[[dict[str, Any]], str]], peers: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in NEVER_WRAPPED)
    for peer in peers:
        table.add_row(*(Text(cell(peer)) for cell in columns.values()))
    return table


def _peer(peer: dict[str, Any]) -> str:
    return str(peer["id"][-8:])


_WHOSE: dict[str, Callable[[dict[str, Any]], str]] = {
    "owner": lambda peer: peer["owner"] or "-",
    "device": lambda peer: peer["device"],
    "state digest": lambda peer: peer["state_digest"][:16],
    "score": lambda peer: f"{peer['score']:.1f}",
}
_WORK: dict[str, Callable[[dict[str, Any]], str]] = {
    "phase": lambda peer: (
        peer["phase"] + (", anchor" if peer["anchor"] else "") + (", paused" if peer["paused"] else "")
    ),
    "step": lambda peer: str(peer["applied_step"]),
    "votes": lambda peer: str(peer["votes_accepted"]),
    "samples/s": lambda peer: f"{peer['samples_per_second']:.1f}",
    "loss": lambda peer: "-" if peer["loss"] is None else f"{peer['loss']:.4f}",
    "standing": lambda peer: peer["standing"],
}


def watch(link: str, *, as_json: bool) -> None:
    """Look until the run is finished, over one connection: a line for each change."""
    asyncio.run(_lines(Invite.parse(link), as_json=as_json))


async def _lines(invite: Invite, *, as_json: bool) -> None:
    """A coordinator that is away is asked again, for ever."""
    before: tuple[Any, ...] = ()
    waits = Waits()
    async with RunReader(invite) as run:
        while True:
            try:
                values = as_values(*await run.facts(), invite.run_id)
            except NetworkError as error:
                print(f"the coordinator is away, asking again: {printable(str(error))}", file=sys.stderr, flush=True)
                await asyncio.sleep(waits.next())
                continue
            waits.reset()
            now = values["phase"], values["step"], len(values["peers"])
            if now != before:
                print(as_line(values) if as_json else _line(values), flush=True)
            if values["phase"] == "finished":
                return
            before = now
            await asyncio.sleep(LINE_SECONDS)


def _phase(values: dict[str, Any]) -> str:
    """The phase and why. The reason of a finished run says the phase, too."""
    phase, reason = str(values["phase"]), str(values["reason"])
    return reason if reason.startswith(phase) else f"{phase}, {reason}"


def _line(values: dict[str, Any]) -> str:
    loss = "-" if values["loss"] is None else f"{values['loss']:.4f}"
    peers = "1 peer" if len(values["peers"]) == 1 else f"{len(values['peers'])} peers"
    where = f"step {values['step']} of {values['steps']}, loss {loss}, {peers}"
    return f"{where}, {amount(values['payload_bytes'])} of votes: {_phase(values)}"


def status(link: str) -> dict[str, Any]:
    """One look at a run."""
    invite = Invite.parse(link)
    with slowly(WAITING):
        return as_values(*asyncio.run(read_facts(invite)), invite.run_id)


def web(links: Sequence[str], listen: str, hosts: Sequence[str], *, as_json: bool) -> None:
    """Serve the page until Ctrl-C. Raises OperatorError for a link that is none, or an address that cannot be used."""
    from node.web.serve import Shown, serve

    shown = [Shown(Invite.parse(link_from(link)).public("The page")) for link in links]

    def ready(url: str) -> None:
        if as_json:
            print_json({"event": "serving", "url": url})
            return
        names = ", ".join(printable(one.invite.run_name, 64) for one in shown)
        Console().print(f"The page of {names}: {url}  Ctrl-C stops it.", markup=False, highlight=False, soft_wrap=True)

    asyncio.run(serve(shown, listen, hosts, ready))


def export_files(link: str, folder: Path, *, as_json: bool) -> None:
    """Write the page of a run as files. Raises OperatorError, NetworkError."""
    from node.web.serve import export_page

    steps = export_page(Invite.parse(link_from(link)).public("The page"), folder)
    if as_json:
        print_json({"event": "exported", "folder": str(folder), "steps": steps})
    else:
        print(f"The page of the run, with {steps} entries, is in {folder}. Put the folder on any host of files.")
