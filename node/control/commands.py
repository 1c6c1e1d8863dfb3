"""What the control door of a peer answers: the commands of its owner, on the values that the training thread shows.

Refuses commands that the peer's role does not have: an anchor does not train, so it cannot be paused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from node.control.door import Answer
from node.control.standing import STEPS_KEPT
from node.control.wishes import Ending
from node.training.loop import Trainer


class Commands:
    """Of one peer in one run, since `started` (seconds of `time.monotonic`). `leave` ends the peer as Ctrl-C does."""

    def __init__(self, trainer: Trainer, run_id: bytes, leave: Callable[[], None], *, started: float) -> None:
        self._trainer, self._run_id, self._leave, self._started = trainer, run_id, leave, started

    def all(self) -> dict[str, Answer]:
        """By the name that the command line has."""
        return {
            "me": self.me,
            "pause": self.pause,
            "resume": self.resume,
            "finish": lambda _: self._end(Ending.FINISH),
            "leave": lambda _: self._end(Ending.LEAVE),
        }

    def me(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Everything about this peer's part in the run; `steps`: how many of the last steps to tell of."""
        count = request.get("steps", STEPS_KEPT)
        if not isinstance(count, int) or not 1 <= count <= STEPS_KEPT:
            raise ValueError(f"steps {count!r}: give a number from 1 to {STEPS_KEPT}")
        trainer, summary, swarm = self._trainer, self._trainer.summary, self._trainer.swarm
        summary.copy_counters(swarm.counters)
        told = {name: value for name, value in asdict(summary).items() if name not in {"digest", "checkpoint"}}
        return {
            **told,
            "loss": summary.loss if math.isfinite(summary.loss) else None,  # JSON has no NaN: no step is applied yet
            "run": trainer.config.name,
            "run_id": self._run_id.hex(),
            "steps": trainer.config.clock.steps,
            "committed_step": swarm.committed_step,
            "anchor": trainer.samples is None,
            "paused": trainer.wishes.paused,
            "ending": None if trainer.wishes.ending is None else trainer.wishes.ending.value,
            "share": trainer.standing.share(),
            "seconds": time.monotonic() - self._started,
            "last": trainer.standing.last(count),
        }

    def pause(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """Train in no step; the peer goes on to apply the log."""
        if self._trainer.samples is None:
            raise ValueError("an anchor does not train, so there is nothing to pause; `swarmentum leave` ends it")
        self._trainer.wishes.pause()
        return {"paused": True, "step": self._trainer.replica.step}

    def resume(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """Train again."""
        self._trainer.wishes.resume()
        return {"paused": False, "step": self._trainer.replica.step}

    def _end(self, how: Ending) -> dict[str, Any]:
        self._trainer.wishes.end(how)
        if how is Ending.LEAVE or self._trainer.samples is None:  # an anchor has no votes to wait for
            self._leave()
        return {"ending": how.value, "step": self._trainer.replica.step}
