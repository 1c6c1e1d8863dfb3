"""The compiled step against the same step in plain loops (ADR 7): bits, and the least CPU time of alternating rounds."""

import argparse
import time

import numpy as np
import torch

from node.optim.backends.numba.backend import Fused
from node.optim.base import Base, BaseConfig
from node.optim.exact import transforms
from node.optim.layout import Layout
from node.optim.step import decay_factor
from tests.bench import plain_loops
from tests.bench.plain_loops import CHUNK, GROUP

COLUMNS, PEERS, BETA, WEIGHT_DECAY = 1024, 4, 0.9, 0.1
LR = float(np.float32(1e-3))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, default=10_000_000, help="parameters, about (default 10 million)")
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds; the least time is reported (default 25)")


def measure(options: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = max(1, options.params // COLUMNS // 64) * 64
    gradient, weights = (torch.randn(rows, COLUMNS, generator=generator) for _ in range(2))
    layout = Layout.of_shapes([("weight", (rows, COLUMNS))])
    fused = Fused(layout, Base(BaseConfig(), layout, torch.device("cpu")))
    chunks = rows * COLUMNS // CHUNK
    momenta = [torch.zeros(chunks, 64, 64) for _ in range(2)]
    packed, taken = (
        np.empty(chunks * CHUNK // GROUP, dtype=np.uint8),
        np.empty(chunks * CHUNK // GROUP, dtype=np.float32),
    )
    payloads = np.random.default_rng(1).integers(0, 256, (PEERS, len(packed)), dtype=np.uint8)
    ballots = [(GROUP, payload.tobytes()) for payload in payloads]
    moved = [weights.clone() for _ in range(2)]
    table, beta, one = fused._table(GROUP), np.float32(BETA), np.float32(1)
    numbers = np.float32(decay_factor(LR, WEIGHT_DECAY)), np.float32(LR)
    bases = plain_loops.bases(transforms.integer_basis(torch.device("cpu")).numpy().astype(np.int16))
    loose = gradient.numpy(), momenta[1].view(-1).numpy(), beta, one, table, packed, taken
    actions = {
        "vote": lambda: fused.take([gradient], momenta[0], BETA, 1.0, GROUP),
        "plain_vote": lambda: plain_loops.vote(*loose),
        "apply": lambda: fused.apply(ballots, [moved[0]], LR, WEIGHT_DECAY),
        "plain_apply": lambda: plain_loops.apply(moved[1].numpy(), payloads, *numbers, *bases),
    }
    found = {name: action() for name, action in actions.items()}  # the first call compiles
    votes, values = (tensor.numpy() for tensor in found["vote"])
    equal = np.array_equal(votes, packed) and np.array_equal(values, taken)
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(options.rounds):
        for name, action in actions.items():
            began = time.thread_time()
            action()
            best[name] = min(best[name], time.thread_time() - began)
    return {
        "params": rows * COLUMNS,
        "equal_votes": bool(equal),
        "momentum_difference_max": float((momenta[0] - momenta[1]).abs().max()),
        "equal_parameters": torch.equal(*(tensor.view(torch.int32) for tensor in moved)),
        **{f"{name}_ms": round(1e3 * value, 2) for name, value in best.items()},
        "ratio": round((best["plain_vote"] + best["plain_apply"]) / (best["vote"] + best["apply"]), 2),
    }
