"""A race against what people would take instead: one model, one text, equal samples, each peer behind a link of its own.

Every rival trains the same model from the same weights on the same samples. Its four peers are in four network namespaces
(needs root), whose links are shaped both ways. Bytes are those of the interfaces, headers included. A loss is the mean over
the peers' own batches before the update. All rivals run on this machine's cores, one after the other: on a machine with
fewer cores than peers the cores, not the links, may set the pace, which the unshaped race shows. A rival that cannot run
is a row with the reason. Each row is a line of a file beside the picture: an interrupted race goes on, and no rival that ended
well is run again.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from node.model.spec import parameter_count
from node.pictures import render
from protos.text import amount
from tests.bench.race import course
from tests.bench.race.curves import Point, common_loss, figures, ratios
from tests.bench.race.picture import picture
from tests.bench.race.rivals import RIVALS
from tests.bench.race.task import HELD_OUT_SAMPLES, Task
from tests.bench.trial import SIZES, validation_loss
from tests.system.netns import NotHereError

DEFAULT_OUT: Final = Path("swarmentum-out/race")
TABLE_COLUMNS: Final = 130


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=list(RIVALS), metavar="RIVAL")
    parser.add_argument("--params", default="0.9M", choices=list(SIZES), help="size of the model (default 0.9M)")
    parser.add_argument("--mbit", type=float, default=20.0, help="of each peer's link, up and down; 0: no limit")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=180.0, help="a rival stops after so many if it is slower")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="samples of a peer in a step, of 128 tokens (default 8)")
    parser.add_argument("--local-steps", type=int, default=10, help="of DiLoCo and of hivemind's local updates")
    parser.add_argument("--loss", type=float, help="to be reached (default: what the slowest finisher reached)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a text file (default: Python's standard library, as the demo)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"rows, picture, logs (default {DEFAULT_OUT})")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    width, layers = SIZES[options.params]
    task = Task(
        folder="", peers=options.peers, width=width, layers=layers, batch=options.batch, steps=options.steps,
        seconds=options.seconds, seed=options.seed, data=None if options.data is None else str(options.data.resolve()),
        mbit=options.mbit, local_steps=options.local_steps,
    )  # fmt: skip
    stem = f"race-{options.params}-{f'{task.mbit:g}mbit' if task.mbit else 'unshaped'}"
    file = options.out / f"{stem}.jsonl"
    console = Console(stderr=True)
    rows: dict[str, dict[str, Any]] = {}
    curves: dict[str, list[Point]] = {}
    with Progress(console=console, transient=True) as progress:
        for name in options.rivals:
            rows[name], curves[name] = filed(file, name, task) or one(name, task, options.out, progress)
            if rows[name]["failed"] is None:
                keep(file, name, task, rows[name], curves[name])
            console.print(f"{RIVALS[name].title}: {told(rows[name])}", highlight=False)
    loss = options.loss if options.loss is not None else common_loss(curves, task.steps)
    for name, points in curves.items():
        if points:
            rows[name] |= figures(points, loss)
    link = f"{task.mbit:g} Mbit/s up and down" if task.mbit else "links without a limit"
    titles = {name: rival.title for name, rival in RIVALS.items()}
    picture(curves, titles, options.out / f"{stem}.png", f"{task.peers} peers, {options.params} parameters, {link}")
    print(render(as_table(rows, f"{link}; loss to reach {loss and round(loss, 3)}"), TABLE_COLUMNS), file=sys.stderr)
    result = {
        "params": parameter_count(task.model()),
        **{key: getattr(task, key) for key in ("peers", "batch", "steps", "seconds", "mbit", "local_steps", "seed")},
        "data": task.data or "stdlib",
        "loss": loss,
        "backend": f"torch {torch.__version__} cpu, 1 thread a peer",
        "rivals": rows,
        "to_ddp": ratios(rows, "ddp"),
        "to_swarm": ratios(rows, "swarm"),
    }
    (options.out / f"{stem}.json").write_text(json.dumps(result) + "\n")
    return result


def filed(file: Path, name: str, task: Task) -> tuple[dict[str, Any], list[Point]] | None:
    """A rival's row and curve, if it ended well in the same race before."""
    for line in file.read_text().splitlines() if file.exists() else ():
        values = json.loads(line)
        if values["race"] == race_of(name, task):
            return values["row"], [Point(**point) for point in values["points"]]
    return None


