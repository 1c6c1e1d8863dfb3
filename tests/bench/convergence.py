"""Held-out loss against bytes sent, for every method at its own best learning rate: what compression costs.

A small Llama over bytes learns text with simulated peers in one process, each with its own data and optimizer state.
The learning rate is chosen by the validation loss of the first seed, from one grid and one schedule for all methods; a
grid whose best rate lies at its edge grows there by factors of two. The other seeds run at the best. Every run is a line
of `runs.jsonl` in the folder of `--out`: an interrupted table is resumed, and nothing is computed twice. Refuses nothing
but unknown names: a run that diverges is a row without a loss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from node.data.corpus import open_corpus
from node.data.samples import Samples
from node.model.loss import loss
from node.model.spec import SMALL_LLAMA, ModelSpec, build, parameter_count
from node.report import PICTURE_DPI, PICTURE_INCHES, allreduce_bytes, format_bytes, render
from tests.bench.methods import METHODS

BASELINE: Final = "adamw-ddp"
STDLIB: Final = "stdlib"
SHAKESPEARE: Final = Path("../shared/data/tinyshakespeare.txt")
DEFAULT_OUT: Final = Path("swarmentum-out/convergence")
VALIDATION_BATCH: Final = 64
SCHEDULES: Final[Mapping[str, Callable[[float], float]]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}
"""What the learning rate is multiplied by after the warm-up, when `done` (0 <= done < 1) of the rest is over."""

DIGITS: Final = 5
TABLE_COLUMNS: Final = 120


@dataclass(frozen=True)
class Run:
    """Everything that decides a run's bits (with the versions of torch and of the code); equal runs are not repeated."""

    method: str
    settings: Mapping[str, Any]
    lr: float
    seed: int
    steps: int
    schedule: str
    warmup: float
    peers: int
    batch: int
    context: int
    width: int
    layers: int
    validation: int
    data: str
    data_sha256: str

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Outcome:
    """What a run gave. `loss` is None where it diverged; `bytes_step` is a peer's mean; `digest` is of all weights."""

    loss: float | None
    bytes_step: float
    params: int
    seconds: float
    digest: str

    @property
    def ratio(self) -> float:
        """How many times more an fp32 all-reduce sends."""
        return allreduce_bytes(self.params) / self.bytes_step if self.bytes_step else math.inf

    @property
    def badness(self) -> float:
        return math.inf if self.loss is None else self.loss


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
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="cosine", help="to zero (default cosine)")
    parser.add_argument("--warmup", type=float, default=0.25, help="part of the steps (default 0.25)")
    parser.add_argument("--data", nargs="+", help=f"'{STDLIB}' or text files (default: both below, where present)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"runs and pictures (default {DEFAULT_OUT})")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="samples of a peer in a step (default 4)")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sample (default 64)")
    parser.add_argument("--width", type=int, default=128, help="of the model; with 3 layers 0.67 million parameters")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--validation", type=int, default=256, help="held-out samples, the same for all (default 256)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")


def measure(options: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.data or [STDLIB] + ([str(SHAKESPEARE)] if SHAKESPEARE.exists() else [])
    result: dict[str, object] = {
        "params": parameter_count(build(model_spec(options.width, options.layers, options.context), seed=0)),
        **{
            name: getattr(options, name)
            for name in ("steps", "schedule", "warmup", "peers", "batch", "context", "seeds", "lrs", "grow")
        },
        "backend": f"torch {torch.__version__} cpu",
        "threads": options.threads,
        "runs": str(options.out / "runs.jsonl"),
    }
    console = Console(stderr=True)
    for name in names:
        with Progress(console=console, transient=True) as progress:
            rows = Laboratory(name, options, progress).table()
        title = Path(name).stem
        picture(rows, options.out / f"{title}.png", f"Validation loss after {options.steps} steps: {title}")
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

    def outcome(self, method: str, lr: float, seed: int) -> Outcome:
        shape = {name: getattr(self.options, name) for name in SHAPE}
        settings = json.loads(json.dumps(METHODS[method].settings))
        run = Run(method, settings, lr, seed, data=Path(self.source).stem, data_sha256=self.sha256, **shape)
        if run.key not in self.filed:
            label = f"{run.data} {method} lr {lr:g} seed {seed}"
            bar = self.progress.add_task(label, total=run.steps)
            samples = Samples(self.corpus.tokens, run.context, seed)
            result = train(run, samples, lambda: self.progress.advance(bar))
            self.filed[run.key] = result
            with (self.options.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps({"run": asdict(run), "outcome": asdict(result)}) + "\n")
            self.progress.remove_task(bar)
            self.progress.console.print(f"{label}: {shown(result.loss)} in {result.seconds:.0f} s", highlight=False)
        return self.filed[run.key]


def beyond(grid: Mapping[float, Outcome]) -> float | None:
    """The next learning rate to try where the best of `grid` is at its edge, or None where it is inside."""
    best = min(grid, key=lambda lr: grid[lr].badness)
    if grid[best].loss is None:
        return min(grid) / 2
    if best == min(grid):
        return best / 2
    return best * 2 if best == max(grid) else None


SHAPE: Final = ("steps", "schedule", "warmup", "peers", "batch", "context", "width", "layers", "validation")


def filed(path: Path) -> dict[str, Outcome]:
    """The runs on file; a last line that an interruption cut is removed."""
    if not path.exists():
        return {}
    whole, _, cut = path.read_text().rpartition("\n")
    if cut:
        path.write_text(whole + "\n" if whole else "")
    lines = [json.loads(line) for line in whole.splitlines()]
    return {Run(**line["run"]).key: Outcome(**line["outcome"]) for line in lines}


def train(run: Run, samples: Samples, advance: Callable[[], None] = lambda: None) -> Outcome:
    """One run from its seed: the same bits every time on one machine. Sample ranges of the peers never overlap."""
    start = time.perf_counter()
    model = build(model_spec(run.width, run.layers, run.context), run.seed, context=run.context)
    method = METHODS[run.method]
    training = method.make(model, run.peers, **method.settings)
    taken = [0] * run.peers
    sent = 0.0

    def backward(peer: int) -> None:
        first = (taken[peer] * run.peers + peer) * run.batch
        taken[peer] += 1
        model.zero_grad()
        loss(model, torch.from_numpy(samples.batch(first, first + run.batch))).backward()  # type: ignore[no-untyped-call]

    try:
        for step in range(run.steps):
            sent += training.step(backward, learning_rate(run, step))
            advance()
        value = validation_loss(model, torch.from_numpy(samples.validation(run.validation)))
    except ArithmeticError:  # a gradient or a momentum that is not finite
        value = math.nan
    seconds = round(time.perf_counter() - start, 1)
    found = value if math.isfinite(value) else None
    return Outcome(found, sent / run.steps, parameter_count(model), seconds, digest(model))


def learning_rate(run: Run, step: int) -> float:
    """Linear warm-up to `lr`, then the schedule; exact in fp32, as it travels in a log entry."""
    warmup = max(1, int(run.steps * run.warmup))
    if step < warmup:
        return float(np.float32(run.lr * (step + 1) / warmup))
    return float(np.float32(run.lr * SCHEDULES[run.schedule]((step - warmup) / (run.steps - warmup))))


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor) -> float:
    """Mean over int64 `tokens` [samples, context + 1], in nats a token."""
    parts = [tokens[first : first + VALIDATION_BATCH] for first in range(0, len(tokens), VALIDATION_BATCH)]
    return sum(float(loss(model, part)) * len(part) for part in parts) / len(tokens)


