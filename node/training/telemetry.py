"""A peer's reports about itself: one JSON line a step, Prometheus metrics, and a summary at the end. Changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from node.control.vote_history import Given
from node.swarm.facts import Committed, Opened
from node.swarm.runtime import Counters
from node.training.trackers import Tracking
from protos.disk import writing
from protos.errors import OperatorError
from protos.log import SignedEntry
from protos.text import as_line
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
    """The spans of one peer: what it did in each step, and when (setting `trace`). Changes no training. ADR 57.

        peer        from the moment that the training thread hears of the step, to the applied entry
          compute   the gradient                                           snapshot  roots, and the disk (behind the training)
          vote      momentum and votes                                     check     other peers' votes, computed again
          publish   signed, kept, and sent to the network thread           apply     the update on the replica, and its digest
          wait      until the coordinator's entry is here                  payloads  until the entry's votes are here

    A peer that replays the log records nothing: a step counts only if this peer saw it open. With `metrics_listen` the seconds
    of each part are added up, too. Without both nothing is measured.

    One peer's, in one run. `tracing` None: no span is recorded. `summed`: `seconds` has the sum of each part.
    """

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


LINE_BYTES_MAX = 1 << 16
STEPS_BYTES_MAX = 64 << 20
"""Limit of `steps.jsonl`: some 150,000 steps. The peer keeps one older file of that size beside it."""


@dataclass
class Summary:
    """One peer's part in a run; the last line of `join --json`."""

    id: str
    device: str
    memory: str = "full"
    """What it keeps, and where: `memory` of its settings, as it was found."""
    memory_why: str = ""
    steps_applied: int = 0
    step: int = 0
    state_digest: str = ""
    votes_accepted: int = 0
    tokens: int = 0
    reading_seconds: float = 0.0
    loss: float = float("nan")
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0
    resyncs: int = 0
    checkpoint: str | None = None
    samples_accepted: int = 0
    tokens_accepted: int = 0
    share: float = 0.0
    """Of the samples of all peers, in the steps that this peer was there for."""
    seconds: float = 0.0
    finished: bool = False
    """Whether the run is finished, and not only this peer's part in it."""

    @property
    def seen(self) -> str:
        """What others read: the device, and a mode of memory that is not the fastest one."""
        return self.device if self.memory == "full" else f"{self.device}, memory {self.memory} ({self.memory_why})"

    def copy_counters(self, counters: Counters) -> None:
        """Copy the network side's figures."""
        self.payload_bytes_sent = counters.payload_bytes_sent
        self.payload_bytes_received = counters.payload_bytes_received
        self.wire_bytes_sent = counters.wire.sent
        self.wire_bytes_received = counters.wire.received

    def applied(self, step: int, loss: float, accepted: bool, counters: Counters) -> None:
        """Count a step that this peer applied; `accepted`: with its own votes."""
        self.step, self.loss = step, loss
        self.steps_applied += 1
        self.votes_accepted += accepted
        self.copy_counters(counters)

    def gave(self, given: Given, seconds: float) -> None:
        """Copy what the log counts of this peer since its start, so many seconds ago."""
        self.samples_accepted, self.tokens_accepted, self.share = given.samples, given.tokens, given.share
        self.seconds = seconds

    def json(self) -> str:
        """One line."""
        return as_line(asdict(self))


class StepLog:
    """`steps.jsonl`: one line a step that this peer applied. Beyond its limit the file replaces `steps.jsonl.1`."""

    def __init__(self, path: Path, bytes_max: int = STEPS_BYTES_MAX) -> None:
        self._path, self._bytes_max = path, bytes_max
        self.trackings: list[Tracking] = []
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_off(path)
            self._file = path.open("a", encoding="utf-8")

    def applied(self, signed: SignedEntry, digest: bytes, loss: float, accepted: bool) -> None:
        """A step that this peer applied; `accepted`: with its own votes."""
        entry = signed.entry
        tokens = sum(c.tokens for c in entry.contributions)
        payload_bytes = sum(c.payload_bytes for c in entry.contributions)
        peers = len(entry.contributions)
        for tracking in self.trackings:
            tracking.step(
                entry.step,
                loss=loss,
                lr=entry.lr,
                peers=peers,
                tokens=tokens,
                payload_bytes=payload_bytes,
                accepted=accepted,
            )
        self.write(
            step=entry.step,
            digest=digest.hex(),
            entry=signed.hash.hex(),
            loss=loss,
            lr=entry.lr,
            peers=peers,
            accepted=accepted,
            tokens=tokens,
            payload_bytes=payload_bytes,
        )

    def write(self, **values: Any) -> None:
        """Append a line. A reader of the file sees the line when this call returns."""
        with writing(self._path):
            if self._file.tell() >= self._bytes_max:
                self._rotate()
            self._file.write(as_line(values) + "\n")
            self._file.flush()

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file, and end the tracking. What a disk did not take before, `write` has told."""
        with suppress(OSError):
            self._file.close()
        for tracking in self.trackings:
            tracking.close()


def _cut_off(path: Path) -> None:
    """Remove a line that a crash or a full disk left unfinished, because the next line would continue it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        at = max(0, end - LINE_BYTES_MAX)
        file.seek(at)
        whole = file.read().rfind(b"\n") + 1
        if at + whole < end:
            file.truncate(at + whole)


class _Collector:
    """Reads the live figures when Prometheus asks."""

    def __init__(self, summary: Summary, counters: Counters, spans: Spans) -> None:
        self._summary = summary
        self._counters = counters
        self._spans = spans

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        counters, summary = self._counters, self._summary
        gauges = {"step": summary.step, "loss_nats": summary.loss}
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"swarmentum_{name}", f"Peer's {name.replace('_', ' in ')}", value)
        counts = {
            "steps_applied": summary.steps_applied,
            "votes_accepted": summary.votes_accepted,
            "tokens": summary.tokens,
            "reading_seconds": summary.reading_seconds,
            "resyncs": summary.resyncs,
            "announcements_received": counters.announcements,
            "payload_bytes_sent": counters.payload_bytes_sent,
            "payload_bytes_received": counters.payload_bytes_received,
            "wire_bytes_sent": counters.wire.sent,
            "wire_bytes_received": counters.wire.received,
        }
        for name, value in counts.items():
            yield CounterMetricFamily(f"swarmentum_{name}", f"Total of {name.replace('_', ' ')}", value)
        refused = CounterMetricFamily(
            "swarmentum_refused", "Strangers' bytes that did not get through the door", labels=["reason"]
        )
        for reason, count in list(counters.refused.items()):
            refused.add_metric([reason], count)
        yield refused
        parts = CounterMetricFamily(
            "swarmentum_part_seconds", "Seconds that this peer took for each part of its steps", labels=["part"]
        )
        for name, seconds in list(self._spans.seconds.items()):
            parts.add_metric([name], seconds)
        yield parts


def serve_metrics(listen: str, summary: Summary, counters: Counters, spans: Spans) -> Any:
    """Serve /metrics; returns the server to shut down. OperatorError if another program has the address."""
    registry = CollectorRegistry()
    registry.register(_Collector(summary, counters, spans))
    host, _, port = listen.rpartition(":")
    try:
        server, _ = start_http_server(int(port), host.strip("[]"), registry=registry)
    except OSError as error:
        raise OperatorError(f"metrics_listen = {listen}: {error.strerror}") from error
    return server
