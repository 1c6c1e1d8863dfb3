"""The coordinator's Prometheus metrics, in a registry of their own (importing registers nothing globally).

What took the time of each step: seconds of its parts, and spans (`serve --trace`). ADR 57.

    step       from the tick to the sent entry; the root of the step's trace
    report     from the tick until a peer's announcement is here, one for each peer
    attempt    a roster that was given up, because the step was opened again for another one
    quorum     from the last announcement until a quorum holds the payloads, or the deadline
    write      until the journal has the entry, and the streams have it

`StepTraces` looks at the run before and after an event. Refuses to decide anything, and to keep more than the open step.
"""

from __future__ import annotations

import collections
import re
import shutil
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.clock.effects import Denial
from coordinator.clock.events import Event, Reported
from coordinator.clock.state import OpenStep, Peer, PeerPhase, Phase, Run
from coordinator.clock.trust import Standing
from coordinator.serving.throttled_log import ThrottledLog
from protos.errors import Reason
from protos.evaluation import figure, reopen_evaluation
from protos.identity import short
from protos.limits import RateLimiter
from protos.log import FORMAT_VERSION, Entry
from protos.run_facts import PAUSED, REASONS
from protos.text import printable
from protos.tracing import Tracing
from protos.v1 import coordinator_pb2 as pb
from protos.version import software_version

PEERS_MAX = 64
"""Peers of a run with figures of their own: those with the most accepted votes."""


