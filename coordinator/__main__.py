"""The command `swarmentum-coordinator`. Exit codes: 0 done, 1 failed, 2 wrong use, 3 unreachable, 4 refused."""

from __future__ import annotations

import asyncio
import gc
import os
import shlex
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.commands import checking, forks, operator, peers, run_life, signing
from coordinator.commands.operator import operator_at
from coordinator.commands.planning import MODELS, run_toml
from coordinator.config import EXIT_CODES, AllowCode, Home, Json, RunName, option, settings
from coordinator.store import backup as store
from coordinator.store import home_files
from coordinator.store.home_files import PageAddress
from protos import toml_file
from protos.console import configure_logging, exit_with, lock_home
from protos.errors import OperatorError
from protos.mistakes import REMOVED
from protos.run_config import RunConfig, config_from_json
from protos.start import fork_values, fork_words
from protos.text import as_line, print_json
from protos.version import Program, add_about

web_app = typer.Typer(
    cls=Program,
    help="Log in at the operator's page, where runs are made and steered in a browser.",
    no_args_is_help=True,
)


@web_app.callback()
def web() -> None:
    """Log in at the operator's page, where runs are made and steered in a browser."""


@web_app.command(epilog=EXIT_CODES)
def login(home: Home = None, as_json: Json = False) -> None:
    """Print a link that logs one browser in, once, within five minutes. The link before it counts no more.

    The coordinator serves that page with --operator-web-listen. Keep the link to yourself: its holder can do what the page can.
    """
    folder = settings(home=home).home
    url = PageAddress(folder).read()
    link = f"{url}#login={home_files.make(folder, time.time())}"
    seconds = int(home_files.LINK_SECONDS_MAX)
    if as_json:
        print_json({"link": link, "seconds": seconds})
        return
    text = f"Open this link within {seconds // 60} minutes. It works once; keep it to yourself:"
    Console(soft_wrap=True).print(text, highlight=False)
    print(link)


GC_THRESHOLD = 50_000, 20, 20
"""Of Python's garbage collector: objects that are made and not freed before it looks at the youngest, and so on."""
app = typer.Typer(
    cls=Program,
    help="Keep the clock and the log of swarmentum runs. A small machine that peers can reach is enough; no GPU is needed.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
)
runs = typer.Typer(cls=Program, help="Create, look at, steer and end runs.", no_args_is_help=True)
THE_COORDINATOR, RUNS = "The coordinator", "Its runs"
CREATE, LOOK, STEER, END = "Create a run", "Look at runs", "Steer a run", "End a run, or go back"
"""Panels of the help, in the order in which a newcomer needs them."""
for panel, name, group in (
    (RUNS, "run", runs),
    (RUNS, "invite", peers.invites),
    (RUNS, "peer", peers.app),
    (RUNS, "anchor", peers.anchor_app),
    (RUNS, "snapshot", run_life.snapshot_app),
    (RUNS, "order", signing.app),
    (THE_COORDINATOR, "web", web_app),
):
    app.add_typer(group, name=name, rich_help_panel=panel)


@app.command(epilog=EXIT_CODES, rich_help_panel=THE_COORDINATOR)
def serve(
    home: Home = None,
    listen: Annotated[str | None, option("listen")] = None,
    advertise: Annotated[str | None, option("advertise")] = None,
    database: Annotated[str | None, option("database")] = None,
    metrics_listen: Annotated[str | None, option("metrics_listen")] = None,
    web_listen: Annotated[str | None, option("web_listen")] = None,
    web_host: Annotated[list[str] | None, option("web_hosts", "--web-host", note="repeatable")] = None,
    operator_web_listen: Annotated[str | None, option("operator_web_listen")] = None,
    operator_web_host: Annotated[str | None, option("operator_web_host")] = None,
    trace: Annotated[bool | None, option("trace", "--trace")] = None,
    as_json: Json = False,
    reflection: Annotated[bool, typer.Option("--reflection", hidden=True)] = False,
) -> None:
    """Start the coordinator, and serve until Ctrl-C. With the same --home it continues at the same step, also after a crash."""
    chosen = settings(
        home=home,
        listen=listen,
        advertise=advertise,
        database=database,
        metrics_listen=metrics_listen,
        web_listen=web_listen,
        web_hosts=tuple(web_host) if web_host else None,
        operator_web_listen=operator_web_listen,
        operator_web_host=operator_web_host,
        trace=trace,
    )
    configure_logging(as_json=as_json)
    if reflection:
        print(f"--reflection {REMOVED['reflection']}", file=sys.stderr)
    from coordinator.serving.served_coordinator import serve as serve_forever

    _collect_rarely()
    asyncio.run(serve_forever(chosen, partial(_ready, home, as_json)))


