"""The commands that take part in a run: `swarmentum join` trains, `swarmentum anchor` applies every step without training."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import structlog
import typer

from node.commands.options import (
    AllowCode,
    AllowData,
    AllowLeftOut,
    Announce,
    Archive,
    Bootstrap,
    Checkpointing,
    Data,
    Device,
    DiskGb,
    DownloadGb,
    DownloadMbit,
    DutyCycle,
    GpuMemory,
    Hours,
    InviteFile,
    InviteOrStdin,
    Json,
    KeepAwake,
    Listen,
    Metrics,
    MicroBatch,
    Nice,
    NotBeside,
    OnlyOnMains,
    OnlyWhenIdle,
    Owner,
    Reachability,
    RelayMbit,
    Relays,
    Threads,
    Trace,
    Track,
    UploadGb,
    UploadMbit,
    Verbose,
    Yes,
    need_node_extra,
)
from node.imports import many_imports
from protos.console import configure_logging
from protos.signals import EXIT_INTERRUPTED, leave, leaving_at_once

if TYPE_CHECKING:
    from node.config import PeerSettings
    from node.terminal.stage import Stage

NAME_CHARACTERS_MAX = 64


@leaving_at_once()  # a signal ends the program at once, until it has something to save and handles signals itself
def join(
    invite: InviteOrStdin = None,
    invite_file: InviteFile = None,
    home: Annotated[
        Path | None, typer.Option(help="Folder of the identity, snapshots and momentum (default: ~/.swarmentum/peer).")
    ] = None,
    device: Device = None,
    precision: Annotated[
        str | None, typer.Option(help="Number format of the forward pass: auto, bf16 or fp32.")
    ] = None,
    threads: Threads = None,
    nice: Nice = None,
    hours: Hours = None,
    only_on_mains: OnlyOnMains = False,
    only_when_idle: OnlyWhenIdle = None,
    not_beside_other_gpu_programs: NotBeside = False,
    duty_cycle: DutyCycle = None,
    gpu_memory: GpuMemory = None,
    disk_gb: DiskGb = None,
    keep_awake: KeepAwake = False,
    upload_mbit: UploadMbit = None,
    download_mbit: DownloadMbit = None,
    relay_mbit: RelayMbit = None,
    upload_gb: UploadGb = None,
    download_gb: DownloadGb = None,
    owner: Owner = None,
    micro_batch: MicroBatch = None,
    activation_checkpointing: Checkpointing = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="How small this peer's uploads are: 128 sends the least; 8 sends eight times as much and learns more per step "
            "(default: what the run says)."
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Components that this peer sends of each chunk, in a run with top-k: 4 to 2048 (default: what the run says)."
        ),
    ] = None,
    one_in: Annotated[
        int | None,
        typer.Option(
            help="In a run with random, striding, slicing or independent: a vote for one coefficient in so many, 2 to 1024 "
            "(default: what the run says)."
        ),
    ] = None,
    fit_uplink: Annotated[
        bool,
        typer.Option("--fit-uplink", help="Adjust the size of the votes to the upload speed that the peer measures."),
    ] = False,
    data: Data = None,
    listen: Listen = None,
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    relays: Relays = None,
    reachability: Reachability = None,
    metrics_listen: Metrics = None,
    track: Track = None,
    trace: Trace = False,
    archive: Archive = False,
    archive_gb: Annotated[float | None, typer.Option(help="Largest size of the archive, in GB (default: 20).")] = None,
    patience_seconds: Annotated[
        float | None,
        typer.Option(
            help="Leave the run after so many seconds without a coordinator, or without other peers (default: never)."
        ),
    ] = None,
    allow_code: AllowCode = False,
    allow_data: AllowData = False,
    allow_left_out: AllowLeftOut = False,
    yes: Yes = False,
    export: Annotated[
        Path | None, typer.Option(help="Folder for the Hugging Face model at the end of the run.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print log lines instead of the terminal view, also on a terminal.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Take part in a run until it is finished. Ctrl-C leaves cleanly; the other peers go on."""
    need_node_extra()
    # A donor's machine has other work too, so waiting threads sleep instead of spinning. OpenMP reads this when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from node.ranks.launch import launched
    from node.terminal.stage import Stage

    launch = launched(os.environ)
    stage = Stage(wanted=not (plain or as_json or launch is not None))  # other ranks write to the same terminal
    configure_logging(as_json=as_json, verbose=verbose, target=stage, seen=stage.recent)
    link = _read(invite, invite_file, as_json=as_json, anchor=False) if launch is None or not launch.rank else ""
    from node.config import load_settings

    settings = load_settings(
        home=home,
        device=device,
        precision=precision,
        threads=threads,
        nice=nice,
        hours=hours,
        only_on_mains=only_on_mains or None,
        only_when_idle=only_when_idle,
        not_beside_other_gpu_programs=not_beside_other_gpu_programs or None,
        duty_cycle=duty_cycle,
        gpu_memory=gpu_memory,
        disk_gb=disk_gb,
        keep_awake=keep_awake or None,
        upload_mbit=upload_mbit,
        download_mbit=download_mbit,
        relay_mbit=relay_mbit,
        upload_gb=upload_gb,
        download_gb=download_gb,
        owner=owner,
        micro_batch=micro_batch,
        activation_checkpointing=activation_checkpointing or None,
        compile=compiled or None,
        group_size=group_size,
        top_k=top_k,
        one_in=one_in,
        fit_uplink=fit_uplink or None,
        data=data,
        listen=listen,
        announce=announce,
        bootstrap=bootstrap,
        relays=relays,
        reachability=reachability,
        metrics_listen=metrics_listen,
        track=track,
        trace=trace or None,
        archive=archive or None,
        archive_gb=archive_gb,
        patience_seconds=patience_seconds,
        allow_code=allow_code or None,
        allow_data=allow_data or None,
        allow_left_out=allow_left_out or None,
        yes=yes or None,
    )
    if launch is not None and launch.rank:
        with many_imports():
            from node.ranks.follow import follow

        follow(launch, settings)
        return
    _take_part(link, settings, export, stage, as_json=as_json)