def keep(file: Path, name: str, task: Task, row: Mapping[str, Any], points: Sequence[Point]) -> None:
    """Add a rival's row and curve, unless they came from there."""
    if filed(file, name, task) is None:
        values = {"race": race_of(name, task), "row": row, "points": [asdict(point) for point in points]}
        with file.open("a") as lines:
            lines.write(json.dumps(values) + "\n")


def race_of(name: str, task: Task) -> dict[str, Any]:
    """Everything that decides what a rival does."""
    race = {**asdict(task), "folder": "", "rival": name, "settings": RIVALS[name].settings}
    return dict(json.loads(json.dumps(race)))


def one(name: str, task: Task, out: Path, progress: Progress) -> tuple[dict[str, Any], list[Point]]:
    """A rival's row (without what depends on the others) and its curve."""
    rival = RIVALS[name]
    bar = progress.add_task(rival.title, total=task.steps)

    def advance(step: int, loss: float | None) -> None:
        progress.update(bar, completed=step, description=rival.title + (f", loss {loss:.2f}" if loss else ""))

    row: dict[str, Any] = {"title": rival.title, "settings": dict(rival.settings), "why": rival.why}
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="swarmentum-race-") as folder:
        own = replace(task, folder=folder)
        try:
            found = course.run(rival, own, advance)
        except NotHereError as why:
            found = course.Result(failed=f"no network namespaces here: {why}")
        kept = out / "logs" / name
        kept.mkdir(parents=True, exist_ok=True)
        for log in Path(folder).glob("*.log"):
            shutil.copy(log, kept)
        if found.model is not None:
            held_out = own.samples(Path(folder) / "cache").validation(HELD_OUT_SAMPLES)
            row["held_out_loss"] = round(validation_loss(found.model, torch.from_numpy(held_out)), 4)
            row["held_out_tokens"] = int(held_out.shape[0] * (held_out.shape[1] - 1))
    loads = [round(value, 1) for value in (load, os.getloadavg()[0])]
    row |= {"failed": found.failed, "wall_seconds": round(time.monotonic() - began, 1), "load_average": loads}
    progress.remove_task(bar)
    return row, found.points


def told(row: Mapping[str, Any]) -> str:
    """One line while the others run."""
    if row["failed"] is not None:
        return f"failed: {row['failed']}"
    return f"held-out loss {row['held_out_loss']:.3f}, {row['wall_seconds']:.0f} s with start and end"


def as_table(rows: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """The rows for a terminal."""
    table = Table(title=title)
    headings = ("rival", "steps", "steps/min", "sent a peer and step", "s to loss", "bytes to loss", "held out")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "rival" else "right", no_wrap=True)
    for row in rows.values():
        if "steps" not in row:
            table.add_row(str(row["title"]), "failed", *["-"] * 5)
            continue
        to_loss = row["bytes_to_loss"]
        table.add_row(
            str(row["title"]) + (" (failed)" if row["failed"] else ""),
            str(row["steps"]),
            shown(row["steps_a_minute"], "{:.1f}"),
            amount(row["sent_bytes_a_peer_step"]),
            shown(row["seconds_to_loss"], "{:.1f}"),
            "-" if to_loss is None else amount(to_loss),
            shown(row.get("held_out_loss"), "{:.3f}"),
        )
    return table


def shown(value: float | None, how: str) -> str:
    return "-" if value is None else how.format(value)
