"""The race's pure parts on made-up peers; and, at night, a short race of two rivals in real namespaces."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench import race
from tests.bench.race import gloo_rivals, hivemind_rivals
from tests.bench.race.curves import Counted, Line, Point, common_loss, curve, figures, ratios, reached, smoothed
from tests.bench.race.picture import STYLES, picture
from tests.bench.race.rivals import RIVALS, RivalError, WorkerRival, read_lines
from tests.bench.race.task import Peer, Task
from tests.bench.race.worker import LOOPS
from tests.system.netns import Internet, NotHereError


def points(*losses: float, seconds: float = 1.0) -> list[Point]:
    return [Point(n + 1, loss, 8, n * seconds, 100.0 * n) for n, loss in enumerate(losses)]


def task(folder: Path, **change: Any) -> Task:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} and {number * number % 97}; " for number in range(4000)))
    values = {"folder": str(folder), "peers": 2, "width": 64, "layers": 1, "batch": 2, "steps": 6, "seconds": 1e6}
    return Task(**{**values, "seed": 0, "data": str(text), "mbit": 0.0, "local_steps": 2, **change})


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_begins_at_the_end_of_the_first_step() -> None:
    peers = [[Line(1, 5.0, 8, 100.0), Line(2, 4.0, 8, 102.0)], [Line(1, 3.0, 8, 100.0), Line(2, 2.0, 24, 104.0)]]
    counted = [Counted(99.0, 0), Counted(100.0, 1000), Counted(103.0, 4000), Counted(110.0, 9000)]
    first, second = curve(peers, counted, 2)
    assert first == Point(1, 4.0, 16, 0.0, 0.0)
    assert second.loss == pytest.approx((4.0 * 8 + 2.0 * 24) / 32), "weighted by samples"
    assert second.samples == 32
    assert second.seconds == pytest.approx(3.0), "a step is over at the median of the peers"
    assert second.sent_bytes == pytest.approx(1500.0), "3,000 bytes of two peers"


def test_a_step_never_ends_before_the_one_before_it() -> None:
    """A peer of hivemind may miss an epoch, so that the median comes from others."""
    peers = [[Line(1, 1.0, 1, 10.0), Line(2, 1.0, 1, 30.0)], [Line(3, 1.0, 1, 29.0)]]
    assert [point.seconds for point in curve(peers, [Counted(0.0, 0)], 2)] == [0.0, 20.0, 20.0]


def test_without_steps_there_is_no_curve() -> None:
    assert curve([[], []], [Counted(0.0, 0)], 2) == []


def test_a_loss_is_reached_when_the_mean_of_ten_steps_is_there() -> None:
    found = points(*[4.0] * 10, 1.0, *[2.0] * 10)
    assert len(smoothed(found)) == len(found) - 9
    assert reached(found, 1.0) is None, "one lucky batch is not it"
    there = reached(found, 2.0)
    assert there is not None
    assert there.step == 20, "the mean of steps 11 to 20 is 1.9"
    assert reached(points(1.0, 1.0), 2.0) is None, "two steps have no mean of ten"


def test_the_loss_to_reach_is_what_the_worst_finisher_reached() -> None:
    curves = {"good": points(*[1.0] * 20), "bad": points(*[3.0] * 20), "cut": points(*[5.0] * 12), "none": points(9.0)}
    assert common_loss(curves, 20) == 3.0
    assert common_loss({name: curves[name] for name in ("cut", "none")}, 20) == 5.0, "nobody finished"
    assert common_loss({"none": points(9.0)}, 20) is None


def test_the_figures_of_a_rival() -> None:
    found = figures(points(*[4.0] * 10, *[2.0] * 11, seconds=0.5), 2.0)
    assert found["steps"] == 21
    assert found["steps_a_minute"] == 120.0
    assert found["sent_bytes_a_peer_step"] == 100
    assert found["seconds_to_loss"] == 9.5
    assert found["bytes_to_loss"] == 1900
    assert figures(points(4.0), None)["steps_a_minute"] is None


def test_ratios_are_to_a_row_of_the_same_race() -> None:
    rows: dict[str, dict[str, Any]] = {
        "ddp": {"seconds_to_loss": 10.0, "loss_by_step": []},
        "swarm": {"seconds_to_loss": 4.0, "loss_by_step": []},
        "late": {"seconds_to_loss": None, "loss_by_step": []},
        "failed": {"failed": "why"},
    }
    found = ratios(rows, "ddp")
    assert found["swarm"]["seconds_to_loss"] == 0.4
    assert found["late"]["seconds_to_loss"] is None
    assert "failed" not in found
    assert ratios(rows, "failed")["swarm"]["seconds_to_loss"] is None


# ---- rivals ----------------------------------------------------------------------------------------------------------


def test_every_rival_has_a_style_and_the_workers_a_loop() -> None:
    assert STYLES.keys() == RIVALS.keys()
    assert len(set(STYLES.values())) == len(STYLES)
    assert {name for name in RIVALS if not name.startswith("swarm")} == LOOPS.keys()


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    assert read_lines(path) == []
    path.write_text('{"step": 1, "loss": 2.0, "samples": 8, "at": 3.0}\n{"step": 2, "lo')
    assert read_lines(path) == [Line(1, 2.0, 8, 3.0)]


def test_peers_take_different_samples_of_the_same_pool(tmp_path: Path) -> None:
    """What the rivals are given is what a run's pool of the same step has: nothing twice, nothing left out."""
    taken: list[tuple[int, int]] = []
    for rank in range(2):
        peer = Peer(task(tmp_path), rank)
        assert peer.folder == tmp_path
        batch = peer._samples.batch
        peer._samples.batch = lambda first, last, batch=batch: taken.append((first, last)) or batch(first, last)  # type: ignore[method-assign, misc, func-returns-value]
        for _ in range(3):
            peer.backward()
        peer.finish()
    assert sorted(taken) == [(2 * n, 2 * n + 2) for n in range(6)]


