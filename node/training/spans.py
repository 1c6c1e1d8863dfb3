"""The spans of one peer: what it did in each step, and when (setting `trace`). Changes no training. ADR 57.

    peer        from the moment that the training thread hears of the step, to the applied entry
      compute   the gradient                                           snapshot  roots, and the disk (behind the training)
      vote      momentum and votes                                     check     other peers' votes, computed again
      publish   signed, kept, and sent to the network thread           apply     the update on the replica, and its digest
      wait      until the coordinator's entry is here                  payloads  until the entry's votes are here

A peer that replays the log records nothing: a step counts only if this peer saw it open. With `metrics_listen` the seconds of
each part are added up, too. Without both nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from node.swarm.events import Committed, Opened
from protos.tracing import Tracing, Value

STEPS_KEPT: Final = 64
"""Steps that this peer saw open. A snapshot of one may be written when many others are over."""
_NOTHING: Final = nullcontext()


@dataclass
class _Part:
    """This peer's part of a step. `worked`: when its last own work on it ended."""

    began: float
    worked: float
    attempt: int
    asked: bool
    over: bool = False


class Spans:
    """One peer's, in one run. `tracing` None: no span is recorded. `summed`: `seconds` has the sum of each part."""

    def __init__(
        self, tracing: Tracing | None = None, run_id: bytes = b"", public_key: bytes = b"", *, summed: bool = False
    ) -> None:
        self._tracing, self._run_id, self._public_key = tracing, run_id, public_key
        self._off = tracing is None and not summed
        self.seconds: dict[str, float] = {}
        self._parts: dict[int, _Part] = {}

    def opened(self, event: Opened) -> None:
        """The training thread hears that a step is open; again, if the coordinator opens it for another roster."""
        if self._off:
            return
        step, asked = event.tick.step, bool(event.ranges)
        if step in self._parts:
            part = self._parts[step]
            part.attempt, part.asked = event.tick.attempt, part.asked or asked
            return
        now = time.monotonic()
        self._parts[step] = _Part(now, now, event.tick.attempt, asked)
        while len(self._parts) > STEPS_KEPT:
            del self._parts[next(iter(self._parts))]

    def timed(self, step: int, name: str, **values: Value) -> AbstractContextManager[None]:
        """Record the work inside as a span of this step. From any thread."""
        if self._off or step not in self._parts:
            return _NOTHING
        return self._timing(self._parts[step], step, name, values)

    @contextmanager
    def _timing(self, part: _Part, step: int, name: str, values: dict[str, Value]) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            if not part.over:
                part.worked = ended
            self._took(step, name, (began, ended), **values)

    def _took(self, step: int, name: str, span: tuple[float, float], **values: Value) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + span[1] - span[0]
        if self._tracing is not None:
            self._tracing.child(self._run_id, step, self._public_key, name, span, **values)

    def decided(self, event: Committed) -> None:
        """The training thread has an entry with its votes, and is about to apply it."""
        step, began, whole = event.signed.entry.step, event.came, event.whole
        part = self._parts.get(step)
        if part is None:
            return
        if began > part.worked:
            self._took(step, "wait", (part.worked, began))
        self._took(step, "payloads", (began, whole), payloads=len(event.signed.entry.contributions))

    def applied(self, step: int, accepted: bool) -> None:
        """The replica has the state after a step: this peer's part of the step is over."""
        part = self._parts.get(step)
        if part is not None and not part.over:
            self._record(step, part, accepted=accepted, applied=True)

    def close(self) -> None:
        """Record the parts of steps that this peer leaves before they are applied."""
        for step, part in list(self._parts.items()):
            if not part.over:
                self._record(step, part, accepted=False, applied=False)

    def _record(self, step: int, part: _Part, **values: Value) -> None:
        part.over = True
        if self._tracing is None:
            return
        span = part.began, time.monotonic()
        self._tracing.part(
            self._run_id, step, self._public_key, "peer", span, attempt=part.attempt, asked=part.asked, **values
        )
