"""What a running peer gives to others beside the training: models of the run at a distance, metrics, a tracker, traces. Changes
no training: each of them may fail or be slow without it, and is off unless its owner wants it.

Each state that is agreed, `every` so many steps, becomes an export in a folder of its own (`export --every`). It is written
when the replica has its state, and gets its name when the run agrees on that state. Refuses to keep more than `keep` exports
and WAITING_MAX that wait. Deletes nothing but exports of its own names.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.config import PeerSettings
from node.export.card import MARK, run_of
from node.swarm.facts import Agreed, Event
from node.swarm.runtime import Counters
from node.training.loop import EVENT_SECONDS_MAX, Trainer
from node.training.telemetry import Spans, serve_metrics
from node.training.trackers import Tracking, open_tracker
from protos.errors import OperatorError
from protos.identity import Identity
from protos.run_config import ClockConfig
from protos.tracing import Tracing

WAITING_MAX: Final = 4
AGREED_KEPT: Final = 16
STEP_DIGITS: Final = 9
_NAME: Final = re.compile(r"step-(\d{9,})")
_WAITING: Final = ".waiting-"


@dataclass(frozen=True)
class Series:
    """What the person wants. `published` gets each export when it has its name, and its step."""

    folder: Path
    every: int
    keep: int
    published: Callable[[Path, int], None] = lambda path, step: None


def check_series(folder: Path, run_id: str) -> None:
    """Raises OperatorError if something else has the name of an export of a series: the newest exports would be another run's,
    or an export could not get its name."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _NAME.fullmatch(path.name):
            continue
        if (theirs := run_of(path)) not in ("", run_id):
            raise OperatorError(f"{path} is the export of another run ({theirs[:16]}); choose another folder")
        if not (path / MARK).is_file() and not (path.is_dir() and not any(path.iterdir())):
            raise OperatorError(f"{path} is in the way of an export of that name; choose another folder")


class Exports:
    """One run's. `write` exports the replica's present state to a folder."""

    def __init__(self, series: Series, write: Callable[[Path], object], clock: ClockConfig, log: Any) -> None:
        """Raises OperatorError for a distance at which the run agrees on no states."""
        if series.every % clock.snapshot_every:
            raise OperatorError(
                f"--every {series.every}: this run agrees on its state every {clock.snapshot_every} steps; give a multiple of "
                "that"
            )
        self._series, self._write, self._log = series, write, log
        self._waiting: dict[int, bytes] = {}
        self._agreed: dict[int, bytes] = {}
        if series.folder.is_dir():  # what an earlier life left
            for path in series.folder.glob(f"{_WAITING}*"):
                shutil.rmtree(path, ignore_errors=True)

    def wants(self, step: int, last_step: int) -> bool:
        """Whether the state after this step is to be exported: it is due, or the run's last one, and not there already."""
        due = step > 0 and (step % self._series.every == 0 or step == last_step)
        return due and step not in self._waiting and not (self._named(step) / MARK).is_file()

    def awaits(self, step: int) -> bool:
        """Whether the export of this step waits until its state is agreed."""
        return step in self._waiting

    def reached(self, step: int, root: bytes) -> None:
        """The replica has the state after a step that `wants` names; `root`: of that state, as this peer computed it."""
        self._write(self._unnamed(step))
        self._waiting[step] = root
        while len(self._waiting) > WAITING_MAX:
            self._drop(next(iter(self._waiting)), "the run never agreed on its state")
        self._settle(step)

    def agreed(self, step: int, root: bytes) -> None:
        """The run agrees on the state after a step."""
        self._agreed[step] = root
        while len(self._agreed) > AGREED_KEPT:
            del self._agreed[next(iter(self._agreed))]
        self._settle(step)

    def _settle(self, step: int) -> None:
        if step not in self._waiting or step not in self._agreed:
            return
        if self._waiting[step] != self._agreed[step]:
            self._drop(step, "the run agreed on another state")
            return
        del self._waiting[step]
        path = self._named(step)
        self._unnamed(step).rename(path)
        self._prune()
        self._log.info("exported", step=step, folder=str(path))
        self._series.published(path, step)

    def _drop(self, step: int, why: str) -> None:
        del self._waiting[step]
        shutil.rmtree(self._unnamed(step), ignore_errors=True)
        self._log.warning("an export is left out", step=step, why=why)

    def _prune(self) -> None:
        """Delete all exports but the newest ones."""
        there = [
            path for path in self._series.folder.iterdir() if _NAME.fullmatch(path.name) and (path / MARK).is_file()
        ]
        for path in sorted(there, key=lambda path: int(path.name.partition("-")[2]))[: -self._series.keep]:
            shutil.rmtree(path, ignore_errors=True)

    def _named(self, step: int) -> Path:
        return self._series.folder / f"step-{step:0{STEP_DIGITS}d}"

    def _unnamed(self, step: int) -> Path:
        return self._series.folder / f"{_WAITING}{step:0{STEP_DIGITS}d}"