def model_spec(width: int, layers: int, context: int) -> ModelSpec:
    """The small Llama of `node.model`, with another width and depth."""
    heads = max(1, width // 32)
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": context}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    return ModelSpec(config={**SMALL_LLAMA, **sizes, **shape})


def digest(model: nn.Module) -> str:
    """SHA-256 over every bit of the weights, hex."""
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        hasher.update(parameter.detach().numpy().tobytes())
    return hasher.hexdigest()


def row(lr: float, grid: Mapping[float, Outcome], runs: Sequence[Outcome]) -> dict[str, object]:
    """A method's figures over its seeds. `lr_at_edge`: the best learning rate ends the grid, which is too narrow."""
    losses = [run.badness for run in runs]
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
    """Add `relative`: the mean loss against AdamW-DDP's, 0.02 being 2 % worse; None where either is missing."""
    base = rows.get(BASELINE, {}).get("loss")
    for found in rows.values():
        found["relative"] = round(found["loss"] / base - 1, DIGITS) if base and found["loss"] else None
    return rows


def pareto(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Methods that no other one beats in both loss and bytes, fewest bytes first."""
    best, front = math.inf, []
    finite = [name for name, found in rows.items() if found["loss"] is not None]
    for name in sorted(finite, key=lambda name: (rows[name]["bytes_step"], rows[name]["loss"])):
        if rows[name]["loss"] < best:
            best = rows[name]["loss"]
            front.append(name)
    return front


def picture(rows: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Loss (mean, min to max) against bytes a step on a logarithmic axis, and the Pareto front as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=PICTURE_INCHES, dpi=PICTURE_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, found in rows.items():
        if found["loss"] is not None:
            mean = found["loss"]
            spread = [[mean - found["loss_min"]], [found["loss_max"] - mean]]
            axes.errorbar(found["bytes_step"], mean, yerr=spread, marker="o", capsize=3, linestyle="none")
            axes.annotate(name, (found["bytes_step"], mean), textcoords="offset points", xytext=(6, 5), fontsize=8)
    front = [rows[name] for name in pareto(rows)]
    axes.plot([r["bytes_step"] for r in front], [r["loss"] for r in front], color="grey", linewidth=1, zorder=0)
    axes.set(title=title, xlabel="bytes a step that a peer sends", ylabel="loss (nats per token)", xscale="log")
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def as_table(rows: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """The rows for a terminal; a star marks a best learning rate at the edge of the grid."""
    table = Table(title=title, caption="* the best of the grid is its edge")
    for heading in ("method", "lr", "loss", "min .. max", "to AdamW-DDP", "bytes a step", "all-reduce", "run"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for name, found in rows.items():
        relative = "-" if found["relative"] is None else f"{found['relative']:+.1%}"
        table.add_row(
            name,
            f"{found['lr']:g}{'*' if found['lr_at_edge'] else ''}",
            shown(found["loss"]),
            f"{shown(found['loss_min'])} .. {shown(found['loss_max'])}",
            relative,
            format_bytes(found["bytes_step"]),
            f"{found['ratio_to_allreduce']:.0f}x",
            f"{found['run_s']:.0f} s",
        )
    return table


def shown(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.3f}"
