"""One DeMo step (own gradient to votes, everybody's votes applied) against AdamW and the reference, in one run."""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import torch
from torch import nn

from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.base import BaseConfig, BaseName
from node.optim.demo import DeMo, DeMoConfig
from node.optim.votes import groups as votes
from tests.bench.timing import medians_ms
from tests.unit.optim.reference import Reference

REFERENCE_PARAMETERS_MAX = 200_000
"""The reference is timed on a model of at most this size and scaled: its time grows in proportion to chunks."""

LR = float(np.float32(1e-3))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, default=50_000_000, help="parameters, about (default 50 million)")
    parser.add_argument("--peers", type=int, default=4, help="peers whose votes are applied (default 4)")
    parser.add_argument("--group-size", type=int, default=128, choices=votes.GROUP_SIZES)
    parser.add_argument(
        "--selection",
        default="groups",
        choices=("groups", "random"),
        help="random: one coefficient in 16 (the reference keeps the default's)",
    )
    parser.add_argument("--base", default="sign", choices=get_args(BaseName), help="what moves the parameters")
    parser.add_argument("--block", type=int, default=0, help="of base muon: 64 for chunks alone (default 0: whole)")
    parser.add_argument("--iterations", type=int, default=5, help="of base muon (default 5)")
    parser.add_argument("--output", default="real", help="of base muon by chunks: real or sign")
    parser.add_argument("--beta2", type=float, default=0.0, help="of the private second moment (default 0: none)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are reported (default 7)")
    parser.add_argument("--device", default="cpu")


def measure(options: argparse.Namespace) -> dict[str, object]:
    named = parameters(options.params, options.device)
    base = BaseConfig(options.base, block=options.block, iterations=options.iterations, output=options.output)
    config = DeMoConfig(selection=options.selection, group_size=options.group_size, beta2=options.beta2, base=base)
    DeMo([("small", nn.Parameter(torch.zeros(64, 64, device=options.device)))], config)  # imports and compiles
    start = _taken(options.device)
    demo = DeMo(named, config)
    payload_bytes = demo.form.body_bytes(demo.layout.chunks, config.size)
    entry = contributions(payload_bytes, options.peers, config.size)
    peak = peak_bytes(demo_step(demo, entry), options.device)
    with mock.patch.dict(os.environ, {BACKEND_VARIABLE: "torch"}):
        portable = DeMo(named, config)
    weights = [tensor for _, tensor in named]
    actions = demo_step(demo, entry)
    actions |= {f"portable_{name}": action for name, action in demo_step(portable, entry).items()}
    actions |= {
        f"adamw_{kind}": torch.optim.AdamW(weights, lr=LR, **{kind: True}).step for kind in ("fused", "foreach")
    }
    times = medians_ms({name: synchronised(action, options.device) for name, action in actions.items()}, options.rounds)
    step_ms, portable_ms = (sum(times[prefix + part] for part in STEP) for prefix in ("", "portable_"))
    reference_ms = reference_step_ms(options.peers, options.group_size, demo.layout.parameters)
    return {
        "params": demo.layout.parameters,
        "step_ms": round(step_ms, 1),
        "portable_ms": round(portable_ms, 1),
        **{f"{name}_ms": round(value, 1) for name, value in times.items()},
        "ratio_to_adamw_fused": round(step_ms / times["adamw_fused"], 2),
        "ratio_to_adamw_foreach": round(step_ms / times["adamw_foreach"], 2),
        "ratio_to_portable": round(step_ms / portable_ms, 3),
        "reference_ms": round(reference_ms, 1),
        "reference_scaled_from_params": min(REFERENCE_PARAMETERS_MAX, demo.layout.parameters),
        "ratio_to_reference": round(step_ms / reference_ms, 5),
        "peak_bytes_per_param": peak and start and round((peak - start) / demo.layout.parameters, 2),
        "backend": demo.backend,
        "device": torch.device(options.device).type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "peers_decoded": options.peers,
        "selection": options.selection,
        "size": config.size,
        "base": options.base,
        "block": options.block,
        "iterations": options.iterations,
        "output": options.output,
        "beta2": options.beta2,
        "payload_bytes": payload_bytes,
    }


def _taken(device: str) -> int | None:
    return torch.cuda.memory_allocated(device) if _is_card(device) else memory_bytes("VmRSS")


def _is_card(device: str) -> bool:
    return torch.device(device).type == "cuda"


def peak_bytes(step: dict[str, Callable[[], object]], device: str) -> int | None:
    """The most memory that this process held during one step, on a card of that; None where Linux does not say."""
    if _is_card(device):
        torch.cuda.reset_peak_memory_stats(device)
        for action in step.values():
            action()
        return torch.cuda.max_memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    except OSError:
        return None
    for action in step.values():
        action()
    return memory_bytes("VmHWM")


def memory_bytes(field: str) -> int | None:
    """A line of `/proc/self/status`, or None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def parameters(count: int, device: str) -> list[tuple[str, nn.Parameter]]:
    """The shapes of a small Llama of about `count` parameters: embedding, square and 8/3-wide matrices, norms.

    The embedding has 8 widths of rows and what blocks leave over, in steps of 64 rows.
    """
    width = max(64, int((count / (8 + 8 * 12)) ** 0.5) // 64 * 64)
    inner = width * 8 // 3
    block = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)] + [(width, 1)] * 2
    blocks, rest = divmod(max(0, count - 8 * width**2), sum(height * wide for height, wide in block))
    shapes = [(8 * width + round(rest / width / 64) * 64, width), *block * blocks]
    named = []
    for index, (height, wide) in enumerate(shapes):
        shape = (height, wide) if wide > 1 else (height,)
        parameter = nn.Parameter(torch.randn(shape, device=device) * 0.02)
        parameter.grad = torch.randn(shape, device=device)
        named.append((f"p{index}", parameter))
    return named


def contributions(payload_bytes: int, peers: int, size: int) -> list[tuple[int, bytes]]:
    random = np.random.default_rng(0)
    return [(size, random.bytes(payload_bytes)) for _ in range(peers)]


STEP = ("propose", "settle", "apply")


def demo_step(demo: DeMo, entry: list[tuple[int, bytes]]) -> dict[str, Callable[[], object]]:
    return {
        "propose": lambda: demo.propose(LR),
        "settle": lambda: demo.settle(accepted=True),
        "apply": lambda: demo.apply(entry, LR),
    }


def synchronised(action: Callable[[], object], device: str) -> Callable[[], object]:
    if not _is_card(device):
        return action
    return lambda: (action(), torch.cuda.synchronize())


def reference_step_ms(peers: int, group_size: int, count: int) -> float:
    """One step of the reference, scaled to `count` parameters."""
    side = int(min(count, REFERENCE_PARAMETERS_MAX) ** 0.5) // 64 * 64
    random = np.random.default_rng(0)
    start = [random.standard_normal((side, side)).astype(np.float32)]
    reference = Reference(start, beta=0.999, weight_decay=0.0, clip_norm=1.0)
    entry = contributions(votes.vote_bytes(len(reference.momentum), group_size), peers, group_size)
    began = time.perf_counter()
    reference.propose(start, LR, group_size)
    reference.settle(accepted=True)
    reference.apply(entry, LR)
    return (time.perf_counter() - began) * 1e3 * count / side**2
