"""The command `swarmentum`: join a run, look at it, watch it, relay for others, or try it all on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from protos.console import configure_logging, exit_with
from protos.errors import OperatorError
from protos.signals import EXIT_INTERRUPTED, leave, leaving_at_once

if TYPE_CHECKING:
    from node.config import PeerSettings

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed (demo: digests differ or the loss did not fall; verify: a step does not hold), "
    "2 wrong use or configuration, "
    "3 unreachable, 4 refused, 5 replicas differ, 130 interrupted (left cleanly)."
)
app = typer.Typer(
    help="Train one model together with other people's machines, over ordinary internet.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
)

InviteLink = Annotated[
    str, typer.Argument(metavar="INVITE", help="The run's invite link, swarmentum://..., or - to read it from stdin.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs; logs go to stderr.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More log lines.")]
Listen = Annotated[
    str | None, typer.Option(help="IP:port of the overlay, TCP and UDP (default: 0.0.0.0:0, a free port).")
]
Announce = Annotated[
    list[str] | None, typer.Option(help="Multiaddress to tell others, e.g. /ip4/203.0.113.5/tcp/4001.")
]
Bootstrap = Annotated[list[str] | None, typer.Option(help="Multiaddress of an overlay peer to start from; repeatable.")]
Reachability = Annotated[str | None, typer.Option(help="auto, public (dialled directly) or private (behind a router).")]


def _need_node_extra() -> None:
    """The base install has no torch; say what to install instead of a traceback."""
    from importlib.util import find_spec

    missing = [
        name for name in ("torch", "hivemind", "transformers", "safetensors", "zstandard") if find_spec(name) is None
    ]
    if missing:
        raise OperatorError(f"this command needs {', '.join(missing)}: pip install 'swarmentum[node]'")


@app.command(epilog=EXIT_CODES)
@leaving_at_once()  # until it has something to save, and listens for itself
def join(
    invite: Annotated[
        str | None, typer.Argument(metavar="INVITE", help="The run's invite link, or - to read it from stdin.")
    ] = None,
    invite_file: Annotated[
        Path | None,
        typer.Option(help="A file with the invite link: on the command line all users of a machine see it."),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Folder of identity, snapshots, momentum (default: ~/.swarmentum/peer).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto (cuda, mps, cpu) or a torch device such as cuda:1.")] = None,
    precision: Annotated[str | None, typer.Option(help="Forward pass: auto, bf16 or fp32.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the training.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples in one forward pass (default: 8).")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Coefficients a vote chooses from: 8 to 128 (default: the run's).")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Components of a chunk, in a run with top-k: 4 to 512 (default: the run's).")
    ] = None,
    fit_uplink: Annotated[
        bool, typer.Option("--fit-uplink", help="Let the size of the votes follow the measured uplink.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="This machine's training text or tokens (default: the run's).")
    ] = None,
    listen: Listen = None,
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    relays: Annotated[
        list[str] | None, typer.Option("--relay", help="Relay to be reachable through; repeatable.")
    ] = None,
    reachability: Reachability = None,
    metrics_listen: Annotated[str | None, typer.Option(help="IP:port of Prometheus metrics (default: off).")] = None,
    archive: Annotated[
        bool, typer.Option("--archive", help="Keep the log and every payload, for `swarmentum verify`.")
    ] = False,
    archive_gb: Annotated[float | None, typer.Option(help="Room for the archive, in GB (default: 20).")] = None,
    patience_seconds: Annotated[
        float | None, typer.Option(help="How long to wait for a silent coordinator, or for others (default: for ever).")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let the run call a function of this machine.")
    ] = False,
    allow_data: Annotated[
        bool, typer.Option("--allow-data", help="Let the run name files of this machine, and train on them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Agree to what the run asks; do not ask me.")] = False,
    export: Annotated[Path | None, typer.Option(help="Where to write the Hugging Face model at the end.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Take part in a run until it is finished. Ctrl-C leaves cleanly; the others go on."""
    _need_node_extra()
    # A donor's machine does other things too: threads that wait shall sleep, not spin (OpenMP reads this when torch loads).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    configure_logging(as_json=as_json, verbose=verbose)
    from node.config import load_settings
    from node.ranks.launch import launched

    settings = load_settings(
        home=home,
        device=device,
        precision=precision,
        threads=threads,
        micro_batch=micro_batch,
        group_size=group_size,
        top_k=top_k,
        fit_uplink=fit_uplink or None,
        data=data,
        listen=listen,
        announce=announce,
        bootstrap=bootstrap,
        relays=relays,
        reachability=reachability,
        metrics_listen=metrics_listen,
        archive=archive or None,
        archive_gb=archive_gb,
        patience_seconds=patience_seconds,
        allow_code=allow_code or None,
        allow_data=allow_data or None,
        yes=yes or None,
    )
    launch = launched(os.environ)
    if launch is not None and launch.rank:
        from node.ranks.follow import follow

        follow(launch, settings)
        return
    _take_part(invite, invite_file, settings, export, as_json=as_json)


