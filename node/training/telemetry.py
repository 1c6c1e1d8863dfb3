"""A peer's reports about itself: one JSON line a step, Prometheus metrics, and a summary at the end. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from node.control.vote_history import Given
from node.swarm.view import Counters
from node.training.spans import Spans
from node.training.trackers import Tracking
from protos.disk import writing
from protos.errors import OperatorError
from protos.json_line import as_line
from protos.log import SignedEntry

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
    steps_applied: int = 0
    step: int = 0
    digest: str = ""
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
        """Close the file, and end the tracking."""
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
