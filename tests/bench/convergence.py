"""Held-out loss against bytes sent, for every method at its own best learning rate: what compression costs.

A small Llama over bytes learns text with simulated peers in one process, each with its own data and optimizer state.
The learning rate is chosen by the validation loss of the first seed, from one grid for all methods. A grid whose best rate
lies at its edge grows there by factors of two. The other seeds run at the best. What a row shows is the loss on held-out
windows that no choice has seen. Every run is a line of `runs.jsonl` in the folder of `--out`: an interrupted table is resumed,
and nothing is computed twice. Refuses unknown names and a text that is too short; a run that diverges is a row without a loss.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from node.data.corpus import open_corpus
from node.model.spec import build, parameter_count
from node.pictures import render
from protos.text import amount
from tests.bench.convergence_picture import picture
from tests.bench.methods import BASELINES, METHODS, RUN_SCHEDULE
from tests.bench.trial import SCHEDULES, SIZES, Outcome, Run, model_spec, split, train

STDLIB: Final = "stdlib"
SHAKESPEARE: Final = Path("../shared/data/tinyshakespeare.txt")
DEFAULT_OUT: Final = Path("swarmentum-out/convergence")
SIZE: Final = "0.7M"
VALIDATION: Final = 512
HELD_OUT: Final = 1600
"""Windows of 64 tokens: 102,400."""
DIGITS: Final = 5
TABLE_COLUMNS: Final = 130


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="data order and weights (default 0 1 2)"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lrs", nargs="+", type=float, default=[2e-3, 4e-3], help="the grid (default 2e-3 4e-3)")
    parser.add_argument(
        "--grow", type=int, default=3, help="rates beyond the grid's edge, at most (default 3; one rate: 0)"
    )
    parser.add_argument(
        "--schedule",
        choices=[*SCHEDULES, RUN_SCHEDULE],
        default="cosine",
        help="to zero; 'run': as a run has it (default cosine)",
    )
    parser.add_argument("--warmup", type=float, default=0.25, help="part of the steps (default 0.25)")
    parser.add_argument("--data", nargs="+", help=f"'{STDLIB}' or text files (default: both below, where present)")
    parser.add_argument("--on-file", action="store_true", help="run nothing: table and picture of the runs on file")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"runs and pictures (default {DEFAULT_OUT})")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="samples of a peer in a step (default 4)")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sample (default 64)")
    parser.add_argument("--size", choices=list(SIZES), default=SIZE, help=f"parameters (default {SIZE})")
    parser.add_argument("--width", type=int, help="of the model, instead of the size's")
    parser.add_argument("--layers", type=int, help="of the model, instead of the size's")
    parser.add_argument(
        "--validation", type=int, default=VALIDATION, help=f"windows that rates are chosen on (default {VALIDATION})"
    )
    parser.add_argument(
        "--held-out", type=int, default=HELD_OUT, help=f"windows that are reported (default {HELD_OUT})"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--device", default="cpu", help="of torch, such as cuda: bf16 forward passes (default cpu)")


def measure(options: argparse.Namespace) -> dict[str, object]:
    width, layers = SIZES[options.size]
    options.width, options.layers = options.width or width, options.layers or layers
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.data or [STDLIB] + ([str(SHAKESPEARE)] if SHAKESPEARE.exists() else [])
    result: dict[str, object] = {
        "params": parameter_count(build(model_spec(options.width, options.layers, options.context), seed=0)),
        **{name: getattr(options, name) for name in (*SHAPE, "seeds", "lrs", "grow")},
        "backend": f"torch {torch.__version__} {options.device}",
        "threads": options.threads,
        "runs": str(options.out / "runs.jsonl"),
    }
    console = Console(stderr=True)
    for name in names:
        with Progress(console=console, transient=True) as progress:
            laboratory = Laboratory(name, options, progress)
            rows = laboratory.table_on_file() if options.on_file else laboratory.table()
        title = Path(name).stem
        if left_out := picture(
            rows, options.out / f"{title}.png", f"Held-out loss after {options.steps} steps: {title}"
        ):
            console.print(f"{title}.png: no room for {left_out} labels; the table has all rows")
        print(render(as_table(rows, title), TABLE_COLUMNS), file=sys.stderr)
        result[title] = rows
    return result


@dataclass
class Laboratory:
    """One corpus: runs what is not on file yet, and files it."""

    source: str
    options: argparse.Namespace
    progress: Progress
    filed: dict[str, Outcome] = field(init=False)

    def __post_init__(self) -> None:
        self.filed = filed(self.options.out / "runs.jsonl")
        self.corpus = open_corpus(None if self.source == STDLIB else Path(self.source), self.options.out)
        self.sha256 = self.corpus.digest()

    def table(self) -> dict[str, dict[str, object]]:
        """Method -> its row."""
        rows: dict[str, dict[str, object]] = {}
        first, *others = self.options.seeds
        for method in self.options.methods:
            grid = {lr: self.outcome(method, lr, first) for lr in self.options.lrs}
            for _ in range(self.options.grow if len(grid) > 1 else 0):
                if (following := beyond(grid)) is None:
                    break
                grid[following] = self.outcome(method, following, first)
            lr = min(grid, key=lambda lr: grid[lr].badness)
            rows[method] = row(lr, grid, [grid[lr]] + [self.outcome(method, lr, seed) for seed in others])
        return compare(rows)

    def table_on_file(self) -> dict[str, dict[str, object]]:
        """Method -> its row, from what is on file: rates of the first seed that has any, seeds that have the best of them."""
        rows: dict[str, dict[str, object]] = {}
        rates = sorted({json.loads(key)["lr"] for key in self.filed})
        for method in self.options.methods:
            known = {
                (lr, seed): self.filed[key]
                for lr in rates
                for seed in self.options.seeds
                if (key := self.run(method, lr, seed).key) in self.filed
            }
            first = next((seed for seed in self.options.seeds if any(place[1] == seed for place in known)), None)
            if first is not None:
                grid = {lr: outcome for (lr, seed), outcome in known.items() if seed == first}
                lr = min(grid, key=lambda lr: grid[lr].badness)
                rows[method] = row(lr, grid, [outcome for place, outcome in known.items() if place[0] == lr])
        return compare(rows)

    def outcome(self, method: str, lr: float, seed: int) -> Outcome:
        run = self.run(method, lr, seed)
        if run.key not in self.filed:
            label = f"{run.data} {method} lr {lr:g} seed {seed}"
            bar = self.progress.add_task(label, total=run.steps)
            result = train(run, split(self.corpus.tokens, run), lambda: self.progress.advance(bar))
            self.filed[run.key] = result
            with (self.options.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps({"run": asdict(run), "outcome": asdict(result)}) + "\n")
            self.progress.remove_task(bar)
            self.progress.console.print(f"{label}: {shown(result.loss)} in {result.seconds:.0f} s", highlight=False)
        return self.filed[run.key]

    def run(self, method: str, lr: float, seed: int) -> Run:
        """With what the method has instead of the table's settings."""
        row, shape = METHODS[method], {name: getattr(self.options, name) for name in SHAPE}
        for name in ("peers", "batch", "schedule"):
            shape[name] = getattr(row, name) or shape[name]
        settings = json.loads(json.dumps(row.settings))
        return Run(method, settings, lr, seed, data=Path(self.source).stem, data_sha256=self.sha256, **shape)


