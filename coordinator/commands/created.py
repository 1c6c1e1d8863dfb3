"""What `run create` and `run fork` print of a new run: its links, and what to do with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from coordinator.commands.anchors import USES
from coordinator.commands.operator import Operator
from protos.invite import Invite
from protos.run_config import RunConfig
from protos.v1 import log_pb2


def link_for_anchors(operator: Operator, genesis: log_pb2.Genesis, config: RunConfig) -> str | None:
    """A link to start anchors with, for a run that needs them and names none."""
    needs = config.trust.anchored and not config.trust.anchors
    return operator.anchor_link(genesis, USES).link() if needs else None


def print_created(
    invite: Invite,
    config: RunConfig,
    anchor_link: str | None,
    *,
    layout: bool,
    fork: Mapping[str, object] | None = None,
) -> None:
    """For programs. `layout`: whether the genesis states it. `fork`: where a fork begins."""
    values = {
        "run": invite.run_id.hex(),
        "name": config.name,
        "admission": config.admission.mode,
        "invite": invite.link(),
    }
    print(json.dumps({**values, "anchor": anchor_link, "trust": config.trust.enabled, "layout": layout, "fork": fork}))


def show_created(invite: Invite, config: RunConfig, anchor_link: str | None, said: str, home: Path | None) -> None:
    """For people: how the anchor and the peers start. `said`: what else there is to say about the run."""
    console, run = Console(soft_wrap=True), invite.run_id.hex()[:16]
    console.print(f"Run [bold]{config.name}[/] ({run}) is created.", highlight=False)
    if said:
        console.print(said, highlight=False, markup=False)
    if anchor_link is not None:
        console.print("First, beside the coordinator (no GPU needed). Keep this link to yourself:", highlight=False)
        print(f"swarmentum anchor {anchor_link}")
    if config.admission.mode == "invite":
        at = f" --home {home}" if home else ""
        console.print("The run takes only peers with an invite. Make one:", highlight=False)
        print(f"swarmentum-coordinator invite create {run} --uses 5 --expires 7d{at}")
        console.print("To look at the run, without joining:", highlight=False)
        print(f"swarmentum status {invite.link()}")
        return
    console.print("On each peer:", highlight=False)
    print(f"swarmentum join {invite.link()}")
