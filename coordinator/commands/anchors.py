"""The command `swarmentum-coordinator anchor create`: a link for processes whose reports on a run's state count."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from coordinator.commands.options import EXIT_CODES, Home, Json, RunName, settings
from protos.json_line import print_json
from protos.limits import TICKET_USES_MAX

LABEL = "anchor"
USES = 4
app = typer.Typer(
    help="Make links for anchors: processes that only apply entries, and whose reports on the state count.",
    no_args_is_help=True,
)


@app.command(epilog=EXIT_CODES)
def create(
    run: RunName,
    uses: Annotated[int, typer.Option(min=1, max=TICKET_USES_MAX, help="How many anchors may start with it.")] = USES,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make an anchor link of a run, and print it. The link's holder decides about the run's state, so keep it to yourself.

    From the first anchor on, state digests and snapshots of the run count only from anchors. `invite revoke` revokes the link.
    """
    from coordinator.commands.operator import Operator

    operator = Operator(settings(home=home).home)
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
