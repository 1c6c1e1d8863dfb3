"""What a peer will contribute to a run, and what it costs its line: an estimate from the run's facts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from node.doctor.doctor_facts import Others

SECONDS_AN_HOUR = 3600


@dataclass(frozen=True)
class Prediction:
    """Of one peer, on average."""

    share: float
    """Part of the swarm's samples, 0 to 1."""
    samples_a_step: float
    step_seconds: float
    up_bytes_an_hour: float
    down_bytes_an_hour: float


def predict(own: float, others: Others, payload_bytes: int) -> Prediction:
    """`own`: samples a second of this machine. Shares follow speed; a step takes what it takes now, or what computing takes.

    A peer sends its payload to each other peer and anchor, and gets the payload of each other peer. Large swarms send less:
    peers pass large payloads on.
    """
    assert own > 0, "a peer that computes nothing contributes nothing"
    together = own + others.samples_per_second
    share = own / together
    computing = others.batch_samples / together
    step_seconds = computing if others.steps_per_second is None else max(1 / others.steps_per_second, computing)
    steps_an_hour = SECONDS_AN_HOUR / step_seconds
    return Prediction(
        share,
        share * others.batch_samples,
        step_seconds,
        steps_an_hour * payload_bytes * (others.ready + others.anchors),
        steps_an_hour * payload_bytes * others.ready,
    )
