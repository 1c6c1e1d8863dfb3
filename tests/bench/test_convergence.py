"""`python -m tests.bench convergence` on a tiny model: resumption, bytes of real payloads, and equal bits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from node.model.spec import build
from node.optim import votes
from node.optim.layout import Layout
from node.report import allreduce_bytes
from tests.bench import convergence, methods

METHODS = ["adamw-ddp", "mixed"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} and {number * number % 97}; " for number in range(2000)))
    return path


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def measured(text: Path, out: Path, *more: str) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    convergence.arguments(parser)
    line = ["--methods", *METHODS, "--data", str(text), "--out", str(out), "--steps", "3", "--width", "64"]
    shape = ["--layers", "1", "--context", "16", "--batch", "2", "--validation", "8", "--seeds", "0", "1"]
    rows: dict[str, dict[str, Any]] = convergence.measure(  # type: ignore[assignment]
        parser.parse_args([*line, *shape, "--lrs", "1e-3", "4e-3", "--grow", "0", *more])
    )["text"]
    return rows


def test_an_interrupted_table_is_resumed(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(text, tmp_path / "out")
    runs = tmp_path / "out" / "runs.jsonl"
    lines = runs.read_text().splitlines(keepends=True)
    assert len(lines) == len(METHODS) * (2 + 1)  # the grid on the first seed, then the second seed at the best
    assert (tmp_path / "out" / "text.png").stat().st_size > 0

    runs.write_text("".join(lines[:-1]) + lines[-1][:40])
    trained = []
    train = convergence.train

    def counted(run: convergence.Run, *rest: Any) -> convergence.Outcome:
        trained.append(run.method)
        return train(run, *rest)

    monkeypatch.setattr(convergence, "train", counted)
    resumed = measured(text, tmp_path / "out")
    assert trained == ["mixed"]
    assert without_times(resumed) == without_times(whole)
    assert without_times(map(json.loads, runs.read_text().splitlines())) == without_times(map(json.loads, lines))


def test_bytes_are_those_of_payloads(text: Path, tmp_path: Path) -> None:
    rows = measured(text, tmp_path / "out")
    layout = Layout.of(build(convergence.model_spec(64, 1, 16), seed=0))
    assert rows["adamw-ddp"]["bytes_step"] == allreduce_bytes(layout.parameters)
    assert rows["adamw-ddp"]["ratio_to_allreduce"] == 1
    sizes = [votes.vote_bytes(layout.chunks, size) for size in (16, 128)]
    assert rows["mixed"]["bytes_step"] == sum(sizes) / 2
    assert rows["mixed"]["relative"] == pytest.approx(rows["mixed"]["loss"] / rows["adamw-ddp"]["loss"] - 1, abs=1e-4)


def test_every_method_learns_and_gives_the_same_bits_again(text: Path, tmp_path: Path) -> None:
    each = [name for name, method in methods.METHODS.items() if method.make is not methods.LocalRounds]
    more = ["--methods", *each, "--seeds", "0", "--lrs", "4e-3"]
    outcomes = []
    for folder in ("one", "two"):
        rows = measured(text, tmp_path / folder, *more)
        assert all(found["loss"] < 5.5 for found in rows.values())  # log(256) = 5.55 before the first step
        outcomes.append(list(map(json.loads, (tmp_path / folder / "runs.jsonl").read_text().splitlines())))
    assert without_times(outcomes[0]) == without_times(outcomes[1])


def test_local_rounds_exchange_once_in_many_steps(text: Path, tmp_path: Path) -> None:
    local = [name for name, method in methods.METHODS.items() if method.make is methods.LocalRounds]
    rows = measured(text, tmp_path / "out", "--methods", *local, "--seeds", "0", "--lrs", "4e-3", "--steps", "15")
    layout = Layout.of(build(convergence.model_spec(64, 1, 16), seed=0))
    assert rows["diloco"]["bytes_step"] == pytest.approx(allreduce_bytes(layout.parameters) / 15, abs=1)
    for name in local:
        assert rows[name]["loss"] < 5.5, name


def test_a_run_that_diverges_is_a_row_without_a_loss(text: Path, tmp_path: Path) -> None:
    rows = measured(text, tmp_path / "out", "--lrs", "1e30", "--methods", "adamw-ddp", "groups-g128")
    assert rows["groups-g128"]["loss"] is None
    assert rows["groups-g128"]["relative"] is None


def test_a_grid_grows_until_its_best_rate_is_inside() -> None:
    def grid(losses: dict[float, float | None]) -> dict[float, convergence.Outcome]:
        return {lr: convergence.Outcome(loss, 1.0, 1, 1.0, "") for lr, loss in losses.items()}

    assert convergence.beyond(grid({1.0: 2.0, 2.0: 1.0})) == 4.0
    assert convergence.beyond(grid({1.0: 1.0, 2.0: 2.0})) == 0.5
    assert convergence.beyond(grid({1.0: 2.0, 2.0: 1.0, 4.0: 1.5})) is None
    assert convergence.beyond(grid({1.0: None, 2.0: None})) == 0.5


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    losses = {"few": (1, 3.0), "some": (2, 2.5), "beaten": (3, 2.6), "lost": (4, None), "all": (9, 2.0)}
    rows = {name: {"bytes_step": sent, "loss": loss} for name, (sent, loss) in losses.items()}
    assert convergence.pareto(rows) == ["few", "some", "all"]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in ("seconds", "run_s")}
    if isinstance(value, (str, int, float, type(None))):
        return value
    return [without_times(inner) for inner in value]
