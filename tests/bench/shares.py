"""What the check of votes makes of honest peers with unequal shares: `difference` by the samples that a peer votes with.

All peers are honest, and in one process. Each step checks every peer's votes with the gradients on four of its samples and on
four of each other peer's, as real checkers do (node/training/vote_checks.py). Decides nothing: coordinator/clock/trust.py does.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from node.data.corpus import open_corpus
from node.data.samples import Samples
from node.model.gradients import loss
from node.model.spec import build
from node.optim.demo import DeMo, DeMoConfig
from node.training.vote_checks import find, seen_votes, transformed
from tests.bench.trial import model_spec

WARMUP_STEPS = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shares", type=int, nargs="+", default=[8, 8, 8, 40], help="samples of each peer in a step")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--checked", type=int, default=32, help="samples that a check looks at")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--data", type=Path, default=None, help="a text file (default: the standard library)")
    parser.add_argument("--out", type=Path, default=Path("swarmentum-out/shares"))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    context = 64
    samples = Samples(open_corpus(options.data, options.out).tokens, context, seed=0)
    models = [build(model_spec(options.width, 2, context), 0) for _ in options.shares]
    demos = [DeMo(model, DeMoConfig(beta=0.95, beta2=0.99)) for model in models]
    found: list[list[float]] = [[] for _ in options.shares]
    for step in range(options.steps):
        lr = float(np.float32(options.lr * min(1.0, (step + 1) / WARMUP_STEPS)))
        first, entry, seen, gradients = step * sum(options.shares), [], [], []
        for model, demo, share in zip(models, demos, options.shares, strict=True):
            _backward(model, samples, first, min(options.checked, share))
            gradients.append(_transformed(demo))
            _backward(model, samples, first, share)
            votes = demo.propose(lr)
            demo.settle(True)
            entry.append((votes.size, votes.payload))
            seen.append(seen_votes(demo.config.form, votes.payload, votes.size, demo.layout.chunks))
            first += share
        for subject, own in enumerate(gradients):
            others = [gradient for other, gradient in enumerate(gradients) if other != subject]
            checks = [find(b"subject", {b"subject": seen[subject]}, own, other).difference for other in others]
            found[subject].append(statistics.median(checks))
        for demo in demos:
            demo.apply(entry, lr)
    return {
        "shares": options.shares,
        "difference_mean": [round(statistics.mean(figures), 1) for figures in found],
        "difference_least": [round(min(figures), 1) for figures in found],
    }


def _backward(model: nn.Module, samples: Samples, first: int, count: int) -> None:
    model.zero_grad()
    loss(model, torch.from_numpy(samples.batch(first, first + count))).backward()


def _transformed(demo: DeMo) -> Tensor:
    return transformed(demo.layout, [parameter.grad for parameter in demo.parameters], demo.config.transform).clone()