class Metrics:
    """Counters by run (first 16 hex digits of the run id). `home`: the folder whose disk is watched."""

    def __init__(self, home: Path | None = None) -> None:
        self.registry = CollectorRegistry()
        run = ["run"]
        self._runs = _Runs()
        self.registry.register(self._runs)
        ProcessCollector(registry=self.registry)
        build = Info("swarmentum_build", "Version of this coordinator", registry=self.registry)
        build.info({"version": software_version(), "format": str(FORMAT_VERSION)})
        if home is not None:
            free = Gauge("swarmentum_disk_free_bytes", "Free bytes of the disk of --home", registry=self.registry)
            free.set_function(lambda: shutil.disk_usage(home).free)
        self.tokens = Counter(
            "swarmentum_tokens_total", "Tokens of accepted votes since the start", run, registry=self.registry
        )
        self.entries = Counter("swarmentum_entries_total", "Log entries committed", run, registry=self.registry)
        self.journal_failures = Counter(
            "swarmentum_journal_failures_total", "Writes to the journal that failed", run, registry=self.registry
        )
        self.journal_failing = Gauge(
            "swarmentum_journal_failing",
            "1: the journal takes no writes, as on a full disk",
            run,
            registry=self.registry,
        )
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
        self.join_failures = Counter(
            "swarmentum_join_failures_total",
            "Peers that could not join, as they say, by reason and version",
            [*run, "reason", "version"],
            registry=self.registry,
        )
        self.part_seconds = Counter(
            "swarmentum_step_part_seconds",
            "Seconds of steps, by what the coordinator waited for: announcements, quorum, write",
            [*run, "part"],
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

    def committed(self, run: Run, entry: Entry) -> None:
        """Count what an entry accepted."""
        name = run.run_id.hex()[:16]
        self.tokens.labels(name).inc(sum(c.tokens for c in entry.contributions))
        self._runs.count_bytes(name, run, entry)

    def took(self, name: str, part: str, seconds: float) -> None:
        """Count the seconds of a part of a step; `name`: the run's first 16 hex digits."""
        self.part_seconds.labels(name, part).inc(seconds)

    def observe(self, run: Run) -> None:
        """Take the present run. The run's figures are counted when a client reads the metrics. An archived run has none."""
        if run.archived:
            self.forget(run.run_id)
        else:
            self._runs.newest[run.run_id.hex()[:16]] = run

    def forget(self, run_id: bytes) -> None:
        """The run is archived or deleted."""
        self._runs.forget(run_id.hex()[:16])


class _Runs(Collector):
    """The present figures of each run, when a client reads the metrics."""

    def __init__(self) -> None:
        self.newest: dict[str, Run] = {}
        self._bytes: dict[str, Counted[bytes]] = {}

    def count_bytes(self, name: str, run: Run, entry: Entry) -> None:
        """Add the payloads of an entry to their authors' bytes. Authors that the run knows no more are left out."""
        counted = self._bytes.setdefault(name, Counted())
        for contribution in entry.contributions:
            counted[contribution.public_key] += contribution.payload_bytes
        if len(counted) > len(run.peers) + PEERS_MAX:
            self._bytes[name] = Counted({key: count for key, count in counted.items() if key in run.peers})

    def forget(self, name: str) -> None:
        """The run is archived or deleted."""
        self.newest.pop(name, None)
        self._bytes.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        """Prometheus' server calls this in a thread of its own. Runs are values that no code changes."""
        runs = list(self.newest.items())
        yield from _figures(runs)
        info = GaugeMetricFamily("swarmentum_run_info", "1 for each run, with its name", labels=["run", "name"])
        phases = GaugeMetricFamily("swarmentum_run_phase", "1 for the phase that a run is in", labels=["run", "phase"])
        peers = GaugeMetricFamily("swarmentum_peers", "Peers by phase", labels=["run", "phase"])
        for name, run in runs:
            info.add_metric([name, printable(run.config.name)], 1)
            for word in (*(phase.value for phase in Phase), PAUSED):
                phases.add_metric([name, word], word == _phase(run))
            counted = Counted(peer.phase for peer in run.peers.values())
            for peer_phase in PeerPhase:
                peers.add_metric([name, peer_phase.value], counted[peer_phase])
        yield from (info, phases, peers)
        yield from _of_peers(runs, self._bytes)


def _phase(run: Run) -> str:
    return PAUSED if run.is_paused and run.phase is Phase.WAITING else run.phase.value


def _figures(runs: list[tuple[str, Run]]) -> Iterator[Metric]:
    """One figure a run each."""
    families = {
        "head_step": "Last committed step",
        "steps": "Steps of the whole run",
        "loss_nats": "Mean loss a token of the last step",
        "payload_bytes_accepted": "Bytes of all accepted payloads",
        "unconfirmed_steps": "Newest steps without an agreed state digest: more than a few while the anchor is away",
        "peers_needed": "Peers that a step needs",
        "samples_per_second": "Samples that the peers of the next step compute in a second",
        "snapshot_step": "Step of the newest agreed snapshot; -1 without one",
        "held_out_loss_nats": "Median of the held-out losses a token that peers reported of the last evaluated state",
        "held_out_step": "Step of the last evaluated state",
        "held_out_spread_nats": "Largest difference between held-out losses of one kind of device",
    }
    made = {name: GaugeMetricFamily(f"swarmentum_{name}", text, labels=["run"]) for name, text in families.items()}
    for name, run in runs:
        values = {
            "head_step": run.head_step,
            "steps": run.steps,
            **({"loss_nats": run.loss} if run.head_step else {}),  # without a step there is no loss
            "payload_bytes_accepted": run.payload_bytes_total,
            "unconfirmed_steps": run.unconfirmed_steps,
            "peers_needed": run.config.clock.min_peers,
            "samples_per_second": sum(peer.samples_per_second for peer in run.ready),
            "snapshot_step": -1 if run.snapshot is None else run.snapshot.step,
        }
        if run.evaluations:
            newest = figure([reopen_evaluation(it) for it in run.evaluations[max(run.evaluations)].values()])
            values |= {
                "held_out_loss_nats": newest.loss,
                "held_out_step": newest.step,
                "held_out_spread_nats": newest.spread,
            }
        for key, value in values.items():
            made[key].add_metric([name], value)
    yield from made.values()


def _of_peers(runs: list[tuple[str, Run]], sent: Mapping[str, Mapping[bytes, int]]) -> Iterator[Metric]:
    """Figures of connected peers, at most PEERS_MAX of a run: a stranger adds no rows without end."""
    votes = GaugeMetricFamily("swarmentum_peer_votes_accepted", "Accepted votes of a peer", labels=["run", "peer"])
    speed = GaugeMetricFamily(
        "swarmentum_peer_samples_per_second", "Samples that a peer computes in a second", labels=["run", "peer"]
    )

    payloads = CounterMetricFamily(
        "swarmentum_peer_payload_bytes", "Bytes of a peer's accepted payloads since the start", labels=["run", "peer"]
    )
    standings = GaugeMetricFamily(
        "swarmentum_peer_standing", "1 for the standing of a peer", labels=["run", "peer", "standing"]
    )

    def rank(peer: Peer) -> tuple[int, bytes]:
        return -peer.votes_accepted, peer.public_key

    for name, run in runs:
        here = sorted((peer for peer in run.peers.values() if peer.is_here and not peer.anchor), key=rank)
        for peer in here[:PEERS_MAX]:
            votes.add_metric([name, short(peer.public_key)], peer.votes_accepted)
            labels = [name, short(peer.public_key)]
            speed.add_metric(labels, peer.samples_per_second)
            payloads.add_metric(labels, sent.get(name, {}).get(peer.public_key, 0))
            standings.add_metric([*labels, _standing(run, peer)], 1)
    yield from (votes, speed, payloads, standings)


def _standing(run: Run, peer: Peer) -> str:
    """counted, probation or excluded, as `status` says."""
    standing = run.standings.get(peer.public_key, Standing())
    if not run.config.trust.enabled:
        return "excluded" if standing.excluded else "counted"
    return standing.name


VERSIONS_KEPT = 8
"""Versions that a run counts apart; others are "other". This coordinator's own version always has a place."""
OTHER = "other"
VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}((a|b|rc|\.dev|\.post)\d{1,4})?", re.ASCII)
ADDRESS_TOLD_MAX, ADDRESS_TOLD_MS = 3, 60_000
TOLD_MAX, TOLD_MS = 60, 1_000
ADDRESSES_KEPT = 4096


