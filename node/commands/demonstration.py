"""`swarmentum demo`: a real swarm on this machine. Every part is the one that a user has, each in its own process.

The command starts a coordinator, a relay and the peers on loopback, and shows the run. The command checks at the end that all
replicas are equal and that the loss fell. The command leaves the results in the output folder, and no process.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.commands.processes import ANCHOR, OFFLINE, LocalProcesses, Processes
from node.commands.status import as_values
from node.link.run_reader import read_facts
from node.pictures import PeerTotals, allreduce_bytes, loss_chart, loss_png, peers_table, render
from protos.disk import temporary_folder, writing
from protos.errors import NetworkError, OperatorError, StoppedError, SwarmentumError
from protos.invite import Invite
from protos.process import asked_to_stop, usable_cores
from protos.run_config import RunConfig
from protos.text import amount, print_json, things
from protos.toml_file import describe

POLL_SECONDS = 0.5
# This is generous: a step of the demo's model takes about 2 s on 2 slow cores with 4 peers.
STEP_SECONDS_MAX = 60.0
START_SECONDS_MAX = 180.0
SAMPLES_A_PEER = 16
SAMPLE_TOKENS = 160
MARKER = "demo.json"


@dataclass(frozen=True)
class DemoOptions:
    """The flags of the command."""

    peers: int
    steps: int
    seed: int
    data: Path | None
    output: Path
    group_size: int
    strict: bool
    archive: bool
    as_json: bool
    allow_left_out: bool = False


def run_toml(options: DemoOptions, bootstrap: str) -> str:
    """The demo's run.toml: the default model and small batches. A user can begin a run of one's own with it."""
    source = "stdlib" if options.data is None else str(options.data.resolve())
    return f"""# The run that `swarmentum demo` made. Every key is optional; `run example --all` explains them.
name = "demo"
seed = {options.seed}

[data]
source = {json.dumps(source)}

[optimizer]
group_size = {options.group_size}

[clock]
steps = {options.steps}
batch_samples = {SAMPLES_A_PEER * options.peers}
min_peers = {options.peers}
strict = {str(options.strict).lower()}

