"""`swarmentum status`: the coordinator's facts about a run, once. The text of the facts is a stranger's: printable, never
markup."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.link.client import CoordinatorClient
from protos.identity import peer_id
from protos.invite import Invite
from protos.limits import DEVICE_CHARACTERS_MAX
from protos.run_config import RunConfig
from protos.start import fork_values, fork_words
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb


async def fetch(invite: Invite) -> tuple[pb.GetRunResponse, RunConfig]:
    """Ask one of the invite's coordinators. Raises NetworkError or RefusedError."""
    client = CoordinatorClient(invite, None)
    try:
        await client.connect()
        return await client.get_run()
    finally:
        await client.close()


def as_values(facts: pb.GetRunResponse, config: RunConfig, run_id: bytes) -> dict[str, Any]:
    """The facts as JSON values."""
    snapshot = facts.snapshot if facts.HasField("snapshot") else None
    return {
        "run": run_id.hex(),
        "name": printable(config.name),
        "phase": pb.Phase.Name(facts.phase).removeprefix("PHASE_").lower(),
        "reason": printable(facts.reason),
        "step": facts.head_step,
        "steps": facts.total_steps,
        "loss": facts.loss if facts.head_step else None,
        "head": facts.head_hash.hex(),
        "payload_bytes": facts.payload_bytes_total,
        "anchored": facts.anchored,
        "fork": fork_values(facts.genesis),
        "snapshot": None if snapshot is None else {"step": snapshot.step, "root": snapshot.root.hex()},
        "peers": [
            {
                "id": peer_id(peer.public_key),
                "anchor": peer.anchor,
                "paused": peer.paused,
                "phase": pb.PeerPhase.Name(peer.phase).removeprefix("PEER_PHASE_").lower(),
                "device": printable(peer.device, DEVICE_CHARACTERS_MAX),
                "step": peer.applied_step,
                "digest": peer.state_digest.hex(),
                "votes_accepted": peer.votes_accepted,
                "samples_per_second": peer.samples_per_second,
                "loss": peer.loss,
                **_standing(peer),
            }
            for peer in facts.peers
        ],
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


def _standing(peer: pb.PeerStatus) -> dict[str, Any]:
    """A peer's standing in the run; without checks (`trust`), score and rate are 0."""
    rate, why = peer.check_permille / 1000, printable(peer.standing_reason)
    return {"standing": printable(peer.standing), "score": peer.score, "check_rate": rate, "standing_reason": why}


def show(values: dict[str, Any]) -> None:
    """Print the facts for people."""
    loss = "-" if values["loss"] is None else f"{values['loss']:.4f}"
    console = Console()
    head = Text(values["name"], style="bold")
    console.print(head.append(f" ({values['run'][:16]}): {values['phase']}, {values['reason']}", style="not bold"))
    console.print(
        f"step {values['step']} of {values['steps']}, loss {loss}, head {values['head'][:16]}", highlight=False
    )
    if values["fork"] is not None:
        console.print(fork_words(values["fork"]), highlight=False)
    table = Table("peer", "phase", "device", "step", "state digest", "votes", "samples/s", "loss", "standing", "score")
    for peer in values["peers"]:
        table.add_row(
            peer["id"][-8:],
            peer["phase"] + (", anchor" if peer["anchor"] else "") + (", paused" if peer["paused"] else ""),
            Text(peer["device"]),
            str(peer["step"]),
            peer["digest"][:16],
            str(peer["votes_accepted"]),
            f"{peer['samples_per_second']:.1f}",
            f"{peer['loss']:.4f}",
            Text(peer["standing"]),
            f"{peer['score']:.1f}",
        )
    console.print(table)
    for excluded in values["exclusions"]:
        when = "from the next entry on" if excluded["step"] is None else f"step {excluded['step']}"
        console.print(f"{excluded['id']}, {when}: {excluded['reason']}", highlight=False, markup=False, soft_wrap=True)


def status(link: str) -> dict[str, Any]:
    """One look at a run."""
    invite = Invite.parse(link)
    facts, config = asyncio.run(fetch(invite))
    return as_values(facts, config, invite.run_id)