def _read(invite: str | None, invite_file: Path | None, *, as_json: bool, anchor: bool) -> str:
    """The link, checked and answered on the screen at once: torch takes seconds to load, a damaged link none to see."""
    from node.commands.person import link_from
    from protos.invite import Invite
    from protos.text import printable

    link = link_from(invite, invite_file)
    told = Invite.parse(link) if anchor else Invite.parse(link).public("`swarmentum join`")
    if not as_json:
        name, coordinators = printable(told.run_name, NAME_CHARACTERS_MAX), ", ".join(told.coordinators)
        print(f"Run {name}: loading torch, then asking {printable(coordinators, 200)} ...", file=sys.stderr, flush=True)
    return link


def _take_part(
    link: str,
    settings: PeerSettings,
    export: Path | None,
    stage: Stage,
    *,
    as_json: bool,
    anchor: bool = False,
) -> NoReturn:
    """Show the person what the run requests, take part, and print the result."""
    with many_imports():
        from node.app import Outcome
        from node.app import join as join_run
    from node.admission.consent import MachineRequest, must_ask
    from node.commands import person
    from node.control import words
    from node.full_disk import outlasting
    from node.ranks.launch import launched

    def agree(asked: MachineRequest) -> None:
        if not as_json:
            person.show(asked)
        if must_ask(asked, settings, can_ask=not as_json and person.can_be_asked()):
            person.ask(asked)

    def take_part(first: bool) -> Outcome:
        asks = agree if first else person.agreed_before
        return join_run(link, settings, export, asks, anchor=anchor, stage=stage)

    if launched(os.environ) is None:
        outcome = outlasting(take_part, settings.home, structlog.get_logger("peer"), settings.metrics_listen)
    else:
        outcome = take_part(True)  # the other ranks have ended, and torchrun ends this one
    summary = outcome.summary
    if summary.checkpoint and outcome.exit_code == 0:
        from node.commands.credits import add_credits

        add_credits(link, Path(summary.checkpoint), summary.step)
    if as_json:
        print(summary.json(), flush=True)
    else:
        kept = f"; model: {summary.checkpoint}" if summary.checkpoint else ""
        print(f"step {summary.step}, state digest {summary.digest[:16]}{kept}", flush=True)
        print(person.fitted(words.farewell(asdict(summary), anchor=anchor)), flush=True)
    if outcome.exit_code == EXIT_INTERRUPTED:
        leave()  # everything is saved and closed; the interpreter's own shutdown would take over a second
    raise typer.Exit(outcome.exit_code)


@leaving_at_once()  # a signal ends the program at once, until it has something to save and handles signals itself
def anchor(
    invite: InviteOrStdin = None,
    invite_file: InviteFile = None,
    home: Annotated[
        Path | None,
        typer.Option(help="Folder of the identity, snapshots and payloads (default: ~/.swarmentum/anchor)."),
    ] = None,
    threads: Threads = None,
    nice: Nice = None,
    owner: Owner = None,
    relay_mbit: RelayMbit = None,
    listen: Listen = None,
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    relays: Relays = None,
    reachability: Reachability = None,
    metrics_listen: Metrics = None,
    track: Track = None,
    trace: Trace = False,
    archive: Archive = False,
    allow_code: AllowCode = False,
    allow_data: AllowData = False,
    yes: Yes = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run an anchor: a peer that applies every step without training, and whose state digests count. Needs no GPU.

    The run's operator starts it beside the coordinator. An anchor serves the newest state, so that peers can always join.
    """
    need_node_extra()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from node.terminal.stage import Stage

    stage = Stage()  # an anchor runs unattended
    configure_logging(as_json=as_json, verbose=verbose, target=stage, seen=stage.recent)
    link = _read(invite, invite_file, as_json=as_json, anchor=True)
    from node.config import load_settings

    settings = load_settings(
        home=home or Path.home() / ".swarmentum" / "anchor",
        device="cpu",
        threads=threads,
        nice=nice,
        owner=owner,
        relay_mbit=relay_mbit,
        listen=listen,
        announce=announce,
        bootstrap=bootstrap,
        relays=relays,
        reachability=reachability,
        metrics_listen=metrics_listen,
        track=track,
        trace=trace or None,
        archive=archive or None,
        allow_code=allow_code or None,
        allow_data=allow_data or None,
        yes=yes or None,
    )
    _take_part(link, settings, None, stage, as_json=as_json, anchor=True)
