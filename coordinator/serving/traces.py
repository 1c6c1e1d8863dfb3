"""What took the time of each step at the coordinator: seconds of its parts, and spans (`serve --trace`). ADR 57.

    step       from the tick to the sent entry; the root of the step's trace
      report   from the tick until a peer's announcement is here, one for each peer
      attempt  a roster that was given up, because the step was opened again for another one
      quorum   from the last announcement until a quorum holds the payloads, or the deadline
      write    until the journal has the entry, and the streams have it

Looks at the run before and after an event. Refuses to decide anything, and to keep more than the open step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.clock.events import Event, Reported
from coordinator.clock.state import OpenStep, Run
from protos.identity import short
from protos.tracing import Tracing

REPORTS_MAX: Final = 64
"""Peers of a step with a span of their own: the first ones that announce."""


class StepTraces:
    """One run's. Times are in ms of the runtime's clock. `tracing` None: no spans. `took` gets each part's name and seconds."""

    def __init__(self, tracing: Tracing | None, run_id: bytes, took: Callable[[str, float], None]) -> None:
        self._tracing, self._run_id, self._took = tracing, run_id, took
        self._step, self._began_ms, self._announced_ms = 0, 0, 0
        self._reported: set[bytes] = set()

    def observe(self, before: Run, run: Run, event: Event, event_ms: int, now_ms: int) -> None:
        """The runtime took an event at `event_ms`, which turned `before` into `run`; its effects are done `now_ms`."""
        step = before.step
        if step is not None:
            self._follow(step)
            if isinstance(event, Reported):
                self._report(step, event, event_ms)
            if run.head_step > before.head_step:
                self._decided(step, run, event_ms, now_ms)
            elif self._tracing and run.step is not None and run.step.tick.attempt != step.tick.attempt:
                span = _seconds(step.opened_ms, event_ms)
                self._tracing.child(self._run_id, self._step, None, "attempt", span, attempt=step.tick.attempt)

    def _follow(self, step: OpenStep) -> None:
        if step.tick.step != self._step:
            self._step, self._began_ms, self._announced_ms = step.tick.step, step.opened_ms, step.opened_ms
            self._reported = set()

    def _report(self, step: OpenStep, event: Reported, event_ms: int) -> None:
        claim, key = event.claim, event.public_key
        if claim is None or claim.step != self._step or key not in step.tick.places or key in self._reported:
            return
        self._announced_ms = event_ms
        self._reported.add(key)
        if self._tracing is not None and len(self._reported) <= REPORTS_MAX:
            span = _seconds(self._began_ms, event_ms)
            self._tracing.child(
                self._run_id, self._step, None, "report", span,
                peer=short(key), samples=claim.samples, compute_ms=claim.compute_ms, payload_bytes=claim.payload_bytes,
            )  # fmt: skip

    def _decided(self, step: OpenStep, run: Run, event_ms: int, now_ms: int) -> None:
        waited, written = _seconds(self._announced_ms, event_ms), _seconds(event_ms, now_ms)
        announced = _seconds(self._began_ms, self._announced_ms)
        for name, (began, ended) in (("announcements", announced), ("quorum", waited), ("write", written)):
            self._took(name, max(ended - began, 0.0))
        if self._tracing is None:
            return
        self._tracing.child(self._run_id, self._step, None, "quorum", waited)
        self._tracing.child(self._run_id, self._step, None, "write", written)
        voted = run.voted.get(self._step)
        self._tracing.root(
            self._run_id, self._step, "step", _seconds(self._began_ms, now_ms), run_name=run.config.name,
            roster=len(step.tick.roster), attempt=step.tick.attempt, announced=len(self._reported),
            accepted=0 if voted is None else len(voted.counted), loss=run.loss,
        )  # fmt: skip


def _seconds(began_ms: int, ended_ms: int) -> tuple[float, float]:
    return began_ms / 1000, ended_ms / 1000
