"""What others may see of a running peer, each off unless its owner wants it: Prometheus metrics, a tracker, traces.

Refuses to change the training: each of the three may fail or be slow without it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from node.config import PeerSettings
from node.swarm.view import Counters
from node.training.loop import Trainer
from node.training.telemetry import Spans, serve_metrics
from node.training.trackers import Tracking, open_tracker
from protos.identity import Identity
from protos.tracing import Tracing

TRACES: Final = "otlp"
"""The name of an OpenTelemetry receiver among the trackers."""


def metrics(settings: PeerSettings, trainer: Trainer, counters: Counters, ends: ExitStack, log: Any) -> None:
    """Serve /metrics until `ends`. Raises OperatorError if another program has the address."""
    if settings.metrics_listen is None:
        return
    server = serve_metrics(settings.metrics_listen, trainer.summary, counters, trainer.spans)
    host, port = server.server_address[:2]
    ends.callback(server.server_close)
    ends.callback(server.shutdown)
    log.info("metrics", url=f"http://{host}:{port}/metrics")


def track(settings: PeerSettings, trainer: Trainer, run_id: bytes, folder: Path, log: Any) -> None:
    """Feed trackers with the steps of this trainer. Raises OperatorError if its library is missing."""
    config, peer = json.loads(trainer.config.canonical_json()), trainer.summary.id
    for name in settings.track:
        if name != TRACES:
            tracker = open_tracker(name, trainer.config.name, run_id.hex(), peer, config, folder)
            trainer.steps.trackings.append(Tracking(tracker, log))


def trace(settings: PeerSettings, run_id: bytes, identity: Identity, ends: ExitStack, log: Any) -> Spans:
    """The recorder of this peer's spans, until `ends`. Raises OperatorError if the extra is missing."""
    summed = settings.metrics_listen is not None
    if TRACES not in settings.track:
        return Spans(summed=summed)
    tracing = Tracing("swarmentum-peer", identity.peer_id, log)
    spans = Spans(tracing, run_id, identity.public_key, summed=summed)
    ends.callback(tracing.close)
    ends.callback(spans.close)
    return spans