[overlay]
bootstrap = [{json.dumps(bootstrap)}]
"""


def prepare_output(output: Path) -> None:
    """Make an empty folder for results. Older content is deleted only if a demo made it."""
    if output.exists() and any(output.iterdir()) and not (output / MARKER).is_file():
        raise OperatorError(
            f"--output {output}: the folder is not empty and has no demo's results; choose another folder"
        )
    with writing(output):
        if output.exists():
            shutil.rmtree(output)
        output.mkdir(parents=True)
        (output / MARKER).write_text("{}\n")


def _look_at(data: Path, *, allowed: bool) -> None:
    """Print what of the text is left out, before anything starts. Raises DataError if much is, and it is not allowed."""
    from node.data.corpus import look_at
    from node.data.sources import Source

    found = look_at(Source(str(data)))
    for line in found.lines():
        print(line, file=sys.stderr)
    found.check(allowed=allowed)


def run_demo(options: DemoOptions) -> int:
    """Run the demo. Returns 0 only if every replica is equal and the loss fell."""
    if options.data is not None and not options.data.exists():
        raise OperatorError(f"--data {options.data}: no such file or folder")
    if options.data is not None:
        _look_at(options.data, allowed=options.allow_left_out)
    try:
        RunConfig.model_validate(tomllib.loads(run_toml(options, "/ip4/127.0.0.1/tcp/1/p2p/12D3KooW")))
    except ValidationError as error:
        raise OperatorError("wrong flags:\n" + describe(error)) from error
    console = Console(stderr=options.as_json, soft_wrap=False)
    prepare_output(options.output)
    logs = options.output / "logs"
    logs.mkdir()
    with asked_to_stop(_stopped), ExitStack() as stack:
        homes, remove = temporary_folder("swarmentum-demo-")
        stack.callback(remove)
        processes = Processes(logs)
        stack.callback(processes.close)
        console.print(f"Starting a coordinator, a relay, an anchor and {options.peers} peers on this machine ...")
        here = LocalProcesses(processes, homes)
        file = options.output / "run.toml"
        created = here.create(file, lambda relay: run_toml(options, relay), anchor=True)
        invite = str(created["invite"])
        here.anchor(str(created["anchor"]), environment=OFFLINE)
        started = time.monotonic()
        peers = _start_peers(here, options, invite)
        _show_until_done(console, processes, peers, invite, options)
        summaries = [_summary(processes, f"peer-{index}", child) for index, child in enumerate(peers)]
        seconds = time.monotonic() - started
        all_steps = _steps(here, invite, options)
    return _report(console, options, summaries, all_steps, seconds)


def _stopped(_number: int) -> None:
    """Ctrl-C, SIGTERM or a closed terminal: raise, so that the command ends all its processes on the way out."""
    raise StoppedError("stopped")


def _start_peers(here: LocalProcesses, options: DemoOptions, invite: str) -> list[subprocess.Popen[str]]:
    """Start the peers. The first one exports the model. The peers share the machine's cores."""
    threads = max(1, usable_cores() // options.peers)
    data = () if options.data is None else ("--data", str(options.data.resolve()))
    allowed = ("--set", "allow=left_out") if options.allow_left_out else ()
    children = []
    for index in range(options.peers):
        export = ("--export", str(options.output / "model")) if index == 0 else ()
        archive = ("--set", "archive=true") if index == 0 and options.archive else ()
        flags = (*data, *allowed, *export, *archive)
        children.append(here.join(f"peer-{index}", invite, threads, *flags, environment=OFFLINE))
    return children


# ---- while it runs ---------------------------------------------------------------------------------------------------


def _show_until_done(
    console: Console, processes: Processes, peers: list[subprocess.Popen[str]], link: str, options: DemoOptions
) -> None:
    """Poll the coordinator like `status` does, until every peer has ended. Raises when one fails or nothing moves."""
    invite = Invite.parse(link)
    moved, step, told = time.monotonic(), 0, -1
    with Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else ExitStack() as live:
        while any(child.poll() is None for child in peers):
            values = _look(invite)
            if values is not None and values["step"] > step:
                moved, step = time.monotonic(), values["step"]
            if isinstance(live, Live) and values is not None:
                live.update(_view(values), refresh=True)
            elif values is not None and (step // 10 > told // 10 or step == 1 > told):
                told = step
                console.print(_line(values), highlight=False, markup=False)
            patience = STEP_SECONDS_MAX if step else START_SECONDS_MAX
            failed = processes.ended()
            if failed or time.monotonic() - moved > patience:
                name = failed[0] if failed else "peer-0"
                problem = f"{name} failed" if failed else f"the run made no step for {patience:.0f} s after step {step}"
                words = processes.last_words(name)
                raise SwarmentumError(
                    f"the demo stopped: {problem}; see {options.output}/logs. The end of the log:\n{words}"
                )
            time.sleep(POLL_SECONDS)


def _look(invite: Invite) -> dict[str, Any] | None:
    try:
        return as_values(*asyncio.run(read_facts(invite)), invite.run_id)
    except NetworkError:
        return None


def _line(values: dict[str, Any]) -> str:
    loss = "" if values["loss"] is None else f", loss {values['loss']:.3f}"
    here = sum(peer["phase"] == "ready" and not peer["anchor"] for peer in values["peers"])
    why = "" if values["phase"] == "open" else f" ({values['reason']})"
    moved = amount(values["payload_bytes"])
    return f"step {values['step']:>3} of {values['steps']}{loss}, {things(here, 'peer')} ready, {moved} of votes{why}"


def _view(values: dict[str, Any]) -> Table:
    table = Table(
        "peer", "phase", "step", "state digest", "votes", "samples/s", "loss", title=Text(_line(values)), expand=True
    )
    for peer in values["peers"]:
        speed, loss = f"{peer['samples_per_second']:.1f}", "-" if peer["loss"] is None else f"{peer['loss']:.3f}"
        votes, digest = str(peer["votes_accepted"]), peer["state_digest"][:16]
        table.add_row(peer["id"][-8:], peer["phase"], str(peer["applied_step"]), digest, votes, speed, loss)
    return table


# ---- at the end ------------------------------------------------------------------------------------------------------


def _summary(processes: Processes, name: str, child: subprocess.Popen[str]) -> dict[str, Any]:
    """The summary that a peer printed last."""
    assert child.stdout is not None
    lines = [line for line in child.stdout.read().splitlines() if line.startswith("{")]
    if child.returncode != 0 or not lines:
        raise SwarmentumError(
            f"{name} ended with exit code {child.returncode}. The end of the log:\n{processes.last_words(name)}"
        )
    values: dict[str, Any] = json.loads(lines[-1])
    return values


def _steps(here: LocalProcesses, invite: str, options: DemoOptions) -> list[list[dict[str, Any]]]:
    """Every peer's steps.jsonl and the anchor's, which also go into the output folder."""
    run_id = Invite.parse(invite).run_id
    all_steps = []
    if options.archive:
        shutil.copytree(here.run_folder("peer-0", run_id) / "archive", options.output / "archive")
    for name in (*(f"peer-{index}" for index in range(options.peers)), ANCHOR):
        shutil.copyfile(here.run_folder(name, run_id) / "steps.jsonl", options.output / f"{name}.steps.jsonl")
        all_steps.append(here.steps(name, run_id))
    return all_steps


def first_difference(all_steps: list[list[dict[str, Any]]]) -> int | None:
    """The first step after which two peers' digests differ, or None. The digests of every step are compared."""
    by_step: dict[int, set[str]] = {}
    for steps in all_steps:
        for line in steps:
            by_step.setdefault(line["step"], set()).add(line["digest"])
    return min((step for step, digests in by_step.items() if len(digests) > 1), default=None)


def _report(
    console: Console,
    options: DemoOptions,
    summaries: list[dict[str, Any]],
    all_steps: list[list[dict[str, Any]]],
    seconds: float,
) -> int:
    points = [(line["step"], math.nan if line["loss"] is None else line["loss"]) for line in all_steps[0]]
    card = json.loads((options.output / "model" / "swarmentum.json").read_text())
    different = first_difference(all_steps)
    digests = {summary["state_digest"] for summary in summaries}
    equal = different is None and len(digests) == 1
    first, last = points[0][1], points[-1][1]
    result = {
        "steps": points[-1][0],
        "loss_first": first,
        "loss_last": last,
        "tokens": sum(line["tokens"] for line in all_steps[0]),
        "seconds": round(seconds, 1),
        "allreduce_bytes_per_peer_step": allreduce_bytes(card["parameters"]),
        "parameters": card["parameters"],
        "checkpoint": str((options.output / "model").resolve()),
        "digests_equal_at_every_step": equal,
        "peers": [_peer_result(summary) for summary in summaries],
    }
    (options.output / MARKER).write_text(json.dumps(result, indent=2) + "\n")
    _show(console, options, result, points, summaries)
    if not equal:
        where = "at the end" if different is None else f"after step {different}"
        console.print(f"[bold red]FAILED: the replicas' digests differ {where}.[/]")
    if last >= first:
        console.print("[bold red]FAILED: the loss did not fall.[/]")
    if options.as_json:
        print_json(result)
    return 0 if equal and last < first else 1


def _peer_result(summary: dict[str, Any]) -> dict[str, Any]:
    names = (
        "id",
        "device",
        "steps_applied",
        "state_digest",
        "votes_accepted",
        "payload_bytes_sent",
        "payload_bytes_received",
    )
    return {name: summary[name] for name in (*names, "wire_bytes_sent", "wire_bytes_received")}


def _show(
    console: Console,
    options: DemoOptions,
    result: dict[str, Any],
    points: list[tuple[int, float]],
    summaries: list[dict[str, Any]],
) -> None:
    try:
        picture = str(loss_png({"training loss": points}, options.output / "loss.png", "swarmentum demo").resolve())
    except ImportError:
        picture = "not drawn: pip install 'swarmentum[charts]'"
    width = min(console.width, 100)
    console.print(loss_chart(points, width=width, title="loss"), highlight=False, markup=False)
    console.print(
        render(peers_table([_row(summary) for summary in summaries], result["parameters"]), width), markup=False
    )
    console.print(f"\nA sample of what the model writes after {result['steps']} steps:", style="bold")
    console.print(_sample(Path(result["checkpoint"]), options.seed), highlight=False, markup=False)
    equal = "equal on every peer after every step" if result["digests_equal_at_every_step"] else "DIFFERENT"
    console.print(f"\nState digest {summaries[0]['state_digest'][:16]}: {equal}.", highlight=False)
    console.print(
        f"Loss {result['loss_first']:.3f} to {result['loss_last']:.3f} in {result['seconds']} s.", highlight=False
    )
    console.print(
        f"Model (loads with Hugging Face): {result['checkpoint']}", highlight=False, soft_wrap=True, markup=False
    )
    console.print(f"Loss curve: {picture}", highlight=False, soft_wrap=True, markup=False)


def _row(summary: dict[str, Any]) -> PeerTotals:
    return PeerTotals(**_peer_result(summary))


def _sample(checkpoint: Path, seed: int) -> str:
    from transformers import AutoModelForCausalLM

    from node.data.tokenizer import ByteTokenizer
    from node.export.model_folder import sample_text
    from node.imports import no_progress_bar

    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False)
    return sample_text(model, ByteTokenizer(), "def ", SAMPLE_TOKENS, seed=seed)
