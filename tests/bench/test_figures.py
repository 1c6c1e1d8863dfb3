"""The tables of docs/benchmarks.md and README.md against the runs on file (docs/convergence.jsonl): held-out losses, every one.

A table of the docs once showed the losses on the windows that its rates were chosen on.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.bench.methods import BASELINES, METHODS

ROOT = Path(__file__).parents[2]
HELD_OUT = 1600
POINTS = 0.11
"""Of a percentage: the docs round to 0.1."""
FAMILY = [
    *("v2-muon-g16", "v2-muon-g128", "adam-votes-g8", "adam-votes-g16", "adam-votes-g32", "adam-votes-g64"),
    *("adam-votes-g128", "groups-g8", "groups-g16", "groups-g32", "groups-g64", "adam-votes-topk-32"),
    *("adam-votes-g16-2bit", "adam-votes-g16-8bit", "adam-votes-g16-hadamard", "v2-adamw-g16", "paper-k32-clip"),
    *("paper-k32-beta95-clip", "paper-k8-beta95-clip", "signum-ddp", "muon-ddp", "adamw-ddp"),
]
WORSE = [
    *("late-g16", "late-g16-residual", "late-g16-momentum", "late-g16-votes", "lost30-g16-restore", "lost30-g16-drop"),
    *("adam-votes-g16-identity", "v2-sgd-g16", "groups-g128", "mixed", "paper-k32", "paper-k8", "top-32, signs"),
    *("diloco", "diloco-demo-g16", "sparseloco-64"),
]
DRAWN = ["random-16-muon", "random-16", "adam-votes-g128", "striding-16", "slicing-16"]
MAIN = ["muon-ddp", "adamw-ddp", "v2-muon-g16", "v2-muon-g128", "adam-votes-g16", "adam-votes-g128"]
ELSEWHERE = [
    *("muon-votes-g16-p16", "default-p16", "adamw-ddp-run-schedule", "muon-ddp-run-schedule"),
    *("muon-votes-g16-run-schedule", "default-run-schedule"),
]
TABLES = {
    "On Shakespeare:": ("tinyshakespeare", 128, MAIN),
    "On the standard library's sources (": ("stdlib", 128, [*MAIN, "paper-k32-clip", "paper-k32-beta95-clip"]),
    "**5.9 million parameters**": ("tinyshakespeare", 384, [name for name in MAIN if name != "adam-votes-g16"]),
    "**16 peers, and the schedule of a run**": ("tinyshakespeare", 128, ELSEWHERE),
    "**Places that nobody sends, 672,640 parameters**": ("tinyshakespeare", 128, DRAWN),
    "| Shakespeare: `slicing`": ("stdlib", 128, DRAWN[:-1]),
    "## What the family does": ("tinyshakespeare", 128, FAMILY),
    "## What was tried and is worse": ("tinyshakespeare", 128, WORSE),
}
"""What comes before a table -> its text, the model's width, and the methods of its rows."""


def on_file() -> dict[tuple[str, int, str], dict[float, list[dict[str, Any]]]]:
    """(text, width, method) -> rate -> outcomes, seed 0 first."""
    found: dict[tuple[str, int, str], dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    lines = map(json.loads, (ROOT / "docs/convergence.jsonl").read_text().splitlines())
    for line in sorted(lines, key=lambda line: line["run"]["seed"]):
        run = line["run"]
        assert run["held_out"] == HELD_OUT, run
        found[run["data"], run["width"], run["method"]][run["lr"]].append(line["outcome"])
    return found


RUNS = on_file()


def row(data: str, width: int, method: str) -> tuple[float, list[float]]:
    """The rate that is best on the validation windows for the first seed, and the held-out loss of each seed."""
    rates = RUNS[data, width, method]
    lr = min(rates, key=lambda lr: rates[lr][0]["loss"])
    return lr, [outcome["held_out"] for outcome in rates[lr]]


def cells(text: str, after: str) -> list[list[str]]:
    """The rows of the first table after these words, without its two heading rows."""
    lines = text[text.index(after) :].splitlines()[1:]
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip(" *") for cell in line.strip("|").split("|")])
    return table


def percent(text: str) -> float:
    found = re.match(r"([+-]\d+\.\d) %", text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.parametrize("after", TABLES)
def test_a_table_has_the_held_out_losses_on_file(after: str) -> None:
    data, width, methods = TABLES[after]
    table = cells((ROOT / "docs/benchmarks.md").read_text(), after)
    assert len(table) == len(methods)
    for (name, rate, loss, spread, *against), method in zip(table, methods, strict=True):
        lr, losses = row(data, width, method)
        assert float(rate) == lr, name
        assert len(losses) == 3, name
        mean = statistics.fmean(losses)
        assert float(loss) == pytest.approx(mean, abs=0.00051), name
        ends = [float(end) for end in spread.split("..")]
        assert ends == pytest.approx([min(losses), max(losses)], abs=0.00051), name
        for baseline, said in zip(BASELINES, against, strict=False):
            base = statistics.fmean(row(data, width, baseline + METHODS[method].against)[1])
            assert percent(said) == pytest.approx(100 * (mean / base - 1), abs=POINTS), name


def test_the_readme_has_the_ranges_over_both_texts() -> None:
    table = cells((ROOT / "README.md").read_text(), "convergence-shakespeare.png")
    for (name, loss, *said), method in zip(
        table, ["v2-muon-g16", "v2-muon-g128", "adam-votes-g128", "adamw-ddp", "muon-ddp"], strict=True
    ):
        means = {
            data: {which: statistics.fmean(row(data, 128, which)[1]) for which in (method, *BASELINES)}
            for data in ("tinyshakespeare", "stdlib")
        }
        assert float(loss) == pytest.approx(means["tinyshakespeare"][method], abs=0.00051), name
        for baseline, text in zip(BASELINES, said, strict=False):
            if method == baseline:
                assert text == "0"
                continue
            ends = sorted(100 * abs(found[method] / found[baseline] - 1) for found in means.values())
            assert [float(end) for end in re.findall(r"\d+\.\d", text)] == pytest.approx(ends, abs=POINTS), name
            lower = [found[method] < found[baseline] for found in means.values()]
            assert [word in text for word in ("lower", "higher")] == [any(lower), not all(lower)], name
