"""The command `swarmentum`: join a run, look at it, watch it, relay for others, or try it all on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from node.commands import dataset
from node.commands.control import finish, leave, me, pause, resume, service, set_
from node.commands.copies import audit_folder, export
from node.commands.evaluate import evaluate
from node.commands.join import anchor, join
from node.commands.options import (
    EXIT_CODES,
    HIDDEN,
    AllowCode,
    AllowLeftOut,
    InviteLink,
    Json,
    MaybeInvite,
    SettingCommand,
    Settings,
    Verbose,
    link_from,
    need_node_extra,
    owner,
    push,
    with_settings,
)
from node.commands.public_runs_view import runs
from node.imports import many_imports
from protos.console import configure_logging, exit_with
from protos.process import leaving_at_once
from protos.text import print_json
from protos.version import Program, add_about

app = typer.Typer(
    cls=Program,
    help="Train one model together with other people's machines, over ordinary internet.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
)
Command = TypeVar("Command", bound=Callable[..., Any])
TAKE_PART, LOOK, PROVE = "Take part", "Look at a run, and take its model", "Prove a run"
OPERATE, DEVELOP = "Prepare and operate a run", "Try and develop"
"""Panels of the help, in the order in which a newcomer needs them."""


def _command(panel: str, name: str | None = None) -> Callable[[Command], Command]:
    return app.command(name, epilog=EXIT_CODES, rich_help_panel=panel, cls=SettingCommand)


_command(TAKE_PART)(join)


@_command(TAKE_PART)
@leaving_at_once()  # it has nothing to save
@with_settings("home", "device", "threads", "listen", "data", "allow_code", "allow_data")
def doctor(
    settings: Settings,
    invite: MaybeInvite = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check whether this machine can take part (exit code 1: it cannot), what it would give, and what to do. Joins nothing."""
    need_node_extra()
    configure_logging(as_json=as_json, verbose=verbose)
    with many_imports(said=not as_json):
        from node.commands.doctor import doctor as examine

    raise typer.Exit(examine(settings(), None if invite is None else link_from(invite), as_json=as_json))


for command in (me, pause, resume, leave, finish):
    _command(TAKE_PART)(command)
_command(TAKE_PART, "set")(set_)
app.add_typer(service, name="service", rich_help_panel=TAKE_PART)
_command(OPERATE)(anchor)
app.add_typer(dataset.app, name="data", rich_help_panel=OPERATE)
for gone, said in (("push", push), ("owner", owner)):
    app.command(gone, **HIDDEN)(said)


@_command(LOOK)
def status(
    invite: InviteLink,
    live: Annotated[bool, typer.Option("--watch", help="Keep looking: a line for each change.")] = False,
    as_json: Json = False,
) -> None:
    """Show a run: its phase, step, loss and peers. Joins nothing."""
    from node.commands.status import show
    from node.commands.status import status as ask
    from node.commands.status import watch as look_on

    if live:
        look_on(link_from(invite), as_json=as_json)
        return
    values = ask(link_from(invite))
    if as_json:
        print_json(values)
    else:
        show(values)


@_command(PROVE)
def watch(
    invite: InviteLink,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many log entries.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Stop after this time.")] = None,
    as_json: Json = False,
) -> None:
    """Follow a run live, and check every signature and the hash chain with another implementation (py-libp2p)."""
    configure_logging(as_json=as_json)
    from node.watch.watch_command import run

    raise typer.Exit(run(link_from(invite), as_json=as_json, steps=steps, seconds=seconds))


