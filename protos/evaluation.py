"""Held-out losses that volunteers report, each signed by its author; their median; and whether equal states gave equal figures.

`open_evaluation` is the door. A figure influences nothing: people read it. Replicas are equal, so figures of one kind of device
on the same samples must agree. Refuses figures that are no numbers. ADR 53.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from protos import limits
from protos.envelope import Kind, open_envelope, parse, seal
from protos.errors import Reason, Refusal
from protos.identity import Identity
from protos.run_config import RunConfig
from protos.v1 import envelope_pb2, log_pb2

LOSS_MAX = 1e4
AGREE_NATS = 1e-3
"""Figures of one kind of device on one set of samples differ by at most this: the order of sums in fp32 may differ."""
DEVICES = ("cpu", "cuda", "mps", "other")


@dataclass(frozen=True)
class Evaluation:
    """The mean loss of the state after `step` in nats a token, over `tokens` tokens that have this hash. `author`: 32 bytes."""

    author: bytes
    step: int
    loss: float
    tokens: int
    set_sha256: bytes
    device: str
    sample: str = ""
    """What the model wrote after the run's prompt, as the author says."""


@dataclass(frozen=True)
class Figure:
    """The evaluations of one step. `spread`: the largest difference within a kind of device, on the set that most evaluated.

    `loss`: the median over that set. `others`: evaluations of another set, which do not count.
    """

    step: int
    loss: float
    count: int
    spread: float
    others: int

    @property
    def agrees(self) -> bool:
        """Whether no two figures of one kind of device differ by more than AGREE_NATS."""
        return self.spread <= AGREE_NATS

    def __str__(self) -> str:
        peers = "1 peer" if self.count == 1 else f"the median of {self.count} peers"
        doubt = (
            ""
            if self.agrees
            else f"; figures of one kind of device differ by {self.spread:.4f}: a peer is wrong, or lies"
        )
        others = f"; {self.others} evaluated another text" if self.others else ""
        return f"{self.loss:.4f} at step {self.step} ({peers}{doubt}{others})"

    def values(self) -> dict[str, Any]:
        """As JSON values."""
        return {"step": self.step, "loss": self.loss, "peers": self.count, "spread": self.spread, "agrees": self.agrees}


def is_due(config: RunConfig, step: int, last_step: int) -> bool:
    """Whether volunteers evaluate the state after this step."""
    every = config.evaluation.every
    return bool(every) and step > 0 and (step % every == 0 or step == last_step)


def seal_evaluation(identity: Identity, run_id: bytes, made: Evaluation) -> bytes:
    """Sign it as its author."""
    body = log_pb2.Evaluation(
        step=made.step, loss=made.loss, tokens=made.tokens, set_sha256=made.set_sha256, device=made.device,
        sample=made.sample.encode()[: limits.SAMPLE_TEXT_BYTES_MAX].decode(errors="ignore"),
    )  # fmt: skip
    return seal(identity, Kind.KIND_EVALUATION, run_id, body).SerializeToString(deterministic=True)


def open_evaluation(data: bytes, *, run_id: bytes) -> Evaluation:
    """Verify the envelope and its ranges, or raise `Refusal`. Whether its author may say so is the caller's to check."""
    opened = open_envelope(data, kind=Kind.KIND_EVALUATION, run_id=run_id, bytes_max=limits.EVALUATION_BYTES_MAX)
    return _evaluation(opened.public_key, opened.body)


def reopen_evaluation(data: bytes) -> Evaluation:
    """One that the caller has verified before: its ranges, but not its signature again. Raises `Refusal`."""
    envelope = parse(envelope_pb2.SignedEnvelope, data)
    return _evaluation(envelope.public_key, envelope.body)


def _evaluation(author: bytes, data: bytes) -> Evaluation:
    body = parse(log_pb2.Evaluation, data)
    good = (
        len(author) == limits.PUBLIC_KEY_BYTES
        and 1 <= body.step <= limits.STEP_MAX
        and math.isfinite(body.loss)
        and 0 <= body.loss < LOSS_MAX
        and 1 <= body.tokens <= limits.SAMPLE_INDEX_MAX
        and len(body.set_sha256) == limits.HASH_BYTES
        and body.device in DEVICES
        and len(body.sample.encode()) <= limits.SAMPLE_TEXT_BYTES_MAX
    )
    if not good:
        raise Refusal(
            Reason.OUT_OF_RANGE, f"evaluation of step {body.step}: loss {body.loss} over {body.tokens} tokens"
        )
    return Evaluation(author, body.step, body.loss, body.tokens, body.set_sha256, body.device, body.sample)


def evaluations_from(parts: Iterable[bytes]) -> tuple[bytes, ...]:
    """The evaluations of an entry, as they were signed: how many, and their sizes. Raises `Refusal`."""
    found = tuple(parts)
    if len(found) > limits.EVALUATIONS_MAX or any(len(data) > limits.EVALUATION_BYTES_MAX for data in found):
        raise Refusal(Reason.TOO_LARGE, f"{len(found)} evaluations, at most {limits.EVALUATIONS_MAX}")
    return found


def figures(envelopes: Iterable[bytes], run_id: bytes) -> list[Figure]:
    """The figure of each step that these signed evaluations are about, oldest first. Those that do not verify are left out."""
    by_step: dict[int, dict[bytes, Evaluation]] = {}
    for data in envelopes:
        try:
            found = open_evaluation(data, run_id=run_id)
        except Refusal:
            continue
        by_step.setdefault(found.step, {}).setdefault(found.author, found)
    return [figure(list(found.values())) for _, found in sorted(by_step.items())]


def figure(found: list[Evaluation]) -> Figure:
    """The figure of one step; at least one evaluation, and one of each author."""
    sets: dict[bytes, list[Evaluation]] = {}
    for one in found:
        sets.setdefault(one.set_sha256, []).append(one)
    most = max(sets.values(), key=lambda group: (len(group), group[0].set_sha256))
    kinds: dict[str, list[float]] = {}
    for one in most:
        kinds.setdefault(one.device, []).append(one.loss)
    spread = max(max(losses) - min(losses) for losses in kinds.values())
    return Figure(most[0].step, statistics.median(one.loss for one in most), len(most), spread, len(found) - len(most))
