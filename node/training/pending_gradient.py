"""A gradient that waits to become votes."""

from __future__ import annotations

from dataclasses import dataclass

from node.model.gradients import GradResult


@dataclass(frozen=True)
class PendingGradient:
    """A gradient in `.grad`, on the samples of `step`, before the peer has made votes from it."""

    result: GradResult
    seconds: float
    step: int