def beyond(grid: Mapping[float, Outcome]) -> float | None:
    """The next learning rate to try where the best of `grid` is at its edge, or None where it is inside."""
    best = min(grid, key=lambda lr: grid[lr].badness)
    if grid[best].loss is None:
        return min(grid) / 2
    if best == min(grid):
        return best / 2
    return best * 2 if best == max(grid) else None


SHAPE: Final = (
    "steps",
    "schedule",
    "warmup",
    "peers",
    "batch",
    "context",
    "width",
    "layers",
    "validation",
    "held_out",
    "device",
)


def filed(path: Path) -> dict[str, Outcome]:
    """The runs on file; a last line that an interruption cut is removed."""
    if not path.exists():
        return {}
    whole, _, cut = path.read_text().rpartition("\n")
    if cut:
        path.write_text(whole + "\n" if whole else "")
    lines = [json.loads(line) for line in whole.splitlines()]
    return {Run(**line["run"]).key: Outcome(**line["outcome"]) for line in lines}


def row(lr: float, grid: Mapping[float, Outcome], runs: Sequence[Outcome]) -> dict[str, object]:
    """A method's figures over its seeds. `lr_at_edge`: the best learning rate ends the grid, which is too narrow."""
    losses = [run.reported for run in runs]
    finite = all(map(math.isfinite, losses))
    return {
        "lr": lr,
        "lr_at_edge": len(grid) > 1 and lr in (min(grid), max(grid)),
        "loss": round(statistics.fmean(losses), DIGITS) if finite else None,
        "loss_min": round(min(losses), DIGITS) if finite else None,
        "loss_max": round(max(losses), DIGITS) if finite else None,
        "seeds": len(runs),
        "bytes_step": round(statistics.fmean(run.bytes_step for run in runs), 1),
        "ratio_to_allreduce": round(runs[0].ratio, 1),
        "grid": {f"{lr:g}": run.loss and round(run.loss, DIGITS) for lr, run in grid.items()},
        "run_s": round(statistics.fmean(run.seconds for run in runs), 1),
    }


def compare(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, object]]:
    """Add `relative_to`: for each baseline the mean loss against it, 0.02 being 2 % worse.

    A baseline has as many samples a step and the same schedule as the row. None where either loss is missing.
    """
    for name, found in rows.items():
        found["relative_to"] = {
            baseline: relative(found["loss"], rows.get(baseline + METHODS[name].against, {}).get("loss"))
            for baseline in BASELINES
        }
    return rows


def relative(loss: float | None, base: float | None) -> float | None:
    """How much worse `loss` is, as a part of `base`."""
    return round(loss / base - 1, DIGITS) if base and loss else None


def as_table(rows: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """The rows for a terminal; a star marks a best learning rate at the edge of the grid."""
    table = Table(title=title, caption="* the best of the grid is its edge")
    for heading in (
        "method",
        "lr",
        "loss",
        "min .. max",
        "to AdamW-DDP",
        "to Muon-DDP",
        "bytes a step",
        "x less",
        "run",
    ):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for name, found in rows.items():
        against = ["-" if value is None else f"{value:+.1%}" for value in found["relative_to"].values()]
        table.add_row(
            name,
            f"{found['lr']:g}{'*' if found['lr_at_edge'] else ''}",
            shown(found["loss"]),
            f"{shown(found['loss_min'])} .. {shown(found['loss_max'])}",
            *against,
            amount(found["bytes_step"]),
            f"{found['ratio_to_allreduce']:,.0f}",
            f"{found['run_s']:.0f} s",
        )
    return table


def shown(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.3f}"
