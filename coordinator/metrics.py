"""The coordinator's Prometheus metrics, in a registry of their own (importing registers nothing globally)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.events import Denial
from coordinator.state import PeerPhase, Run
from protos.errors import Reason


class Metrics:
    """Counters by run (first 16 hex digits of the run id)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        run = ["run"]
        self.head_step = Gauge("swarmentum_head_step", "Last committed step", run, registry=self.registry)
        self.loss = Gauge("swarmentum_loss_nats", "Mean loss a token of the last step", run, registry=self.registry)
        self.peers = Gauge("swarmentum_peers", "Peers by phase", [*run, "phase"], registry=self.registry)
        self.payload_bytes = Gauge(
            "swarmentum_payload_bytes_accepted", "Bytes of all accepted payloads", run, registry=self.registry
        )
        self.entries = Counter("swarmentum_entries_total", "Log entries committed", run, registry=self.registry)
        self.resyncs = Counter("swarmentum_resyncs_total", "Peers told to re-sync", run, registry=self.registry)
        self.refused = Counter(
            "swarmentum_refused_total", "Requests that did not get through the door", ["reason"], registry=self.registry
        )
        self.joins_refused = Counter(
            "swarmentum_joins_refused_total",
            "Peers that asked to join and were not admitted",
            [*run, "reason"],
            registry=self.registry,
        )
        self.acts = Gauge("swarmentum_acts", "1: this coordinator acts; 0: it stands by", registry=self.registry)
        self.acts.set(1)
        self.step_seconds = Histogram(
            "swarmentum_step_seconds",
            "Time from tick to entry",
            run,
            registry=self.registry,
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )

    def not_admitted(self, run: Run, denial: Denial) -> None:
        """A peer was told that it may not join."""
        self.joins_refused.labels(run.run_id.hex()[:16], denial.value).inc()

    def refused_addresses(self, count: int) -> None:
        """So many addresses of a peer were left out."""
        self.refused.labels(Reason.OUT_OF_RANGE.value).inc(count)

    def observe(self, run: Run) -> None:
        """Copy a run's figures."""
        name = run.run_id.hex()[:16]
        self.head_step.labels(name).set(run.head_step)
        self.loss.labels(name).set(run.loss)
        self.payload_bytes.labels(name).set(run.payload_bytes_total)
        for phase in PeerPhase:
            self.peers.labels(name, phase.value).set(len(run.with_phase(phase)))
