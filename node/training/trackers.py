"""A run's curve in an experiment tracker: TensorBoard, Weights & Biases, or Trackio (setting `track`). Changes no training.

A tracker may call a service, so a thread of its own feeds it from a bounded queue. Whatever a tracker does, training goes on:
the log says once what failed, and the tracking ends.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from protos.errors import OperatorError

Name = Literal["tensorboard", "wandb", "trackio"]
PROJECT: Final = "swarmentum"
WAITING_MAX: Final = 10_000
END_SECONDS_MAX: Final = 30.0


class Tracker(Protocol):
    """Where the figures go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of one step."""

    def close(self) -> None:
        """Everything is written."""


Maker = Callable[[str, str, dict[str, Any], Path], Tracker]
"""From a title, a name that is one for each run and peer, the run's configuration, and a folder."""


def open_tracker(name: Name, run_name: str, run_id: str, peer: str, config: Mapping[str, Any], folder: Path) -> Tracker:
    """A tracker of this run and peer. Local files are below `folder`. Raises OperatorError if the library is not installed."""
    makers: dict[Name, Maker] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases, "trackio": _Trackio}
    try:
        return makers[name](f"{run_name}-{peer[-8:]}", f"{run_id[:16]}-{peer[-8:]}", dict(config), folder / name)
    except ImportError as error:
        raise OperatorError(f"track = {name!r}: {error}; pip install {name}") from error


class _TensorBoard:
    def __init__(self, title: str, _name: str, config: dict[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))
        self._writer.add_text("run", f"{title}\n\n```\n{config}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, title: str, name: str, config: dict[str, Any], folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=PROJECT, name=title, id=name, resume="allow", config=config, dir=str(folder)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, _title: str, name: str, config: dict[str, Any], _folder: Path) -> None:
        import trackio

        with redirect_stdout(sys.stderr):  # stdout is for JSON
            self._run: Any = trackio.init(project=PROJECT, name=name, resume="allow", config=config, embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


class Tracking:
    """Feeds a tracker from a thread. Figures that the tracker is too slow for are left out; `log` says how many at the end."""

    def __init__(self, tracker: Tracker, log: Any) -> None:
        self._tracker, self._log, self._lost = tracker, log, 0
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def step(self, step: int, **values: float) -> None:
        """The figures of one step."""
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what waits, for END_SECONDS_MAX at most."""
        try:
            self._waiting.put(None, timeout=END_SECONDS_MAX / 2)
            self._thread.join(END_SECONDS_MAX / 2)
        except queue.Full:
            pass
        if self._thread.is_alive() or self._lost:
            self._log.warning("the tracker lacks steps: it was too slow", lost=self._lost + self._waiting.qsize())

    def _work(self) -> None:
        try:
            while (figures := self._waiting.get()) is not None:
                self._tracker.log(*figures)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - whatever a service or its library does, training goes on
            self._log.warning("the tracking ends: the tracker failed", why=f"{type(error).__name__}: {error}")
            while self._waiting.get() is not None:  # nothing fills up
                pass
