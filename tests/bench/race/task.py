"""What every rival of the race has in common: model, weights, text, samples, schedule, clipping, and what it writes.

A rival that differs in any of these would be another experiment. Refuses nothing: the parent checked the options.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from coordinator.clock.rules import learning_rate
from node.data.corpus import open_corpus
from node.data.samples import Samples
from node.model.gradients import loss
from node.model.spec import SMALL_LLAMA, ModelSpec, build
from protos.optimizer_config import OptimizerConfig

CONTEXT: Final = 128
"""Tokens of a sample: a run's default."""
CLIP_NORM: Final = 1.0
"""A run's default, and what DeMo's and DiLoCo's authors clip to."""
ADAMW_BETAS: Final = (0.8, 0.99)
"""The best of six pairs for AdamW-DDP on this model (docs/benchmarks.md), for every rival that runs AdamW."""
HELD_OUT_SAMPLES: Final = 800
"""102,400 tokens that no rate was chosen on."""
WEIGHTS: Final = "weights.pt"
STOP: Final = "stop"


@dataclass(frozen=True)
class Task:
    """One race; `folder` is the rival's own."""

    folder: str
    peers: int
    width: int
    layers: int
    batch: int
    """Samples of a peer in a step."""
    steps: int
    seconds: float
    """From the end of the first step."""
    seed: int
    data: str | None
    """A text file, or None for the sources of Python's standard library."""
    mbit: float
    """Of each peer's link, each way; 0: no limit."""
    local_steps: int
    """Between two exchanges of the rivals that take local steps."""

    def config(self) -> dict[str, object]:
        """The small Llama of `node.model` in this width and depth."""
        heads = max(1, self.width // 32)
        sizes = {"hidden_size": self.width, "intermediate_size": 3 * self.width, "num_hidden_layers": self.layers}
        return {**SMALL_LLAMA, **sizes, "num_attention_heads": heads, "num_key_value_heads": heads}

    def model(self) -> nn.Module:
        """The same weights for every rival: those that a run's peers build from its seed."""
        return build(ModelSpec(config=self.config()), self.seed, context=CONTEXT)

    def samples(self, cache: Path) -> Samples:
        """The same order of samples for every rival; the last 1 % of the text is held out."""
        text = open_corpus(None if self.data is None else Path(self.data), cache)
        return Samples(text.tokens, CONTEXT, self.seed)

    def lr(self, peak: float, step: int) -> float:
        """Of step 1..steps: a run's default schedule (10 steps of warm-up, cosine to a tenth) with another peak."""
        return learning_rate(OptimizerConfig(lr=peak), self.steps, min(step, self.steps))

    def write(self) -> Path:
        """The file that the rival's processes read."""
        path = Path(self.folder) / "task.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text()))


class Peer:
    """One peer of a rival: its samples, its lines, and when it stops."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.folder = Path(task.folder)
        self.model = task.model()
        self._samples = task.samples(self.folder / f"cache-{rank}")
        self._taken = 0
        self._first_at: float | None = None
        self._lines = (self.folder / f"{rank}.jsonl").open("w")

    def backward(self, model: nn.Module | None = None) -> float:
        """Gradient of the peer's next batch, added to `.grad`; returns its loss before any update, nats a token."""
        first = (self._taken * self.task.peers + self.rank) * self.task.batch
        self._taken += 1
        found = loss(model or self.model, torch.from_numpy(self._samples.batch(first, first + self.task.batch)))
        found.backward()  # type: ignore[no-untyped-call]
        return float(found.detach())

    def wrote(self, step: int, loss_nats: float, samples: int) -> None:
        """A step is over: `samples` of this peer went into it."""
        now = time.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        line = {"step": step, "loss": loss_nats, "samples": samples, "at": now}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    @property
    def late(self) -> bool:
        """Whether the time that the race lasts is over for this peer."""
        return self._first_at is not None and time.monotonic() - self._first_at > self.task.seconds

    def agreed_stop(self, round_: int) -> bool:
        """Whether all peers of a lockstep rival end before this round, without a word on the network.

        Rank 0 writes "stop before round n + 1" at the start of round n. No peer starts round n + 1 before all have done
        round n, so that all see it in time.
        """
        path = self.folder / STOP
        if self.rank == 0 and self.late and not path.exists():
            fresh = path.with_suffix(".new")
            fresh.write_text(str(round_ + 1))
            fresh.rename(path)
        return path.exists() and round_ >= int(path.read_text())

    def finish(self) -> None:
        """Rank 0 leaves the final weights."""
        self._lines.close()
        if self.rank == 0:
            fresh = self.folder / f"{WEIGHTS}.new"
            torch.save(self.model.state_dict(), fresh)
            fresh.rename(self.folder / WEIGHTS)


def finite(value: Tensor | float) -> float:
    """Raises ArithmeticError for what is no number any more."""
    if not math.isfinite(number := float(value)):
        raise ArithmeticError(f"the gradient's norm is {number}: the rival diverged; lower its learning rate")
    return number
