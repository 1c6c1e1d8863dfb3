"""The thread that looks whether the owner's conditions let the peer work, and pauses it or lets it go on. ADR 35.

It decides nothing (`conditions.py` does). The owner's own pause is another value of `OwnerRequests`, and stays as it is.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import Any

import psutil

from node.donor.conditions import MachineFacts, State, decide, states
from node.donor.live import Live
from node.donor.owner_settings import LiveSettings
from protos.errors import OperatorError

LOOK_SECONDS = 5.0
STOP_SECONDS_MAX = 5.0
FAILURES = (OSError, RuntimeError, OperatorError, subprocess.SubprocessError, psutil.Error)


class ConditionWatch:
    """Of one peer. `facts` looks at the machine; `hold` takes the condition that pauses the peer, or None, and the facts."""

    def __init__(
        self,
        live: Live,
        facts: Callable[[LiveSettings], MachineFacts],
        hold: Callable[[State | None, MachineFacts], None],
        log: Any,
    ) -> None:
        self._live, self._facts, self._hold, self._log = live, facts, hold, log
        self._said: set[str] = set()
        self._held: State | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._look_forever, name="conditions", daemon=True)

    def start(self) -> None:
        """Look once now, so that the peer begins as its conditions say; then every LOOK_SECONDS, and after each `set`."""
        self._live.changed.clear()
        self.look()
        if self._held is not None:
            self._log.info("paused from the start on", why=self._held.why)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended = True
        self._live.changed.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS_MAX)
            self.look()  # the month's last bytes

    def look(self) -> None:
        """Once."""
        settings = self._live.values
        try:
            facts = self._facts(settings)
        except FAILURES as error:
            self._say_once(f"conditions cannot be looked at now: {error}; the peer stays as it is")
            return
        state = decide(settings, facts)
        if settings.not_beside_other_gpu_programs and facts.gpu_programs is None:
            self._say_once(next(it.why for it in states(settings, facts) if it.key == "not_beside_other_gpu_programs"))
        if state is not None and self._held is not None and state.key != self._held.key:
            self._log.info("still paused", why=state.why)
        self._held = state
        try:
            self._hold(state, facts)
        except FAILURES as error:
            self._say_once(f"not every setting of the owner holds now: {error}; the peer tries again")

    def _look_forever(self) -> None:
        while True:
            self._live.changed.wait(LOOK_SECONDS)
            self._live.changed.clear()
            if self._ended:
                return
            self.look()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._log.warning(text)
