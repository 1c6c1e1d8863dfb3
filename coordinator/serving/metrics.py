"""The coordinator's Prometheus metrics, in a registry of their own (importing registers nothing globally)."""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.clock.effects import Denial
from coordinator.clock.state import PeerPhase, Run
from protos.errors import Reason


class Metrics:
    """Counters by run (first 16 hex digits of the run id)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        run = ["run"]
        self._runs = _Runs()
        self.registry.register(self._runs)
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
        """Count a peer that may not join."""
        self.joins_refused.labels(run.run_id.hex()[:16], denial.value).inc()

    def refused_addresses(self, count: int) -> None:
        """Count addresses of a peer that the coordinator left out."""
        self.refused.labels(Reason.OUT_OF_RANGE.value).inc(count)

    def observe(self, run: Run) -> None:
        """Take the present run. The run's figures are counted when a client reads the metrics."""
        self._runs.newest[run.run_id.hex()[:16]] = run


class _Runs(Collector):
    """The present figures of each run, when a client reads the metrics."""

    def __init__(self) -> None:
        self.newest: dict[str, Run] = {}

    def collect(self) -> Iterator[Metric]:
        """Prometheus' server calls this in a thread of its own. Runs are values that no code changes."""
        head = GaugeMetricFamily("swarmentum_head_step", "Last committed step", labels=["run"])
        loss = GaugeMetricFamily("swarmentum_loss_nats", "Mean loss a token of the last step", labels=["run"])
        peers = GaugeMetricFamily("swarmentum_peers", "Peers by phase", labels=["run", "phase"])
        accepted = GaugeMetricFamily(
            "swarmentum_payload_bytes_accepted", "Bytes of all accepted payloads", labels=["run"]
        )
        for name, run in list(self.newest.items()):
            head.add_metric([name], run.head_step)
            loss.add_metric([name], run.loss)
            accepted.add_metric([name], run.payload_bytes_total)
            phases = Counted(peer.phase for peer in run.peers.values())
            for phase in PeerPhase:
                peers.add_metric([name, phase.value], phases[phase])
        yield from (head, loss, peers, accepted)