class Failures:
    """Peers that failed before or at the door of a run, as counts by reason and version, since this coordinator started.
    ADR 21.

    Anybody may tell one without a key, so nothing depends on these counts. Refuses to grow: reasons are of an enum, each run
    counts few versions, and each network address and all together may tell only so often.

    Of all runs of a coordinator.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counts: dict[bytes, collections.Counter[tuple[int, str]]] = {}
        self._by_address = RateLimiter(ADDRESS_TOLD_MAX, ADDRESS_TOLD_MS, ADDRESSES_KEPT)
        self._all = RateLimiter(TOLD_MAX, TOLD_MS, 1)
        self._caused = ThrottledLog(structlog.get_logger("coordinator"))

    def may_tell(self, address: str, now_ms: int) -> bool:
        """Whether a stranger at this network address may tell one more."""
        return self._by_address.allow(address, now_ms) and self._all.allow("", now_ms)

    def count(self, run_id: bytes, reason: int, version: str) -> None:
        """One more. The caller has the run. A reason that this version does not know is OTHER."""
        reason = reason if reason in REASONS else pb.JoinFailure.JOIN_FAILURE_OTHER
        found = self._counts.setdefault(run_id, collections.Counter())
        name = self._known(found, version)
        found[reason, name] += 1
        run = run_id.hex()[:16]
        self._metrics.join_failures.labels(run, REASONS[reason], name).inc()
        self._caused.info("a peer could not join", run, run=run, step="-", peer="-", why=REASONS[reason], version=name)

    def _known(self, found: collections.Counter[tuple[int, str]], version: str) -> str:
        if version == software_version() or version in {name for _, name in found}:
            return version
        versions = {name for _, name in found} - {OTHER, software_version()}
        return version if VERSION.fullmatch(version) and len(versions) < VERSIONS_KEPT else OTHER

    def of(self, run_id: bytes) -> list[pb.JoinFailures]:
        """The counts of a run, the largest first."""
        return [
            pb.JoinFailures(reason=reason, software_version=version, count=count)  # type: ignore[arg-type]
            for (reason, version), count in self._counts.get(run_id, collections.Counter()).most_common()
        ]

    def forget(self, run_id: bytes) -> None:
        """The run is deleted."""
        self._counts.pop(run_id, None)


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
        voted = None if voted is run.voted.get(self._step - 1) else voted  # an entry without votes
        self._tracing.root(
            self._run_id, self._step, "step", _seconds(self._began_ms, now_ms), run_name=run.config.name,
            roster=len(step.tick.roster), attempt=step.tick.attempt, announced=len(self._reported),
            accepted=0 if voted is None else len(voted.counted), loss=run.loss,
        )  # fmt: skip


def _seconds(began_ms: int, ended_ms: int) -> tuple[float, float]:
    return began_ms / 1000, ended_ms / 1000