def _collect_rarely() -> None:
    """A swarm's state is large and has no cycles, and a search for cycles stops the clock for a tenth of a second (ADR 57)."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


def _ready(home: Path | None, as_json: bool, serving: Any) -> None:
    """Say that the coordinator serves, and what to do next."""
    if as_json:
        print_json({"event": "serving", **asdict(serving)})
        return
    create = f"swarmentum-coordinator run create{f' --home {shlex.quote(str(home))}' if home else ''}"
    where = f"Coordinator serves at {serving.advertise}."
    Console(soft_wrap=True).print(f"{where} In another terminal: {create}. Ctrl-C stops it.", markup=False)


app.command(epilog=EXIT_CODES, rich_help_panel=THE_COORDINATOR)(operator.health)


@app.command(epilog=EXIT_CODES, rich_help_panel=THE_COORDINATOR)
def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The backup. A person who has it can act as this coordinator.")
    ],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write the keys and the journal of --home to FILE, as they are at one moment. The coordinator may go on meanwhile."""
    chosen = settings(home=home)
    if chosen.database is not None:
        raise OperatorError(
            "the journal is in a database of its own: back that up (pg_dump), and copy the three key files"
        )
    with Console(stderr=True).status("copying the journal, then checking each of its entries"):
        about = store.make(chosen.home, file)
    if as_json:
        print_json({"file": str(file), **asdict(about)})
        return
    steps = ", ".join(f"{run[:16]} at step {step}" for run, step in about.runs.items()) or "no run"
    print(f"{file}: {steps}. Keep it as you keep a private key.")


@app.command(epilog=EXIT_CODES, rich_help_panel=THE_COORDINATOR)
def restore(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The backup to restore into --home.")] = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "--go-on", help="The log of a restored home is whole: let steps open again. Stop the coordinator first."
        ),
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write the home that a backup holds; then `serve` it, let peers give back newer entries, and end with --go-on."""
    chosen = settings(home=home)
    folder = chosen.home
    if (file is None) is not go_on:
        raise OperatorError("give exactly one of these: FILE, to restore it, or --go-on")
    if file is not None and chosen.database is not None:
        raise OperatorError(
            "`database` is set (coordinator.toml or SWARMENTUM_COORDINATOR_DATABASE), so `serve` would not read the restored "
            "journal: unset it, or restore that database (pg_restore)"
        )
    if file is None:
        lock_home(folder, "coordinator").close()  # it reads the mark only when it starts
        store.go_on(folder)
        print(
            as_line({"home": str(folder), "held": False})
            if as_json
            else f"{folder}: steps open again at the next start."
        )
        return
    about = store.restore(file, folder)
    if as_json:
        print_json({"home": str(folder), "held": True, **asdict(about)})
        return
    at = shlex.quote(str(folder))
    print(f"{folder}: restored. Next:")
    print("1. Make sure that the old coordinator never starts again: two with one key would make two logs.")
    print(f"2. Start it: swarmentum-coordinator serve --home {at}")
    print("3. Peers give back the entries that the backup lacks. `run list` shows the step; no step opens meanwhile.")
    print("4. When that is the newest step that any peer knows (`swarmentum me`), stop the coordinator, and run:")
    print(f"   swarmentum-coordinator restore --go-on --home {at}")
    print("5. Start it again.")


@runs.command("create", epilog=EXIT_CODES, rich_help_panel=CREATE)
def create(
    file: Annotated[
        Path | None,
        typer.Argument(help="The run's configuration (run.toml; `run example` prints one). Without it, all defaults."),
    ] = None,
    anchor: Annotated[
        bool,
        typer.Option(
            "--anchor", help="The run's state counts only from anchors; also prints the link to start them with."
        ),
    ] = False,
    layout: Annotated[
        bool,
        typer.Option(
            "--layout/--no-layout", help="Fix the model's parameter layout now, if swarmentum[node] is installed."
        ),
    ] = True,
    allow_code: AllowCode = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Begin with a model: the start.json that `swarmentum start-from` wrote where the model is."
        ),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Create a run, and print its invite link. The coordinator of --home has to be serving.

    For strangers: `run example > run.toml`, `run check run.toml`, then `run create run.toml --anchor`.
    """
    given, file = file, file or Path(os.devnull)
    named = toml_file.read(file, RunConfig).value
    from coordinator.commands.created import create_run, print_created, show_created

    operator = operator_at(home)
    if named is not None:
        checking.refuse_second(operator, named.name, given)  # before the model is built, which takes seconds
    findings = checking.findings_of(file, anchor=anchor, layout=layout, allow_code=allow_code, told=checking.to_stderr)
    findings.refuse_unchecked()
    made, config = create_run(operator, findings, start), findings.config
    if as_json:
        print_created(made.invite, config, made.anchor_link, layout=made.layout, fork=fork_values(made.genesis))
        return
    if findings.unknown:
        print(
            f"The layout of its model is not fixed yet: {findings.unknown}. The first anchor fixes it, or the first peers do."
        )
    show_created(made.invite, config, made.anchor_link, "\n".join(findings.said), home)


