"""What became of this peer's votes in the last steps, and why: facts that the training thread saw. Guesses nothing.

The training thread writes; the control door reads from another thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from node.swarm.facts import NotCounted, Waiting
from protos.assignment import Range

STEPS_KEPT = 100
OPEN_KEPT = 4
PACE_STEPS = 20
"""The pace of a run is that of so many steps: it follows a peer that comes or goes within a minute or two."""


@dataclass(frozen=True)
class StepOutcome:
    """One step of this peer. `outcome` is one word; `why` says more, empty for an accepted vote."""

    step: int
    outcome: str
    why: str = ""
    samples: int = 0
    all_samples: int = 0
    """Of all peers whose votes the step counted."""
    tokens: int = 0
    peers: int = 0
    """Whose votes the step counted."""
    loss: float | None = None
    """Of the step, in nats a token, as all peers saw it; None for a step without samples."""


OUTCOMES = {
    "accepted": "the log counts the votes",
    "refused": "the votes were announced, and the log does not count them",
    "late": "the step was decided before the votes were announced",
    "skipped": "this peer had no votes that it could send",
    "probation": "the peer is new: others check its votes, and they do not count yet",
    "paused": "the peer was paused, by its owner or by a condition",
    "not asked": "the step's roster does not name this peer",
    "replayed": "this peer took the step from the log: it was not there when the step was open",
}


@dataclass
class Given:
    """What this peer gave since it started. `all_samples`: of everybody, in the steps that this peer was there for."""

    samples: int = 0
    tokens: int = 0
    all_samples: int = 0

    @property
    def share(self) -> float:
        """This peer's part of the samples, between 0 and 1."""
        return self.samples / self.all_samples if self.all_samples else 0.0


class VoteHistory:
    """The last STEPS_KEPT steps, and what this peer gave in all. `now`: seconds of a clock that only goes forward."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._open: dict[int, StepOutcome] = {}
        self._decided: OrderedDict[int, StepOutcome] = OrderedDict()
        self._whys: OrderedDict[int, str] = OrderedDict()
        self._times: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self.given = Given()
        self.paused = False
        """Whether this peer is paused: then a step that it takes from the log is no step that it missed."""
        self.waiting = ""
        """Why no step is open; empty while one is, or before the coordinator has said anything."""

    def told(self, event: Waiting | NotCounted) -> None:
        """The coordinator opens no step; or it says why votes of this peer do not count, before or after their step's entry."""
        with self._lock:
            if isinstance(event, Waiting):
                self.waiting = event.reason
                self._times.clear()
                return
            self._whys[event.step] = event.reason
            while len(self._whys) > OPEN_KEPT:
                self._whys.popitem(last=False)
            fate = self._decided.get(event.step)
            if fate is not None and fate.outcome == "refused":
                self._decided[event.step] = replace(fate, why=event.reason)

    def opened(self, step: int, applied: int, *, asked: bool) -> None:
        """The coordinator opened a step, perhaps again; `asked`: its roster names this peer, which has `applied` so many."""
        self.waiting = ""
        before = self._open.get(step)
        if before is not None and before.outcome == "announced":
            return
        # A step's tick may come before the entry of the step before it is applied (ADR 8).
        self._open = {at: fate for at, fate in self._open.items() if at > step - OPEN_KEPT}
        outcome = "paused" if self.paused else "late" if asked else "not asked"
        why = self._left_out(step - 1 - applied) if outcome == "not asked" else OUTCOMES[outcome]
        self._open[step] = StepOutcome(step, outcome, why)

    def _left_out(self, behind: int) -> str:
        """Why a roster does not name this peer, as far as this peer knows it."""
        why = OUTCOMES["not asked"]
        if behind > 0:
            return (
                f"{why}: this peer had {behind} {'step' if behind == 1 else 'steps'} to apply when the step was opened"
            )
        with self._lock:
            tried = any(fate.outcome == "probation" for fate in self._decided.values())
        return f"{why}: newcomers take turns until their checks are passed" if tried else why

    def late(self, step: int, done: int, ranges: Sequence[Range], seconds: float) -> None:
        """The step was decided when this peer had computed `done` samples of its ranges, in so many seconds."""
        wanted = sum(map(len, ranges))
        why = f"{OUTCOMES['late']}, with {done} of {wanted} samples computed in {seconds:.1f} s"
        if 0 < done < wanted:
            why = f"late by about {seconds * (wanted - done) / done:.1f} s: {why}"
        self._open[step] = StepOutcome(step, "late", why)

    def announced(self, step: int, samples: int, tokens: int = 0) -> None:
        """This peer announced votes for the step."""
        self._open[step] = StepOutcome(step, "announced", samples=samples, tokens=tokens)

    def skipped(self, step: int, why: str, outcome: str = "skipped") -> None:
        """This peer announces no votes for the step."""
        self._open[step] = StepOutcome(step, outcome, why)

    def decided(
        self, step: int, *, accepted: bool, samples: int, peers: int, loss: float = 0.0, tried: bool = False
    ) -> None:
        """The log decided a step. `samples`: of all `peers` whose votes it counts. `tried`: its trials have this peer's."""
        absent = "paused" if self.paused else "replayed"
        fate = self._open.pop(step, StepOutcome(step, absent, OUTCOMES[absent]))
        if accepted:
            fate = replace(fate, outcome="accepted", why="")
        elif tried:
            fate = replace(fate, outcome="probation", why=OUTCOMES["probation"])
        elif fate.outcome == "announced":
            why = f"decided without them; the step counts the votes of {peers} peers"
            fate = replace(fate, outcome="refused", why=self._whys.get(step, why))
        if fate.outcome != "accepted":
            fate = replace(fate, samples=0, tokens=0)
        with self._lock:
            finite = loss if math.isfinite(loss) else None
            self._decided[step] = replace(fate, all_samples=samples, peers=peers, loss=finite)
            while len(self._decided) > STEPS_KEPT:
                self._decided.popitem(last=False)
            if fate.outcome != "replayed":
                self._times.append(self._now())
                given = self.given
                self.given = Given(
                    given.samples + fate.samples, given.tokens + fate.tokens, given.all_samples + samples
                )

    def last(self, count: int = STEPS_KEPT) -> list[dict[str, Any]]:
        """The last steps, the newest first."""
        with self._lock:
            fates = list(self._decided.values())[-count:]
        return [asdict(fate) for fate in reversed(fates)]

    def losses(self) -> list[float]:
        """Of the last steps, the newest last."""
        with self._lock:
            return [fate.loss for fate in self._decided.values() if fate.loss is not None]

    def step_seconds(self) -> float | None:
        """Seconds between the ends of the last steps; None before there are two."""
        with self._lock:
            times = list(self._times)
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def share(self) -> float:
        """This peer's part of the samples of the last steps, between 0 and 1."""
        with self._lock:
            fates = list(self._decided.values())
        everyone = sum(fate.all_samples for fate in fates)
        return sum(fate.samples for fate in fates if fate.outcome == "accepted") / everyone if everyone else 0.0
