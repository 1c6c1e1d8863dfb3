"""`join --track`: real trackers, offline; one that fails costs nothing but the tracking."""

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from node.training.trackers import Tracking, open_tracker
from protos.errors import OperatorError
from tests.system.local_swarm import wait_for


class Log:
    def __init__(self) -> None:
        self.lines = list[tuple[str, dict[str, Any]]]()

    def warning(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))


def track(name: Any, folder: Path) -> None:
    log = Log()
    tracking = Tracking(open_tracker(name, "tiny", "ab" * 32, "12D3KooWabcdefgh", {"clock": {"steps": 3}}, folder), log)
    for step in (1, 2, 3):
        tracking.step(step, loss=5.0 / step, peers=2.0)
    tracking.close()
    assert log.lines == []


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    track("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(it.step, round(it.value, 3)) for it in found.Scalars("loss")] == [(1, 5.0), (2, 2.5), (3, 1.667)]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    track("wandb", tmp_path)
    [file] = (tmp_path / "wandb").rglob("run-*.wandb")
    wait_for("figures in the file, which a process of wandb's own writes", lambda: file.stat().st_size > 500)


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "here"))  # it reads this when it is imported
    pytest.importorskip("trackio", reason="pip install trackio")
    track("trackio", tmp_path)
    assert capsys.readouterr().out == "", "stdout is for JSON"
    assert [path for path in (tmp_path / "here").rglob("*") if path.is_file()], "nothing was written"


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(OperatorError, match="pip install wandb"):
        open_tracker("wandb", "tiny", "ab" * 32, "12D3KooWabcdefgh", {}, tmp_path)


class Failing:
    """A service that is away from the second step on, or that never answers."""

    def __init__(self, hangs: threading.Event | None = None) -> None:
        self.steps, self.hangs = list[int](), hangs

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.hangs is not None:
            self.hangs.wait(60)
        if step > 1:
            raise OSError("no route to host")
        self.steps.append(step)

    def close(self) -> None:
        raise AssertionError("it has failed before")


def test_a_tracker_that_fails_costs_only_the_tracking() -> None:
    log, tracker = Log(), Failing()
    tracking = Tracking(tracker, log)
    for step in range(1, 20_000):
        tracking.step(step, loss=math.nan)
    tracking.close()
    assert tracker.steps == [1]
    assert log.lines[0] == ("the tracking ends: the tracker failed", {"why": "OSError: no route to host"})


def test_a_tracker_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.training.trackers.END_SECONDS_MAX", 0.2)
    monkeypatch.setattr("node.training.trackers.WAITING_MAX", 5)
    go = threading.Event()
    log = Log()
    tracking = Tracking(Failing(go), log)
    for step in range(1, 101):
        tracking.step(step, loss=1.0)
    tracking.close()
    [(event, facts)] = log.lines
    assert event == "the tracker lacks steps: it was too slow"
    assert facts["lost"] >= 94
    go.set()
    tracking._thread.join(240)