@dataclass
class Copier(Trainer):
    """A peer that takes a copy of a run's state and leaves (`swarmentum export`): a trainer without samples that is no
    anchor.

    It loads a snapshot and applies the log after it, as every late peer does, and ends with a state of step `copy_at` or
    later. The coordinator knows it as paused, so nobody waits.
    """

    copy_at: int = 0

    @property
    def is_anchor(self) -> bool:
        """Never: its reports count for nothing, and it needs no anchor's ticket."""
        return False

    def follow(self, store: bool = False) -> None:
        """See `Trainer.follow`. The coordinator hears of the pause before it hears of a state, so no step asks this peer."""
        self.wishes.pause("this command copies the state, and trains in no step")
        self._sync_pause()
        super().follow(store)

    def run(self) -> bool:
        """Apply the log until the state is there (True), or until `stopping` (False)."""
        while self.replica.step < self.copy_at and not self.stopping():
            event = self.swarm.next_event(EVENT_SECONDS_MAX)
            self.keeper.check()
            self._sync_pause()
            self.handle(event)
        return self.replica.step >= self.copy_at


@dataclass
class Following(Copier):
    """A copier that stays to the end of the run, and exports the agreed states."""

    exports: Exports | None = None

    def follow(self, store: bool = False) -> None:
        """See `Copier.follow`. The state that this peer begins with may be due.

        Before the first step, the first peers have to agree on the initial state. This peer is one of them, so it stores it.
        """
        super().follow(store or self.replica.step == 0)
        for snapshot in self.swarm.offered():
            self._agreed(snapshot.step, snapshot.root)
        self._reached()

    def run(self) -> bool:
        """Apply the log until the run is finished (True), or until `stopping` (False)."""
        while not self.stopping():
            event = self.swarm.next_event(EVENT_SECONDS_MAX)
            self.keeper.check()
            self._sync_pause()
            before = self.replica.step
            self.handle(event)
            if self.replica.step == before + 1:
                self._reached()
            if self.last.is_over(self.replica.step, awaits=self._exports.awaits(self.replica.step)):
                break
        return self.last.is_here(self.replica.step)

    def handle(self, event: Event | None) -> None:
        super().handle(event)
        if isinstance(event, Agreed):
            self._agreed(event.snapshot.step, event.snapshot.root)

    @property
    def _exports(self) -> Exports:
        assert self.exports is not None, "given when it is made"
        return self.exports

    def _reached(self) -> None:
        step = self.replica.step
        if self._exports.wants(step, self.last.step):
            self.keeper.flush()  # it may be computing the root
            self._exports.reached(step, self.keeper.root())

    def _agreed(self, step: int, root: bytes) -> None:
        self._exports.agreed(step, root)


TRACES: Final = "otlp"
"""The name of an OpenTelemetry receiver among the trackers."""


def metrics(settings: PeerSettings, trainer: Trainer, counters: Counters, ends: ExitStack, log: Any) -> None:
    """Serve /metrics until `ends`. Raises OperatorError if another program has the address."""
    if settings.metrics_listen is None:
        return
    server = serve_metrics(settings.metrics_listen, trainer.summary, counters, trainer.spans)
    host, port = server.server_address[:2]
    ends.callback(server.server_close)
    ends.callback(server.shutdown)
    log.info("metrics", url=f"http://{host}:{port}/metrics")


def track(settings: PeerSettings, trainer: Trainer, run_id: bytes, folder: Path, log: Any) -> None:
    """Feed trackers with the steps of this trainer. Raises OperatorError if its library is missing."""
    config, peer = json.loads(trainer.config.canonical_json()), trainer.summary.id
    for name in settings.track:
        if name != TRACES:
            tracker = open_tracker(name, trainer.config.name, run_id.hex(), peer, config, folder)
            trainer.steps.trackings.append(Tracking(tracker, log))


def trace(settings: PeerSettings, run_id: bytes, identity: Identity, ends: ExitStack, log: Any) -> Spans:
    """The recorder of this peer's spans, until `ends`. Raises OperatorError if the extra is missing."""
    summed = settings.metrics_listen is not None
    if TRACES not in settings.track:
        return Spans(summed=summed)
    tracing = Tracing("swarmentum-peer", identity.peer_id, log)
    spans = Spans(tracing, run_id, identity.public_key, summed=summed)
    ends.callback(tracing.close)
    ends.callback(spans.close)
    return spans
