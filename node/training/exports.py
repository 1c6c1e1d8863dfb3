"""Exports of a run at a distance: each state that is agreed, `every` so many steps, in a folder of its own (`export --every`).

An export is written when the replica has its state, and gets its name when the run agrees on that state. Refuses to keep more
than `keep` exports and WAITING_MAX that wait. Deletes nothing but exports of its own names.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.export.card import MARK
from protos.errors import OperatorError
from protos.run_config import ClockConfig

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
        self._log.warning(f"an export is left out: {why}", step=step)

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
