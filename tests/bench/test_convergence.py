"""`python -m tests.bench convergence` on a tiny model: resumption, bytes of real payloads, and equal bits."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.model.spec import build
from node.optim.layout import Layout
from node.optim.votes import groups as votes
from node.pictures import allreduce_bytes
from tests.bench import convergence, methods, trial
from tests.bench.convergence_picture import pareto
from tests.bench.labels import Box, place

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
    shape = ["--layers", "1", "--context", "16", "--batch", "2", "--validation", "8", "--held-out", "24"]
    line += [*shape, "--seeds", "0", "1", "--lrs", "1e-3", "4e-3", "--grow", "0", *more]
    rows: dict[str, dict[str, Any]] = convergence.measure(parser.parse_args(line))["text"]  # type: ignore[assignment]
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

    def counted(run: trial.Run, *rest: Any) -> trial.Outcome:
        trained.append(run.method)
        return train(run, *rest)

    monkeypatch.setattr(convergence, "train", counted)
    resumed = measured(text, tmp_path / "out")
    assert trained == ["mixed"]
    assert without_times(resumed) == without_times(whole)
    assert without_times(map(json.loads, runs.read_text().splitlines())) == without_times(map(json.loads, lines))


def test_a_table_of_what_is_on_file_runs_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(text, tmp_path / "out")

    def none(*_: object) -> trial.Outcome:
        raise AssertionError("a run was started")

    monkeypatch.setattr(convergence, "train", none)
    more = ["--methods", *METHODS, "muon-ddp", "--on-file"]
    assert without_times(measured(text, tmp_path / "out", *more)) == without_times(whole)


def test_bytes_are_those_of_payloads(text: Path, tmp_path: Path) -> None:
    rows = measured(text, tmp_path / "out")
    layout = Layout.of(build(trial.model_spec(64, 1, 16), seed=0))
    assert rows["adamw-ddp"]["bytes_step"] == allreduce_bytes(layout.parameters)
    assert rows["adamw-ddp"]["ratio_to_allreduce"] == 1
    sizes = [votes.vote_bytes(layout.chunks, size) for size in (16, 128)]
    assert rows["mixed"]["bytes_step"] == sum(sizes) / 2
    expected = pytest.approx(rows["mixed"]["loss"] / rows["adamw-ddp"]["loss"] - 1, abs=1e-4)
    assert rows["mixed"]["relative_to"] == {"adamw-ddp": expected, "muon-ddp": None}


@pytest.mark.nightly
def test_every_method_learns_and_gives_the_same_bits_again(text: Path, tmp_path: Path) -> None:
    """Rows with other numbers of peers have the settings of those with 4, so they are left out."""
    alone = {name for name, method in methods.METHODS.items() if method.peers is None}
    each = [name for name in methods.METHODS if name in alone and methods.METHODS[name].make is not methods.LocalRounds]
    more = ["--methods", *each, "--seeds", "0", "--lrs", "4e-3"]
    outcomes = []
    for folder in ("one", "two"):
        rows = measured(text, tmp_path / folder, *more)
        assert all(found["loss"] < 5.5 for found in rows.values())  # log(256) = 5.55 before the first step
        outcomes.append(list(map(json.loads, (tmp_path / folder / "runs.jsonl").read_text().splitlines())))
    assert without_times(outcomes[0]) == without_times(outcomes[1])


@pytest.mark.nightly
def test_local_rounds_exchange_once_in_many_steps(text: Path, tmp_path: Path) -> None:
    local: dict[int, list[str]] = {}
    for name, method in methods.METHODS.items():
        if method.make is methods.LocalRounds:
            local.setdefault(method.settings["local_steps"], []).append(name)
    assert set(local) == {10, 15, 16, 30}
    whole = allreduce_bytes(Layout.of(build(trial.model_spec(64, 1, 16), seed=0)).parameters)
    for steps, names in local.items():
        more = ["--methods", *names, "--seeds", "0", "--lrs", "4e-3", "--steps", str(steps)]
        rows = measured(text, tmp_path / str(steps), *more)
        assert all(rows[name]["loss"] < 5.5 for name in names), rows
        for name in names:
            if name.startswith("diloco-h") or name == "diloco":
                assert rows[name]["bytes_step"] == pytest.approx(whole / steps, abs=1)
            for times in methods.LESS:
                if name.endswith(f"-x{times}"):  # than fp32 of all parameters, which a ring all-reduce sends twice
                    assert whole / 2 / steps / rows[name]["bytes_step"] == pytest.approx(times, rel=0.08), name


def test_a_run_that_diverges_is_a_row_without_a_loss(text: Path, tmp_path: Path) -> None:
    rows = measured(text, tmp_path / "out", "--lrs", "1e30", "--methods", "adamw-ddp", "groups-g128")
    assert rows["groups-g128"]["loss"] is None
    assert rows["groups-g128"]["relative_to"] == {"adamw-ddp": None, "muon-ddp": None}


def test_a_grid_grows_until_its_best_rate_is_inside() -> None:
    def grid(losses: dict[float, float | None]) -> dict[float, trial.Outcome]:
        return {lr: trial.Outcome(loss, 1.0, 1, 1.0, "") for lr, loss in losses.items()}

    assert convergence.beyond(grid({1.0: 2.0, 2.0: 1.0})) == 4.0
    assert convergence.beyond(grid({1.0: 1.0, 2.0: 2.0})) == 0.5
    assert convergence.beyond(grid({1.0: 2.0, 2.0: 1.0, 4.0: 1.5})) is None
    assert convergence.beyond(grid({1.0: None, 2.0: None})) == 0.5


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    losses = {"few": (1, 3.0), "some": (2, 2.5), "beaten": (3, 2.6), "lost": (4, None), "all": (9, 2.0)}
    rows = {name: {"bytes_step": sent, "loss": loss} for name, (sent, loss) in losses.items()}
    assert pareto(rows) == ["few", "some", "all"]


def a_run(**change: Any) -> trial.Run:
    values = {
        "method": "adamw-ddp",
        "settings": {},
        "lr": 1.0,
        "seed": 0,
        "steps": 100,
        "schedule": "cosine",
        "warmup": 0.25,
    }
    shape = {"peers": 4, "batch": 2, "context": 16, "width": 64, "layers": 1, "validation": 8, "held_out": 24}
    return trial.Run(**{**values, **shape, "data": "text", "data_sha256": "", **change})


def test_the_three_parts_of_a_text_share_no_token_but_the_last_of_a_window() -> None:
    tokens = np.arange(4000, dtype=np.uint16)
    parts = trial.split(tokens, a_run())
    assert parts.held_out.shape == (24, 17)
    assert parts.validation.shape == (8, 17)
    assert int(parts.held_out[-1, -1]) == 3999, "the text's last token is held out"
    assert int(parts.validation[-1, -1]) == int(parts.held_out[0, 0])
    trained = parts.samples.batch(0, parts.samples.windows)
    assert int(trained.max()) <= int(parts.validation[0, 0])


def test_a_text_that_is_mostly_tail_is_refused() -> None:
    with pytest.raises(ValueError, match="more than a third of its 1500 tokens"):
        trial.split(np.zeros(1500, dtype=np.uint8), a_run())


def test_the_rate_is_chosen_on_one_part_and_reported_on_another() -> None:
    chosen = trial.Outcome(1.0, 1.0, 1, 1.0, "", held_out=3.0)
    other = trial.Outcome(2.0, 1.0, 1, 1.0, "", held_out=2.5)
    assert chosen.badness < other.badness
    assert convergence.row(1e-3, {1e-3: chosen, 2e-3: other}, [chosen])["loss"] == 3.0


def test_the_schedule_of_a_run() -> None:
    """Ten steps of warm-up, then a cosine to a tenth."""
    run = a_run(schedule=methods.RUN_SCHEDULE)
    rates = [trial.learning_rate(run, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)


def test_a_row_with_its_own_peers_has_the_baselines_with_as_many_samples() -> None:
    for name, method in methods.METHODS.items():
        for baseline in methods.BASELINES:
            base = methods.METHODS[baseline + method.against]
            pools = [(m.peers or 4) * (m.batch or 4) for m in (method, base)]
            assert pools[0] == pools[1], name
            assert method.schedule == base.schedule, name


def test_muon_makes_matrices_orthogonal_of_size_one() -> None:
    """Singular values between 0.6 and 1.3 of the even ones, as the five iterations leave them; both orientations alike."""
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    for given in (matrix, matrix.T):
        found = methods.orthogonal(given)
        assert found.shape == given.shape
        values = torch.linalg.svdvals(found) / 96**0.5
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3
        assert float(found.square().mean().sqrt()) == pytest.approx(1.0, abs=0.25)
    assert not methods.orthogonal(torch.zeros(8, 4)).any()


def test_muon_ddp_moves_tables_and_vectors_by_adamw_and_matrices_by_its_own_rule() -> None:
    """AdamW's first step is the rate, everywhere; the largest singular value of such a matrix of signs is near 2 * side**.5."""
    model, lr = build(trial.model_spec(64, 1, 16), seed=0), 1e-2
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    training = methods.MuonDDP(model, 1, momentum=0.95, betas=(0.8, 0.99), clip_norm=1.0)

    def backward(peer: int) -> None:
        random = torch.Generator().manual_seed(0)
        for tensor in model.parameters():
            tensor.grad = torch.randn(tensor.shape, generator=random).sign()

    training.step(backward, lr)
    for name, tensor in model.named_parameters():
        moved = (tensor - before[name]).detach()
        if tensor.dim() == 2 and "embed" not in name:
            assert float(torch.linalg.svdvals(moved).max()) < 1.3 * lr * max(moved.shape) ** 0.5, name
        else:
            assert torch.allclose(moved.abs(), torch.full_like(moved, lr), rtol=1e-2), name


def test_labels_cover_neither_each_other_nor_a_point() -> None:
    points = [(100.0 + 7 * (index % 5), 100.0 + 3 * index) for index in range(25)]
    boxes = place(points, [(60.0, 10.0)] * 25, Box(0, 0, 900, 500))
    assert None not in boxes
    found = [box for box in boxes if box is not None]
    for index, box in enumerate(found):
        assert not any(box.overlaps(other) for other in found[:index])
        assert not any(box.overlaps(Box(x - 1, y - 1, 2, 2)) for x, y in points)


def test_a_label_without_room_is_told() -> None:
    assert place([(5.0, 5.0)], [(60.0, 10.0)], Box(0, 0, 20, 20)) == [None]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in ("seconds", "run_s")}
    if isinstance(value, (str, int, float, type(None))):
        return value
    return [without_times(inner) for inner in value]
