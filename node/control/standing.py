"""What became of this peer's votes in the last steps, and why: facts that the training thread saw. Guesses nothing.

The training thread writes; the control door reads from another thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from typing import Any

STEPS_KEPT = 100
OPEN_KEPT = 4


@dataclass(frozen=True)
class Fate:
    """One step of this peer. `outcome` is one word; `why` says more, empty for an accepted vote."""

    step: int
    outcome: str
    why: str = ""
    samples: int = 0
    all_samples: int = 0
    """Of all peers whose votes the step counted."""


OUTCOMES = {
    "accepted": "the log counts the votes",
    "refused": "the votes were announced, and the log does not count them",
    "late": "the step was decided before the votes were announced",
    "skipped": "this peer had no votes that it could send",
    "paused": "the owner had paused the peer",
    "not asked": "the step's roster does not name this peer",
    "replayed": "this peer took the step from the log: it was not there when the step was open",
}


class Standing:
    """The last STEPS_KEPT steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Fate] = {}
        self._decided: OrderedDict[int, Fate] = OrderedDict()

    def opened(self, step: int, *, asked: bool, paused: bool = False) -> None:
        """The coordinator opened a step, perhaps again; `asked`: its roster names this peer."""
        before = self._open.get(step)
        if before is not None and before.outcome == "announced":
            return
        # A step's tick may come before the entry of the step before it is applied (ADR 31).
        self._open = {at: fate for at, fate in self._open.items() if at > step - OPEN_KEPT}
        outcome = "paused" if paused else "late" if asked else "not asked"
        self._open[step] = Fate(step, outcome, OUTCOMES[outcome])

    def announced(self, step: int, samples: int) -> None:
        """This peer announced votes for the step."""
        self._open[step] = Fate(step, "announced", samples=samples)

    def skipped(self, step: int, why: str, outcome: str = "skipped") -> None:
        """This peer announces no votes for the step."""
        self._open[step] = Fate(step, outcome, why)

    def decided(self, step: int, *, accepted: bool, samples: int, peers: int) -> None:
        """The log decided a step. `samples`: of all `peers` whose votes it counts."""
        fate = self._open.pop(step, Fate(step, "replayed", OUTCOMES["replayed"]))
        if accepted:
            fate = replace(fate, outcome="accepted", why="")
        elif fate.outcome == "announced":
            why = f"too few holders had this peer's payload when the step closed; it counts the votes of {peers} peers"
            fate = replace(fate, outcome="refused", why=why, samples=0)
        with self._lock:
            self._decided[step] = replace(fate, all_samples=samples)
            while len(self._decided) > STEPS_KEPT:
                self._decided.popitem(last=False)

    def last(self, count: int = STEPS_KEPT) -> list[dict[str, Any]]:
        """The last steps, the newest first."""
        with self._lock:
            fates = list(self._decided.values())[-count:]
        return [asdict(fate) for fate in reversed(fates)]

    def share(self) -> float:
        """This peer's part of the samples of the last steps, between 0 and 1."""
        with self._lock:
            fates = list(self._decided.values())
        everyone = sum(fate.all_samples for fate in fates)
        return sum(fate.samples for fate in fates if fate.outcome == "accepted") / everyone if everyone else 0.0
