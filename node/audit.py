"""What a peer can find out about another's votes: how they fit the other's own samples, and whose votes they repeat.

Pure functions of payloads and gradients, in the transform's domain. A gradient is transformed once and then tells about any
number of payloads. Judges nobody: what the figures mean is coordinator/trust.py's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.optim import transforms
from node.optim.layout import CHUNK_ELEMENTS, Layout
from node.optim.payload import Format
from node.optim.transforms import Transform


@dataclass(frozen=True)
class Seen:
    """A payload's votes: `where` int64 [chunks, votes], coefficients; `values` fp32 [chunks, votes], signed."""

    where: Tensor
    values: Tensor


def seen_votes(form: Format, payload: bytes, size: int, chunks: int) -> Seen:
    """Decode a payload on the CPU. Raises `VotesError` for bytes that are no votes."""
    ballot = form.decode(payload, size, chunks, torch.device("cpu"))
    return Seen(ballot.where, ballot.values.to(torch.float32))


def transformed(layout: Layout, gradients: Sequence[Tensor | None], transform: Transform | None = None) -> Tensor:
    """Gradients by parameter as the votes see them: fp32 [chunks, 64, 64]."""
    gathered = layout.gather(gradients, layout.empty("cpu"))
    return (transform or transforms.named("dct")).forward(gathered)


def agreement(seen: Seen, gradient: Tensor) -> float:
    """How much a step along these votes would lower the loss whose gradient this is, in standard deviations.

    The first-order improvement, sum(vote * gradient), over its spread sqrt(sum((vote * gradient)^2)) under random signs: votes
    that know nothing of the gradient give a mean of 0 and a deviation of about 1, whatever the model and its scale.
    """
    there = seen.values * gradient.reshape(-1, CHUNK_ELEMENTS).gather(1, seen.where)
    spread = float(there.square().sum().sqrt())
    return float(there.sum()) / spread if spread > 0 else 0.0


def overlap(one: Seen, other: Seen) -> float:
    """Of the smaller payload's votes, the part that the other has too: the same coefficient with the same sign."""
    marks = torch.zeros(one.where.shape[0], CHUNK_ELEMENTS, dtype=torch.int8)
    marks.scatter_(1, one.where, one.values.sign().to(torch.int8))
    same = int((marks.gather(1, other.where) * other.values.sign().to(torch.int8) > 0).sum())
    return same / max(min(one.where.numel(), other.where.numel()), 1)