@runs.command("example", epilog=EXIT_CODES, rich_help_panel=CREATE)
def run_example(
    everything: Annotated[
        bool, typer.Option("--all", help="Almost every setting, not only those that people change.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--for", metavar="MODEL", help=f"A file for {', '.join(MODELS)}.")
    ] = None,
) -> None:
    """Print a run.toml to start from: the settings that people change, their defaults and what they do."""
    from protos.example import COMMON, example

    if model is not None:
        print(run_toml(model), end="")
    else:
        print(example(RunConfig, None if everything else COMMON))


runs.command("check", epilog=EXIT_CODES, rich_help_panel=CREATE)(checking.check)


@runs.command("invite", epilog=EXIT_CODES, rich_help_panel=LOOK)
def invite(run: RunName, home: Home = None, as_json: Json = False) -> None:
    """Print the link of a run again. Of a run in admission mode `invite`, it is for looking only."""
    operator = operator_at(home)
    genesis = operator.find(run).genesis
    found = operator.invite(genesis)
    if config_from_json(genesis.config_json).admission.mode == "invite":
        note = "this link admits nobody new; `swarmentum-coordinator invite create` makes one that does"
        print(note, file=sys.stderr)
    print(as_line({"run": found.run_id.hex(), "invite": found.link()}) if as_json else found.link())


@runs.command("list", epilog=EXIT_CODES, rich_help_panel=LOOK)
def list_runs(
    every: Annotated[bool, typer.Option("--all", help="Archived runs, too.")] = False,
    public: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Print a public list with this run, for `swarmentum runs`; repeatable."),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List the runs with their step, loss and peers; or print a signed list of some of them, for any host of files."""
    operator = operator_at(home)
    if public:
        print(operator.public_list(public), end="")
        return
    rows = [run_life.line_of(run) for run in operator.list_runs(archived=every)]
    if as_json:
        for row in rows:
            print_json(row)
        return
    table = Table("run", "name", "phase", "step", "loss", "peers", "why", title="Runs")
    for row in rows:
        loss = f"{row['loss']:.4f}" if row["step"] else "-"
        step = f"{row['step']}/{row['steps']}"
        said = f"{row['name']}\n{fork_words(row['fork'])}" if row["fork"] else row["name"]
        name, why = Text(said), Text(row["reason"])
        table.add_row(row["run"][:16], name, row["phase"], step, loss, ", ".join(row["peers"]), why)
    Console().print(table)


runs.command("show", epilog=EXIT_CODES, rich_help_panel=LOOK)(run_life.show)
for steered in (run_life.pause, run_life.resume, run_life.change, run_life.decay):
    runs.command(epilog=EXIT_CODES, rich_help_panel=STEER)(steered)
for ended in (run_life.finish, forks.fork, run_life.archive, run_life.delete):
    runs.command(epilog=EXIT_CODES, rich_help_panel=END)(ended)


def main() -> None:
    """Entry point: errors become one clear message and a documented exit code."""
    add_about(app, THE_COORDINATOR)
    exit_with(app)


if __name__ == "__main__":
    main()