def test_peers_in_lockstep_stop_before_the_same_round(tmp_path: Path) -> None:
    zero, one = (Peer(task(tmp_path, seconds=-1.0), rank) for rank in range(2))
    assert not zero.agreed_stop(1)
    assert not one.agreed_stop(1)
    zero.wrote(1, 5.0, 2)
    one.wrote(1, 5.0, 2)
    assert not one.agreed_stop(2), "only rank 0 decides"
    assert not zero.agreed_stop(2), "the others may be in round 2 already"
    assert zero.agreed_stop(3)
    assert one.agreed_stop(3)
    for peer in (zero, one):
        peer.finish()


def test_the_schedule_is_that_of_a_run(tmp_path: Path) -> None:
    ours = task(tmp_path, steps=60)
    assert ours.lr(2e-3, 1) == pytest.approx(2e-4)
    assert ours.lr(2e-3, 10) == pytest.approx(2e-3)
    assert ours.lr(2e-3, 60) == pytest.approx(2e-4)
    assert ours.lr(2e-3, 61) == ours.lr(2e-3, 60), "hivemind may go on beyond"


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    ours = task(tmp_path)
    assert Task.read(ours.write()) == ours


def test_diloco_alone_is_nesterov_on_where_adamw_led(monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer, by hand: the first outer step of Nesterov SGD at 0.7 and 0.9 goes 1.33 times as far as AdamW went."""
    monkeypatch.setattr(gloo_rivals.dist, "all_reduce", lambda tensor: None)
    here, start = [torch.full((3,), 2.0)], [torch.full((3,), 3.0)]
    nesterov = torch.optim.SGD(start, lr=gloo_rivals.OUTER_LR, momentum=gloo_rivals.OUTER_MOMENTUM, nesterov=True)
    gloo_rivals.exchange(here, start, nesterov, 1)
    assert here[0].tolist() == pytest.approx([3.0 - 0.7 * 1.9] * 3)
    assert torch.equal(here[0], start[0])


class FakeTracker:
    """hivemind's, to the extent that a peer waits for: the others are seen when it was looked at three times."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.looks = 0
        self.ready_to_update_epoch = True

    def report_local_progress(self, epoch: int, samples: int) -> None:
        self.told.append((epoch, samples))

    @property
    def global_progress(self) -> SimpleNamespace:
        self.looks += 1
        return SimpleNamespace(num_peers=1 if self.looks < 3 else 2)


def test_a_peer_of_hivemind_says_that_it_is_done_and_waits_until_all_are_seen(tmp_path: Path) -> None:
    tracker, peer = FakeTracker(), Peer(task(tmp_path), 0)
    hivemind_rivals._wait_for_others(peer, SimpleNamespace(tracker=tracker, local_epoch=7))
    peer.finish()
    assert tracker.told == [(7, 2)]
    assert tracker.looks == 3


def test_a_peer_that_waits_for_another_says_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hivemind_rivals, "MEETING_SECONDS_MAX", -1.0)
    with pytest.raises(TimeoutError, match="ready-1: another peer did not write it"):
        hivemind_rivals._wait_for([tmp_path / "ready-1"])


def test_hivemind_clips_what_it_averaged() -> None:
    """The same first steps as of gradients that were short enough; a gradient that is no number is refused."""
    given = torch.nn.Parameter(torch.zeros(4))
    optimizer = hivemind_rivals.ClippedAdamW([given], lr=1e-3)
    given.grad = torch.full((4,), 100.0)
    optimizer.step()
    assert float(given.grad.norm()) == pytest.approx(1.0, rel=1e-4)
    given.grad = torch.full((4,), float("nan"))
    with pytest.raises(ArithmeticError, match="diverged"):
        optimizer.step()


