"""What the control door of a peer answers: the commands of its owner, on the values that the training thread shows.

Refuses commands that the peer's role does not have: an anchor does not train, so it cannot be paused.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from node.control.control_server import SECONDS_MAX, Answer, Ending
from node.control.vote_history import STEPS_KEPT
from node.donor.owner_settings import KEYS, unchangeable
from node.model.device import Meter
from node.terminal.stage import RecentLogLines
from node.training.loop import Trainer
from node.training.resource_limits import ResourceLimits
from protos.errors import SwarmentumError
from protos.process import asked_to_stop, leave
from protos.text import printable


class Stop:
    """The signals that end a peer, and its owner's wish to end it. Ends nothing itself, but for a second signal.

    SIGINT, SIGTERM and SIGHUP: the first asks the loop to end, a second SIGINT or SIGTERM ends the process at once.

    A closed shell sends its SIGHUP twice, so a second SIGHUP is no second request.
    """

    def __init__(self, before_leaving: Callable[[], None] = lambda: None) -> None:
        self._asked = False
        self._changed = threading.Condition()
        self._nothing_to_save = False
        self._before_leaving = before_leaving

    def __call__(self) -> bool:
        return self._asked

    def wait(self, seconds: float) -> bool:
        """Sleep, and wake when a stop is requested."""
        with self._changed:
            return self._changed.wait_for(self, seconds)

    def ask(self) -> None:
        """The owner wants the peer to end, without a signal. A handler, or the garbage collector, may call it within `wait`,
        where the lock of an Event would wait for itself."""
        self._asked = True
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals meanwhile, on the main thread only. The old handlers are put back."""
        with asked_to_stop(self._ask):
            yield

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """Meanwhile a signal ends the process at once, because downloads and building cannot be asked to stop."""
        self._nothing_to_save = True
        try:
            yield
        finally:
            self._nothing_to_save = False

    def _ask(self, number: int) -> None:
        if self._nothing_to_save or (self() and number != signal.SIGHUP):
            self._before_leaving()
            leave()
        self.ask()


# A fact that takes a while to ask for, such as one of another process: asked in the background, told from memory.
#
# The control door answers at once, so a coordinator that is away, or a p2pd that hangs, must not make an owner wait.

FIRST_SECONDS_MAX = 0.5
T = TypeVar("T")


class CachedAnswer(Generic[T]):
    """The last answer of `ask`; at most one thread asks at a time, and at most once in `seconds`."""

    def __init__(self, ask: Callable[[], T], seconds: float) -> None:
        self._ask, self._seconds = ask, seconds
        self._lock = threading.Lock()
        self._value: T | None = None
        self._next = 0.0
        self._thread: threading.Thread | None = None

    def get(self) -> T | None:
        """The last answer; None before the first one. Waits a moment for a first answer, and never for a later one."""
        with self._lock:
            due = time.monotonic() >= self._next and (self._thread is None or not self._thread.is_alive())
            if due:
                self._next = time.monotonic() + self._seconds
                self._thread = threading.Thread(target=self._learn, name="owner's fact", daemon=True)
                self._thread.start()
            thread = self._thread
        if self._value is None and due and thread is not None:
            thread.join(FIRST_SECONDS_MAX)
        return self._value

    def _learn(self) -> None:
        try:
            self._value = self._ask()
        except (
            SwarmentumError,
            RuntimeError,
        ):  # not reached, or the network's loop is at its end: the last answer stays
            return


ACCESS_SECONDS = 5.0
STANDING_SECONDS = 10.0
"""So often at most: the connections are asked of p2pd, and a new peer's checks of the coordinator."""


