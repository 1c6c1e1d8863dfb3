"""A new run from a run.toml, for `run create` and the operator's page; and what the commands print of a new run: its links."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coordinator.commands.checking import Findings, refuse_second
from coordinator.commands.operator import Operator
from coordinator.commands.peers import ANCHOR_USES
from protos.errors import OperatorError, Refusal
from protos.invite import Invite
from protos.limits import HASH_BYTES
from protos.run_config import RunConfig
from protos.start import StartingState, start_from_values
from protos.text import print_json
from protos.v1 import log_pb2

# The model that a new run begins with, as `swarmentum start-from` described it: `run create --from`. ADR 5.
#
# The coordinator has no torch and never sees a weight. Peers check the state by the root that the genesis names.

FILE_BYTES_MAX = 1 << 16


@dataclass(frozen=True)
class ModelStart:
    """The starting state, and the layout of its parameters."""

    start: StartingState
    layout_digest: bytes
    parameters: int


def model_start(file: Path, layout_digest: bytes) -> ModelStart:
    """Read start.json. `layout_digest`: of run.toml's model if it is known here, else empty. OperatorError."""
    if not file.is_file():
        raise OperatorError(
            f"--from {file}: no such file. Where the model and swarmentum[node] are, run `swarmentum start-from "
            "RUN_TOML MODEL`; it writes start.json, which this command takes"
        )
    try:
        values = json.loads(file.read_bytes()[:FILE_BYTES_MAX])
        found = ModelStart(start_from_values(values), bytes.fromhex(values["layout_digest"]), int(values["parameters"]))
    except (Refusal, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise OperatorError(f"--from {file}: is no start.json of `swarmentum start-from`: {error}") from error
    if len(found.layout_digest) != HASH_BYTES or found.parameters <= 0:
        raise OperatorError(f"--from {file}: states no parameter layout; run `swarmentum start-from` again")
    if layout_digest and layout_digest != found.layout_digest:
        raise OperatorError(
            f"--from {file}: the model has another parameter layout than run.toml's; run `swarmentum start-from` again"
        )
    return found


@dataclass(frozen=True)
class Created:
    """A run that was created. `anchor_link`: to start anchors with, if the run needs one.

    `layout`: whether the genesis states the layout.
    """

    invite: Invite
    genesis: log_pb2.Genesis
    anchor_link: str | None
    layout: bool


def create_run(operator: Operator, findings: Findings, start: Path | None = None) -> Created:
    """Create the run of a checked run.toml. `start`: the start.json of a model that the run begins with. OperatorError."""
    config, facts = findings.config, findings.facts
    refuse_second(operator, config.name)
    fixed = (b"", 0) if facts is None else (bytes.fromhex(facts.layout_digest), facts.parameters)
    begins = None if start is None else model_start(start, fixed[0])
    if begins is not None:
        fixed = begins.layout_digest, begins.parameters
    invite = operator.create_run(config, *fixed, None if begins is None else begins.start)
    genesis = operator.find(invite.run_id.hex()).genesis
    return Created(invite, genesis, link_for_anchors(operator, genesis, config), bool(fixed[0]))


def link_for_anchors(operator: Operator, genesis: log_pb2.Genesis, config: RunConfig) -> str | None:
    """A link to start anchors with, for a run that needs them and names none."""
    needs = config.trust.anchored and not config.trust.anchors
    return operator.anchor_link(genesis, ANCHOR_USES).link() if needs else None


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
    print_json({**values, "anchor": anchor_link, "trust": config.trust.enabled, "layout": layout, "fork": fork})


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
        at = f" --home {shlex.quote(str(home))}" if home else ""
        console.print("The run takes only peers with an invite. Make one:", highlight=False)
        print(f"swarmentum-coordinator invite create {run} --uses 5 --expires 7d{at}")
        console.print("To look at the run, without joining:", highlight=False)
        print(f"swarmentum status {invite.link()}")
        return
    console.print("On each peer:", highlight=False)
    print(f"swarmentum join {invite.link()}")
