"""What a race comes to, from what its peers wrote and what the interfaces counted. Pure: values in, values out."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

SMOOTHED_STEPS: Final = 10
"""A loss counts as reached where the mean over so many steps is there: single batches differ by some 5 %."""
DIGITS: Final = 4


@dataclass(frozen=True)
class Line:
    """A step as one peer saw it."""

    step: int
    loss: float
    """Mean over the samples of the peer's own batch, before the update; nats a token."""
    samples: int
    at: float
    """Seconds of the machine's monotonic clock."""


@dataclass(frozen=True)
class Counted:
    """What all peers together had sent at a moment."""

    at: float
    sent_bytes: int


@dataclass(frozen=True)
class Point:
    """A step of a rival."""

    step: int
    loss: float
    """Mean over all samples of the step."""
    samples: int
    seconds: float
    """Since the end of the first step: starting up costs nobody anything."""
    sent_bytes: float
    """That a peer sent since then, the mean over the peers."""


def curve(peers: Sequence[Sequence[Line]], counted: Sequence[Counted], number: int) -> list[Point]:
    """The steps of a rival with `number` peers, from the lines of those that wrote some; a step is over at the median."""
    by_step: dict[int, list[Line]] = defaultdict(list)
    for lines in peers:
        for line in lines:
            by_step[line.step].append(line)
    if not by_step or not counted:
        return []
    steps = sorted(by_step)
    over = np.maximum.accumulate([statistics.median(line.at for line in by_step[step]) for step in steps])
    sent = np.interp(over, [c.at for c in counted], [c.sent_bytes / number for c in counted])
    points = []
    for index, step in enumerate(steps):
        samples = sum(line.samples for line in by_step[step])
        loss = sum(line.loss * line.samples for line in by_step[step]) / samples
        points.append(Point(step, loss, samples, float(over[index] - over[0]), float(sent[index] - sent[0])))
    return points


def smoothed(points: Sequence[Point], steps: int = SMOOTHED_STEPS) -> list[float]:
    """Mean of the last `steps` losses at each point from the `steps`-th on."""
    losses = [point.loss for point in points]
    return [statistics.fmean(losses[end - steps : end]) for end in range(steps, len(losses) + 1)]


def reached(points: Sequence[Point], loss: float, steps: int = SMOOTHED_STEPS) -> Point | None:
    """The first point at which the smoothed loss is at most `loss`."""
    for point, value in zip(points[steps - 1 :], smoothed(points, steps), strict=False):
        if value <= loss:
            return point
    return None


def common_loss(curves: Mapping[str, Sequence[Point]], steps: int) -> float | None:
    """The loss that the worst of those that took all `steps` reached; of all with enough steps if none took all."""
    best = {name: min(values) for name, points in curves.items() if (values := smoothed(points))}
    finished = [value for name, value in best.items() if curves[name][-1].step >= steps]
    return max(finished or best.values(), default=None)


def figures(points: Sequence[Point], loss: float | None) -> dict[str, Any]:
    """One rival's figures. `steps_a_minute` counts from the end of the first step."""
    last = points[-1]
    values = smoothed(points)
    there = None if loss is None else reached(points, loss)
    return {
        "steps": last.step,
        "seconds": round(last.seconds, 2),
        "steps_a_minute": round(60 * (last.step - points[0].step) / last.seconds, 2) if last.seconds else None,
        "sent_bytes_a_peer": round(last.sent_bytes),
        "sent_bytes_a_peer_step": round(last.sent_bytes / max(last.step - points[0].step, 1)),
        "samples_a_step": round(sum(point.samples for point in points) / len(points), 1),
        "loss_last": round(values[-1], DIGITS) if values else None,
        "seconds_to_loss": round(there.seconds, 2) if there else None,
        "bytes_to_loss": round(there.sent_bytes) if there else None,
        "loss_by_step": [round(point.loss, DIGITS) for point in points],
        "seconds_by_step": [round(point.seconds, 2) for point in points],
        "bytes_by_step": [round(point.sent_bytes) for point in points],
        "samples_by_step": [point.samples for point in points],
        "step_numbers": [point.step for point in points],
    }


def ratios(rows: Mapping[str, Mapping[str, Any]], to: str) -> dict[str, dict[str, float | None]]:
    """Each row against the row `to`, of the same run: above 1 takes longer, sends more, or is further from learned."""
    base = rows.get(to, {})

    def ratio(row: Mapping[str, Any], key: str) -> float | None:
        mine, other = row.get(key), base.get(key)
        known = mine is not None and other is not None and other > 0 and math.isfinite(mine / other)
        return round(mine / other, 3) if known else None  # type: ignore[operator]

    keys = ("seconds_to_loss", "bytes_to_loss", "steps_a_minute", "sent_bytes_a_peer_step", "held_out_loss")
    return {name: {key: ratio(row, key) for key in keys} for name, row in rows.items() if "loss_by_step" in row}