@_command(LOOK)
@leaving_at_once()  # a signal ends the program at once, until the program handles signals itself
def web(
    invites: Annotated[
        list[str], typer.Argument(metavar="INVITE...", help="Invite links of the runs to show; - reads one from stdin.")
    ],
    listen: Annotated[
        str, typer.Option(help="host:port of the page; port 0 takes a free one. Other machines need 0.0.0.0.")
    ] = "127.0.0.1:7780",
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name under which browsers find the page, e.g. that of a reverse proxy; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show runs in a browser: figures, peers, ledger, and a log that the browser checks itself. Joins nothing."""
    configure_logging(as_json=as_json)
    from node.commands.status import web as show_page

    show_page(invites, listen, host or (), as_json=as_json)


for panel, reader in ((LOOK, runs), (LOOK, export), (LOOK, evaluate), (PROVE, audit_folder)):
    _command(panel)(reader)


@_command(LOOK, "export-page")
@leaving_at_once()  # what is written so far is no page yet
def export_page(
    invite: InviteLink,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")],
    as_json: Json = False,
) -> None:
    """Write the web page of a run as files, for any host of files. The browser checks the log there, too."""
    configure_logging(as_json=as_json)
    from node.commands.status import export_files

    export_files(invite, folder, as_json=as_json)


@_command(OPERATE)
@leaving_at_once()  # a signal ends the program at once, until the program handles signals itself
@with_settings("home", "listen", home="~/.swarmentum/relay", listen="*:4001", reachability="public")
def relay(
    settings: Settings,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a public bootstrap and relay peer, without training."""
    need_node_extra()
    configure_logging(as_json=as_json, verbose=verbose)
    import asyncio

    with many_imports(said=not as_json):
        from node.commands.relay import serve

    chosen = settings()
    asyncio.run(serve(chosen.home, chosen.overlay(), as_json))


@_command(TAKE_PART, "settings")
def settings_() -> None:
    """Print every setting of a peer with its default, its values and what it does, as a swarmentum.toml."""
    from node.config import peer_settings

    for it in peer_settings():
        print(it.commented())


@_command(DEVELOP)
def demo(
    peers: Annotated[int, typer.Option(min=1, max=32, help="How many peers to start.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Clock steps to train.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial weights and of the order of the samples.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="A text file or folder (default: this Python's standard library).")
    ] = None,
    allow_left_out: AllowLeftOut = False,
    output: Annotated[Path, typer.Option(help="Folder of the results; made, or its demo results replaced.")] = Path(
        "swarmentum-out/demo"
    ),
    group_size: Annotated[
        int,
        typer.Option(
            help="How small the uploads are: 128 sends the least; 8 sends eight times as much and learns more per step."
        ),
    ] = 128,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Give all peers equal shares, and wait for all of them in every step: the result is repeatable.",
        ),
    ] = False,
    archive: Annotated[
        bool, typer.Option("--archive", help="Keep the archive of the run, for `swarmentum verify`.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a coordinator, a relay and some peers on this machine, train a small model, and show the result."""
    need_node_extra()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from node.commands.demonstration import DemoOptions, run_demo

    options = DemoOptions(
        peers=peers,
        steps=steps,
        seed=seed,
        data=data,
        allow_left_out=allow_left_out,
        output=output,
        group_size=group_size,
        strict=strict,
        archive=archive,
        as_json=as_json,
    )
    raise typer.Exit(run_demo(options))


@_command(PROVE)
def verify(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A demo's output folder, a peer's home, an archive, or the address of one (https://, s3://, hf://).",
        ),
    ],
    from_step: Annotated[
        int | None, typer.Option("--from", min=0, help="Begin with the archived state at or before this step.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Exported model to compare with (default: `model` beside the archive).")
    ] = None,
    expected: Annotated[
        str | None,
        typer.Option("--run", metavar="INVITE|ID", help="The run that it has to be: an invite link, or its id."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(help="With an address: keep the copy there; the same command continues one that broke off."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay an archived run and check signatures, hashes, digests and exported weights. Exit code 1: a step does not hold."""
    need_node_extra()
    configure_logging(as_json=as_json)
    with many_imports(said=not as_json):
        from node.archive.verify import show, verify
        from node.commands.copies import archive_at
    from protos.invite import run_named

    named = "" if expected is None else run_named(expected)
    with archive_at(run, into) as folder:
        verdict = show(lambda told: verify(folder, from_step, model, told, expected=named), as_json=as_json)
    raise typer.Exit(0 if verdict.ok else 1)


@_command(PROVE)
def mirror(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A demo's output folder, a peer's home, or an archive.")],
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="A folder for it, in a directory or in a bucket (s3://, hf://).")
    ],
    as_json: Json = False,
) -> None:
    """Copy a run's archive to a folder or a bucket, from where anybody can `verify` it. A second copy adds what is new."""
    need_node_extra()
    from node.commands.copies import copy_archive

    copy_archive(run, address, as_json=as_json)


@_command(PROVE)
def ledger(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="An archived run (as for verify), a file of export-log, an invite link, or - (stdin)."
        ),
    ],
    expected: Annotated[
        str | None,
        typer.Option("--run", metavar="INVITE|ID", help="The run that it has to be: an invite link, or its id."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show each identity's contribution, as the run's signed log proves it: votes accepted, samples, tokens, uptime."""
    need_node_extra()
    with many_imports(said=not as_json):
        from node.archive.ledger import of, show
    from protos.errors import RefusedError
    from protos.invite import run_named

    found = of(link_from(run))
    if expected is not None and not found.run_id.hex().startswith(run_named(expected)):
        raise RefusedError(f"{run} is the log of run {found.run_id.hex()}, and --run names {run_named(expected)}")
    if as_json:
        print_json(found.values())
    else:
        show(found)


@_command(PROVE, "export-log")
@leaving_at_once()  # what is written so far is no log yet
def export_log(
    invite: InviteLink, file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")], as_json: Json = False
) -> None:
    """Write a run's signed log to a file, which anybody can check without its coordinator: `swarmentum ledger FILE`."""
    need_node_extra()
    configure_logging(as_json=as_json)
    from node.commands.copies import export_log_file

    export_log_file(invite, file, as_json=as_json)


@_command(OPERATE)
def layout(
    file: Annotated[Path, typer.Argument(metavar="RUN_TOML", help="A run's configuration.")],
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Show the parameter layout of a run.toml's model, and run a small copy; `swarmentum-coordinator run create` needs both."""
    need_node_extra()
    with many_imports(said=not as_json):
        from node.commands.model_layout import bound_memory, print_layout

    bound_memory()
    print_layout(file, allow_code=allow_code, as_json=as_json)


@_command(OPERATE, "start-from")
def start_from(
    file: Annotated[Path, typer.Argument(metavar="RUN_TOML", help="The configuration of the run to be.")],
    model: Annotated[
        str,
        typer.Argument(
            help="A folder of a Hugging Face model, safetensors, an archive, or owner/name[@revision] of the hub."
        ),
    ],
    home: Annotated[
        Path | None, typer.Option(help="Home of the peer that will serve the state (default: ~/.swarmentum/peer).")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file for `run create --from`.")] = Path("start.json"),
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Store a model as the state that a new run starts from; `swarmentum-coordinator run create --from` names it in the run."""
    need_node_extra()
    with many_imports(said=not as_json):
        from node.commands import start_from as starting
        from node.config import load_settings
    from protos import toml_file
    from protos.run_config import RunConfig

    starting.check_out(out)
    settings = load_settings(home=home, allow_code=allow_code or None)
    values = starting.start_from(toml_file.load(file, RunConfig), model, settings).values()
    starting.write_out(out, values)
    if as_json:
        print_json({**values, "file": str(out)})
        return
    named = values.get("source", model)
    print(f"{named} is stored in {settings.home} as a starting state of {values['parameters']} parameters.")
    print(f"Create the run: swarmentum-coordinator run create {file} --from {out}")
    print("Then start a peer or an anchor with this --home: it gives the state to the others.")


def main() -> None:
    """Entry point: errors become one clear message and a documented exit code."""
    add_about(app, DEVELOP)
    exit_with(app)


if __name__ == "__main__":
    main()