class Commands:
    """Of one peer in one run, since `started` (seconds of `time.monotonic`). `leave` ends the peer as Ctrl-C does.

    `recent`: the last lines of its log; `log_file` gives the file that the log goes to while a terminal view is up.
    """

    def __init__(
        self,
        trainer: Trainer,
        run_id: bytes,
        leave: Callable[[], None],
        *,
        started: float,
        recent: RecentLogLines | None = None,
        log_file: Callable[[], Path | None] = lambda: None,
        lent: ResourceLimits,
    ) -> None:
        self._trainer, self._run_id, self._leave, self._started = trainer, run_id, leave, started
        self._recent, self._log_file, self._lent = recent or RecentLogLines(), log_file, lent
        self._meter = Meter(trainer.replica.maker.device)
        self._access = CachedAnswer(trainer.swarm.access, ACCESS_SECONDS)
        self._checks = CachedAnswer(trainer.swarm.standing, STANDING_SECONDS)

    def all(self) -> dict[str, Answer]:
        """By the name that the command line has."""
        return {
            "me": self.me,
            "pause": self.pause,
            "resume": self.resume,
            "set": self.set,
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
        told = {name: value for name, value in asdict(summary).items() if name not in {"state_digest", "checkpoint"}}
        return {
            **told,
            **self._place(),
            "loss": summary.loss if math.isfinite(summary.loss) else None,  # JSON has no NaN: no step is applied yet
            "run": self._run_id.hex(),
            "name": trainer.config.name,
            "steps": trainer.last.step,
            "committed_step": swarm.committed_step,
            "anchor": trainer.samples is None,
            "paused": trainer.wishes.paused,
            "paused_by_owner": trainer.wishes.by_owner,
            "pause_seconds_left": _finite(trainer.wishes.pause_seconds_left),
            "held": trainer.wishes.held,
            "month": self._lent.told(),
            "owner": self._lent.owner.name,
            "ending": None if trainer.wishes.ending is None else trainer.wishes.ending.value,
            "share": trainer.standing.share(),
            "seconds": time.monotonic() - self._started,
            "last": trainer.standing.last(count),
            "losses": trainer.standing.losses(),
            "lines": self._recent.last(),
            "log_file": None if (file := self._log_file()) is None else str(file),
        }

    def _place(self) -> dict[str, Any]:
        """What this peer gave, how it is doing in the run, and how others reach it."""
        trainer, standing = self._trainer, self._trainer.standing
        pace, left = standing.step_seconds(), trainer.last.step - trainer.summary.step
        access = self._access.get() if trainer.entered else None
        given = standing.given
        return {
            "entered": trainer.entered,
            "waiting": printable(standing.waiting),
            "waits_for": trainer.swarm.waits_for,
            "doors": dict(trainer.swarm.counters.doors),
            "loading": trainer.recovery.loading.words,
            "checks": self._on_probation(),
            "step_seconds": pace,
            "seconds_left": None if pace is None or standing.waiting else pace * left,
            "samples_accepted": given.samples,
            "tokens_accepted": given.tokens,
            "share_of_all": given.share,
            "access": None if access is None else {**asdict(access), "reachable": access.reachable.value},
            "load": asdict(self._meter.read()),
        }

    def _on_probation(self) -> str:
        """The coordinator's words on the checks of a new peer; empty for a peer whose votes count."""
        last = self._trainer.standing.last(1)
        on_probation = bool(last) and last[0]["outcome"] == "probation"
        return (self._checks.get() or "probation") if on_probation else ""

    def pause(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Train in no step, for `seconds` or until the owner ends it; the peer goes on to apply the log."""
        seconds = request.get("seconds", math.inf)
        if not isinstance(seconds, int | float) or not (0 < seconds <= SECONDS_MAX or seconds == math.inf):
            raise ValueError(f"seconds {str(seconds)[:40]}: give a number up to {SECONDS_MAX:,}, or leave it out")
        if self._trainer.samples is None:
            raise ValueError("an anchor does not train, so there is nothing to pause; `swarmentum leave` ends it")
        self._trainer.wishes.pause(seconds=seconds)
        return self._work()

    def resume(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """Train again, as far as the conditions let the peer."""
        self._trainer.wishes.resume()
        return self._work()

    def _work(self) -> dict[str, Any]:
        wishes = self._trainer.wishes
        return {"paused": wishes.paused, "held": wishes.held, "step": self._trainer.replica.step}

    def set(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Change the setting `key` to `value` (text) and keep it; without a value, tell what it is; without a key, all."""
        key, value = request.get("key"), request.get("value")
        if key is None:
            return {"settings": self._lent.live.rows(), "note": ""}
        if not isinstance(key, str) or not isinstance(value, str | None):
            raise ValueError(f"{key!r} {value!r}: give the key and the value as text")
        if key not in KEYS:
            raise ValueError(unchangeable(key))
        if value is None:
            return {"settings": [self._lent.live.row(key)], "note": ""}
        row, note = self._lent.live.change(key, value)
        structlog.get_logger("control").info("set by its owner", key=key, value=row["shown"])
        return {"settings": [row], "note": note}

    def _end(self, how: Ending) -> dict[str, Any]:
        self._trainer.wishes.end(how)
        if how is Ending.LEAVE or self._trainer.samples is None:  # an anchor has no votes to wait for
            self._leave()
        return {"ending": how.value, "step": self._trainer.replica.step}


def _finite(seconds: float) -> float | None:
    """JSON has no infinity: None is a pause without an end."""
    return seconds if math.isfinite(seconds) else None