def test_the_picture_leaves_out_who_has_too_few_steps(tmp_path: Path) -> None:
    curves = {"ddp": points(*[4.0] * 15), "swarm": points(5.0), "diloco": []}
    picture(curves, {name: rival.title for name, rival in RIVALS.items()}, tmp_path / "race.png", "title")
    picture({}, {}, tmp_path / "empty.png", "nobody ran")
    assert (tmp_path / "race.png").stat().st_size > (tmp_path / "empty.png").stat().st_size > 0


def test_without_namespaces_every_rival_is_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(*_: object, **__: object) -> Internet:
        raise NotHereError("needs root")

    monkeypatch.setattr(race.course, "Internet", nowhere)
    found = measured(tmp_path, "--rivals", "ddp", "swarm")
    assert {row["failed"] for row in found["rivals"].values()} == {"no network namespaces here: needs root"}
    assert found["loss"] is None
    assert found["to_ddp"] == {}


def test_a_rival_that_ended_well_is_not_run_again(tmp_path: Path) -> None:
    file, ours = tmp_path / "race.jsonl", task(tmp_path)
    assert race.filed(file, "ddp", ours) is None
    for _ in range(2):
        race.keep(file, "ddp", ours, {"failed": None}, points(4.0, 3.0))
    assert len(file.read_text().splitlines()) == 1
    assert race.filed(file, "ddp", replace(ours, folder="elsewhere")) == ({"failed": None}, points(4.0, 3.0))
    assert race.filed(file, "diloco", ours) is None
    assert race.filed(file, "ddp", replace(ours, mbit=20.0)) is None


def measured(tmp_path: Path, *more: str) -> dict[str, Any]:
    threads = torch.get_num_threads()
    parser = argparse.ArgumentParser()
    race.arguments(parser)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number * number % 97}; " for number in range(4000)))
    try:
        return race.measure(parser.parse_args([*more, "--data", str(text), "--out", str(tmp_path / "out")]))
    finally:
        torch.set_num_threads(threads)


# ---- real ------------------------------------------------------------------------------------------------------------


def an_internet() -> Internet:
    try:
        return Internet({"pub": "11.1.0.2", "peer0": "11.10.0.2"}, homes={})
    except NotHereError as why:
        pytest.skip(f"no network namespaces here: {why}")


@pytest.fixture
def internet() -> Any:
    made = an_internet()
    yield made
    made.close()


@pytest.mark.netns
def test_a_link_is_limited_each_way_until_the_limit_is_taken_away(internet: Internet) -> None:
    assert internet.limits("peer0") == (0, 0)
    internet.shape("peer0", 20_000, 10_000)
    assert internet.limits("peer0") == (20_000_000, 10_000_000)
    internet.shape("peer0", 0)
    internet.shape("peer0", 0)
    assert internet.limits("peer0") == (0, 0)
    assert internet.limits("pub") == (0, 0)


@pytest.mark.netns
def test_what_a_place_sent_is_counted_at_its_router(internet: Internet) -> None:
    before = internet.sent()
    assert before.keys() == {"pub", "peer0"}
    assert internet.connect("peer0", "11.1.0.2", 9) == "[Errno 111] Connection refused"
    assert internet.sent()["peer0"] > before["peer0"]


@pytest.mark.netns
@pytest.mark.nightly
def test_a_rival_that_ends_with_an_error_says_so(internet: Internet, tmp_path: Path) -> None:
    rival = WorkerRival("no-such-loop", task(tmp_path, peers=1), internet)
    try:
        rival._processes[0].child.wait(300)
        with pytest.raises(RivalError, match=r"(?s)peer0 ended with exit code 1.*no-such-loop"):
            rival.through()
    finally:
        rival.close()


@pytest.mark.netns
@pytest.mark.system
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_short_race(tmp_path: Path) -> None:
    """Both kinds of rival: the same first loss from the same weights, the swarm's bytes fewer."""
    an_internet().close()  # a process has one at a time, and each rival makes its own
    found = measured(tmp_path, "--rivals", "swarm", "ddp", "--steps", "12", "--batch", "2", "--peers", "2")
    rows = found["rivals"]
    assert {name: row["failed"] for name, row in rows.items()} == {"swarm": None, "ddp": None}
    assert rows["swarm"]["steps"] == rows["ddp"]["steps"] == 12
    assert rows["swarm"]["loss_by_step"][0] == pytest.approx(rows["ddp"]["loss_by_step"][0], abs=1e-3)
    assert rows["swarm"]["samples_by_step"] == rows["ddp"]["samples_by_step"] == [4] * 12
    assert rows["swarm"]["sent_bytes_a_peer_step"] < rows["ddp"]["sent_bytes_a_peer_step"] / 10
    assert all(0 < row["held_out_loss"] < 5.6 for row in rows.values())
    assert json.loads(next((tmp_path / "out").glob("race-*.json")).read_text())["loss"] == found["loss"]
