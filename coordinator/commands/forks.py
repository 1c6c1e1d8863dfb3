"""The command `swarmentum-coordinator run fork`: a new run that begins at a state of another one. ADR 5."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.commands.options import Home, Json, settings
from protos.limits import STEP_MAX
from protos.start import StartingState, fork_values

NAME_CHARACTERS_MAX = 64
Parents = Annotated[
    str, typer.Argument(metavar="RUN", help="The parent run: its name, the start of its id, or an invite link to it.")
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CHANGE]...",
        help="Settings that differ from the parent run's: optimizer.lr=0.001, or a TOML file of them.",
    ),
]


def fork(
    run: Parents,
    changes: Changes = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=STEP_MAX,
            help="Begin at the newest agreed snapshot at or before this step (default: the newest).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The name of the new run (default: the parent's, and the step).")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Create a run that begins at an agreed snapshot of another run: to go back, or to continue a public run.

    The fork keeps the model, the data and the other settings of its parent run, but for the changes. Its steps and its learning
    rate begin anew; so does the momentum of the peers.
    """
    from coordinator.commands.created import link_for_anchors, print_created, show_created
    from coordinator.commands.fork_changes import changes_of, forked
    from coordinator.commands.operator import Operator
    from coordinator.commands.parents import parent

    wanted = changes_of(changes or [])
    operator = Operator(settings(home=home).home)
    found = parent(operator, run)
    start = found.state_at(STEP_MAX if from_step is None else from_step)
    named = {"name": name} if name else {"name": _name(found.config.name, start.step)} | wanted
    config = forked(found.config_at(start.step), wanted | named)
    invite = operator.create_run(config, found.layout_digest, found.parameters, start)
    genesis = operator.find(invite.run_id.hex()).genesis
    anchor_link = link_for_anchors(operator, genesis, config)
    if as_json:
        print_created(invite, config, anchor_link, layout=True, fork=fork_values(genesis))
        return
    show_created(invite, config, anchor_link, _said(start, from_step, start.step in found.held), home)


def _name(parent: str, step: int) -> str:
    """The default name: the pattern of names allows all of it."""
    end = f"-from-{step}"
    return parent[: NAME_CHARACTERS_MAX - len(end)] + end


def _said(start: StartingState, from_step: int | None, held: bool) -> str:
    lines = [f"It is a fork: it begins at the state after {start}."]
    if from_step not in (None, start.step):
        lines.append(f"That is the newest agreed snapshot at or before step {from_step}.")
    if not held:
        lines.append(
            "The coordinator knows no connected peer that has that state. The fork waits until a peer joins that has it."
        )
    lines.append(
        "Peers that have the state on their disks use it: start them with the --home that they had in the parent run."
    )
    return "\n".join(lines)
