"""Figures about a step that are made of what peers claim: one liar must not decide them. Only people read them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from protos.log import Contribution

# A contribution's loss counts as at most so many times the median of its step's.
LOSS_TIMES_MEDIAN_MAX = 2.0


def loss_of(contributions: Sequence[Contribution], before: float = 0.0) -> float:
    """Mean loss of a step in nats a token, weighted by samples, extreme claims drawn in; `before` for a step without samples.

    Weights are samples, which the coordinator handed out, not tokens, which the author claims.
    """
    counted = [c for c in contributions if c.samples]
    if not counted:
        return before
    middle = statistics.median(c.loss for c in counted)
    most = LOSS_TIMES_MEDIAN_MAX * max(abs(middle), 1e-6)
    return sum(min(max(c.loss, -most), most) * c.samples for c in counted) / sum(c.samples for c in counted)


def rate(learning_rate: float) -> float:
    """A learning rate with as many digits as mean something to a person; the log keeps its exact bits."""
    return float(f"{learning_rate:.4g}")