def _take_part(
    invite: str | None,
    invite_file: Path | None,
    settings: PeerSettings,
    export: Path | None,
    *,
    as_json: bool,
    anchor: bool = False,
) -> NoReturn:
    """Ask the person, join the run, and say at the end what came of it."""
    from node import person
    from node.app import join as join_run
    from node.consent import Request, must_ask

    link = person.link_from(invite, invite_file)

    def agree(asked: Request) -> None:
        if not as_json:
            person.show(asked)
        if must_ask(asked, settings, can_ask=not as_json and person.can_be_asked()):
            person.ask(asked)

    outcome = join_run(link, settings, export, agree, anchor=anchor)
    summary = outcome.summary
    if as_json:
        print(summary.json(), flush=True)
    else:
        kept = f"; model: {summary.checkpoint}" if summary.checkpoint else ""
        votes = "" if anchor else f" {summary.votes_accepted} votes accepted,"
        print(f"step {summary.step},{votes} state digest {summary.digest[:16]}{kept}", flush=True)
    if outcome.exit_code == EXIT_INTERRUPTED:
        leave()  # all is saved and closed; taking Python apart takes over a second
    raise typer.Exit(outcome.exit_code)


@app.command(epilog=EXIT_CODES)
@leaving_at_once()  # until it has something to save, and listens for itself
def anchor(
    invite: Annotated[
        str | None, typer.Argument(metavar="INVITE", help="The run's anchor link, or - to read it from stdin.")
    ] = None,
    invite_file: Annotated[
        Path | None, typer.Option(help="A file with the link: on the command line all users of a machine see it.")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Folder of identity, snapshots and payloads (default: ~/.swarmentum/anchor).")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    listen: Listen = None,
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    relays: Annotated[
        list[str] | None, typer.Option("--relay", help="Relay to be reachable through; repeatable.")
    ] = None,
    reachability: Reachability = None,
    metrics_listen: Annotated[str | None, typer.Option(help="IP:port of Prometheus metrics (default: off).")] = None,
    archive: Annotated[
        bool, typer.Option("--archive", help="Keep the log and every payload, for `swarmentum verify`.")
    ] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let the run call a function of this machine.")
    ] = False,
    allow_data: Annotated[
        bool, typer.Option("--allow-data", help="Let the run name a tokenizer's folder of this machine.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Agree to what the run asks; do not ask me.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run an anchor: it applies every step without training, and its word on the run's state counts. Needs no GPU.

    The run's operator starts it beside the coordinator. It keeps the newest state and serves it, so that peers can always join.
    """
    _need_node_extra()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    configure_logging(as_json=as_json, verbose=verbose)
    from node.config import load_settings

    settings = load_settings(
        home=home or Path.home() / ".swarmentum" / "anchor",
        device="cpu",
        threads=threads,
        listen=listen,
        announce=announce,
        bootstrap=bootstrap,
        relays=relays,
        reachability=reachability,
        metrics_listen=metrics_listen,
        archive=archive or None,
        allow_code=allow_code or None,
        allow_data=allow_data or None,
        yes=yes or None,
    )
    _take_part(invite, invite_file, settings, None, as_json=as_json, anchor=True)


@app.command(epilog=EXIT_CODES)
def status(invite: InviteLink, as_json: Json = False) -> None:
    """Show a run: its phase, step, loss and peers."""
    from node.person import link_from
    from node.status import show
    from node.status import status as ask

    values = ask(link_from(invite))
    if as_json:
        print(json.dumps(values))
    else:
        show(values)


@app.command(epilog=EXIT_CODES)
def watch(
    invite: InviteLink,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many log entries.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Stop after this time.")] = None,
    as_json: Json = False,
) -> None:
    """Follow a run with an independent implementation (py-libp2p) that checks every signature and the hash chain."""
    configure_logging(as_json=as_json)
    from node.person import link_from
    from node.watch.app import run

    raise typer.Exit(run(link_from(invite), as_json=as_json, steps=steps, seconds=seconds))


@app.command(epilog=EXIT_CODES)
@leaving_at_once()  # until it has something to save, and listens for itself
def relay(
    home: Annotated[Path | None, typer.Option(help="Folder of the identity (default: ~/.swarmentum/relay).")] = None,
    listen: Annotated[str, typer.Option(help="IP:port, TCP and UDP; port 0 takes free ones.")] = "0.0.0.0:4001",
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    reachability: Annotated[str, typer.Option(help="public, or auto to find out.")] = "public",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a public bootstrap and relay peer, without training."""
    _need_node_extra()
    configure_logging(as_json=as_json, verbose=verbose)
    import asyncio

    from node.config import load_settings
    from node.relay import serve

    settings = load_settings(listen=listen, announce=announce, bootstrap=bootstrap, reachability=reachability)
    asyncio.run(serve(home or Path.home() / ".swarmentum" / "relay", settings.overlay(), as_json))


@app.command(epilog=EXIT_CODES)
def demo(
    peers: Annotated[int, typer.Option(min=1, max=32, help="How many peers to start.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Clock steps to train.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of samples.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="A text file or folder (default: this Python's standard library).")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the results; made, or its demo results replaced.")] = Path(
        "swarmentum-out"
    ),
    group_size: Annotated[int, typer.Option(help="Coefficients a vote chooses from: 8 to 128.")] = 128,
    strict: Annotated[
        bool, typer.Option("--strict", help="Equal shares, every step waits for all: repeatable.")
    ] = False,
    archive: Annotated[
        bool, typer.Option("--archive", help="Leave the archive of the run, for `swarmentum verify`.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a coordinator, a relay and some peers on this machine, train a small model, show what happened."""
    _need_node_extra()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from node.demo import DemoOptions, run_demo

    options = DemoOptions(
        peers=peers,
        steps=steps,
        seed=seed,
        data=data,
        output=output,
        group_size=group_size,
        strict=strict,
        archive=archive,
        as_json=as_json,
    )
    raise typer.Exit(run_demo(options))


@app.command(epilog=EXIT_CODES)
def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A demo's output folder, a peer's home, or an archive.")],
    from_step: Annotated[
        int | None, typer.Option("--from", min=0, help="Begin with the archived state at or before this step.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Exported model to compare with (default: `model` beside the archive).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay an archived run and check every signature, hash and digest, and the exported weights, bit for bit."""
    _need_node_extra()
    configure_logging(as_json=as_json)
    from node.archive.verify import show, verify

    verdict = show(lambda told: verify(run, from_step, model, told), as_json=as_json)
    raise typer.Exit(0 if verdict.ok else 1)


@app.command(epilog=EXIT_CODES)
def ledger(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="An archived run (as for verify), an invite link, or - (stdin).")
    ],
    as_json: Json = False,
) -> None:
    """Who contributed what, as the run's signed log proves it: votes accepted, samples, tokens, uptime."""
    _need_node_extra()
    from node.archive.ledger import of, show
    from node.person import link_from

    found = of(link_from(run))
    if as_json:
        print(json.dumps(found.values()))
    else:
        show(found)


@app.command(epilog=EXIT_CODES)
def layout(
    file: Annotated[Path, typer.Argument(metavar="RUN_TOML", help="A run's configuration.")], as_json: Json = False
) -> None:
    """Show the parameter layout of a run.toml's model; `swarmentum-coordinator run create` fixes it in the run."""
    _need_node_extra()
    from dataclasses import asdict

    from node.layout_of import layout_of
    from protos import toml_file
    from protos.run_config import RunConfig

    facts = layout_of(toml_file.load(file, RunConfig))
    if as_json:
        print(json.dumps(asdict(facts)))
        return
    print(f"layout {facts.layout_digest}, {facts.parameters} parameters, {facts.votes} votes a payload")


def main() -> None:
    """Entry point: errors become one clear message and a documented exit code."""
    exit_with(app)


if __name__ == "__main__":
    main()
