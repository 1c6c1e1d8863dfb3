"""One training run of the convergence bench: a method, a rate and a seed, with simulated peers in one process.

The text is cut in three: what is trained on, what rates are chosen on, and what is reported (`held_out`), which no choice
has seen. A run that diverges has no loss.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from coordinator.clock import rules
from node.data.samples import Samples
from node.data.tokens import Tokens
from node.model.device import autocast
from node.model.gradients import loss
from node.model.spec import SMALL_LLAMA, ModelSpec, build, parameter_count
from node.pictures import allreduce_bytes
from protos.optimizer_config import OptimizerConfig
from tests.bench.methods import METHODS, RUN_SCHEDULE

Windows = npt.NDArray[np.int64]
"""[samples, context + 1] token ids."""

VALIDATION_BATCH: Final = 64
SIZES: Final[Mapping[str, tuple[int, int]]] = {
    "0.7M": (128, 3),
    "0.9M": (128, 4),
    "5M": (384, 3),
    "25M": (512, 7),
    "92M": (768, 12),
}
"""Name -> width and layers: 672,640, 885,888, 5,851,776, 23,993,856 and 92,218,368 parameters."""
SCHEDULES: Final[Mapping[str, Callable[[float], float]]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}
"""What the learning rate is multiplied by after the warm-up, when `done` (0 <= done < 1) of the rest is over."""


@dataclass(frozen=True)
class Run:
    """Everything that decides a run's bits (with the versions of torch and of the code); equal runs are not repeated."""

    method: str
    settings: Mapping[str, Any]
    lr: float
    seed: int
    steps: int
    schedule: str
    warmup: float
    peers: int
    batch: int
    context: int
    width: int
    layers: int
    validation: int
    data: str
    data_sha256: str
    held_out: int
    """Windows that are reported."""
    device: str = "cpu"
    """A device other than a CPU computes the forward pass in bf16, as a peer there does."""

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Outcome:
    """What a run gave. The losses are None where it diverged; `bytes_step` is a peer's mean; `digest` is of all weights."""

    loss: float | None
    """On the windows that rates are chosen on."""
    bytes_step: float
    params: int
    seconds: float
    digest: str
    held_out: float | None = None
    """On the windows that are reported."""

    @property
    def ratio(self) -> float:
        """How many times more an fp32 all-reduce sends."""
        return allreduce_bytes(self.params) / self.bytes_step if self.bytes_step else math.inf

    @property
    def badness(self) -> float:
        """What a rate is chosen by."""
        return math.inf if self.loss is None else self.loss

    @property
    def reported(self) -> float:
        """What a table shows; infinite where the run diverged."""
        return math.inf if self.held_out is None else self.held_out


@dataclass(frozen=True)
class Split:
    """A text in three parts that share no window."""

    samples: Samples
    """To train on."""
    validation: Windows
    held_out: Windows


def split(tokens: Tokens, run: Run) -> Split:
    """Cut the last `held_out` windows off the text, and `validation` windows before them.

    Raises ValueError for a text whose tail would be more than a third of it.
    """
    tail = (run.held_out + run.validation) * run.context + 1
    if 3 * tail > len(tokens):
        raise ValueError(
            f"{run.data}: {run.held_out} held-out and {run.validation} validation windows of {run.context} tokens are more "
            f"than a third of its {len(tokens)} tokens; give a longer text, or lower --held-out and --validation"
        )
    first = len(tokens) - tail
    windows = [first + index * run.context for index in range(run.held_out + run.validation)]
    kept = np.stack([np.asarray(tokens[at : at + run.context + 1]).astype(np.int64) for at in windows])
    samples = Samples(tokens[: first + 1], run.context, run.seed)
    return Split(samples, kept[: run.validation], kept[run.validation :])


def train(run: Run, parts: Split, advance: Callable[[], None] = lambda: None) -> Outcome:
    """One run from its seed: the same bits every time on one machine. Sample ranges of the peers never overlap."""
    start = time.perf_counter()
    device = torch.device(run.device)
    model = build(model_spec(run.width, run.layers, run.context), run.seed, context=run.context).to(device)
    training = METHODS[run.method].make(model, run.peers, **METHODS[run.method].settings)
    taken = [0] * run.peers
    sent = 0.0

    def backward(peer: int) -> None:
        first = (taken[peer] * run.peers + peer) * run.batch
        taken[peer] += 1
        model.zero_grad()
        batch = torch.from_numpy(parts.samples.batch(first, first + run.batch)).to(device)
        with autocast(device):
            mean = loss(model, batch)
        mean.backward()  # type: ignore[no-untyped-call]

    try:
        for step in range(run.steps):
            sent += training.step(backward, learning_rate(run, step))
            advance()
        value = validation_loss(model, torch.from_numpy(parts.validation).to(device))
        held_out = validation_loss(model, torch.from_numpy(parts.held_out).to(device))
    except ArithmeticError:  # a gradient or a momentum that is not finite
        value = held_out = math.nan
    seconds = round(time.perf_counter() - start, 1)
    losses = (value, held_out) if math.isfinite(value) and math.isfinite(held_out) else (None, None)
    return Outcome(losses[0], sent / run.steps, parameter_count(model), seconds, digest(model), losses[1])


def learning_rate(run: Run, step: int) -> float:
    """Of step 0..steps-1: linear warm-up to `lr`, then the schedule; exact in fp32, as it travels in a log entry."""
    if run.schedule == RUN_SCHEDULE:
        return float(np.float32(rules.learning_rate(OptimizerConfig(lr=run.lr), run.steps, step + 1)))
    warmup = max(1, int(run.steps * run.warmup))
    if step < warmup:
        return float(np.float32(run.lr * (step + 1) / warmup))
    return float(np.float32(run.lr * SCHEDULES[run.schedule]((step - warmup) / (run.steps - warmup))))


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor) -> float:
    """Mean over int64 `tokens` [samples, context + 1], in nats a token."""
    parts = [tokens[first : first + VALIDATION_BATCH] for first in range(0, len(tokens), VALIDATION_BATCH)]
    return sum(float(loss(model, part)) * len(part) for part in parts) / len(tokens)


def model_spec(width: int, layers: int, context: int) -> ModelSpec:
    """The small Llama of `node.model`, with another width and depth."""
    heads = max(1, width // 32)
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": context}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    return ModelSpec(config={**SMALL_LLAMA, **sizes, **shape})


def digest(model: nn.Module) -> str:
    """SHA-256 over every bit of the weights, hex."""
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        hasher.update(parameter.detach().cpu().numpy().tobytes())
    return hasher.hexdigest()
