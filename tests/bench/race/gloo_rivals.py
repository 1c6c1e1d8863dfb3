"""Rivals over torch.distributed and gloo: DDP with AdamW, and DiLoCo. One process is one peer."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.bench.race.task import ADAMW_BETAS, CLIP_NORM, Peer, finite

PORT: Final = 29_500
EXCHANGE_SECONDS_MAX: Final = 300
"""A collective that takes longer fails: 25 M parameters at 20 Mbit/s take a minute."""

DDP_LR: Final = 2e-3
"""The best of 1e-3 ... 4e-3 for AdamW-DDP on this text (docs/benchmarks.md)."""
DILOCO_LR: Final = 1e-3
"""The best of 1e-3 ... 4e-3 for DiLoCo's inner AdamW with few exchanges (docs/benchmarks.md)."""
OUTER_LR: Final = 0.7
OUTER_MOMENTUM: Final = 0.9
"""Nesterov SGD: what the authors of DiLoCo chose (arXiv 2311.08105)."""


def connect(peer: Peer, address: str) -> None:
    """All peers meet at rank 0's address; gloo uses the one interface of the namespace."""
    os.environ["GLOO_SOCKET_IFNAME"] = "wan"
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{PORT}", rank=peer.rank, world_size=peer.task.peers,
        timeout=timedelta(seconds=EXCHANGE_SECONDS_MAX),
    )  # fmt: skip


def ddp(peer: Peer, address: str) -> None:
    """torch DDP with its defaults (buckets of 25 MB, fp32, sent while the backward pass goes on), AdamW, clipped."""
    connect(peer, address)
    model = DistributedDataParallel(peer.model)
    adamw = torch.optim.AdamW(model.parameters(), lr=DDP_LR, betas=ADAMW_BETAS, weight_decay=0.0)
    for step in range(1, peer.task.steps + 1):
        if peer.agreed_stop(step):
            break
        set_lr(adamw, peer.task.lr(DDP_LR, step))
        adamw.zero_grad()
        found = peer.backward(model)
        finite(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM))
        adamw.step()
        peer.wrote(step, found, peer.task.batch)
    dist.destroy_process_group()


def diloco(peer: Peer, address: str) -> None:
    """DiLoCo: AdamW on the peer's own samples; each `local_steps` the mean movement is the gradient of Nesterov SGD.

    The paper exchanges each 500 steps, and finds that exchanging more often is a little better. A race of some 80 steps has
    too few for that, so `local_steps` is 10 by default. The last round may be shorter: the final weights have every step.
    """
    connect(peer, address)
    parameters = list(peer.model.parameters())
    for parameter in parameters:
        dist.broadcast(parameter.data, src=0)
    inner = torch.optim.AdamW(parameters, lr=DILOCO_LR, betas=ADAMW_BETAS, weight_decay=0.0)
    outer = [parameter.detach().clone() for parameter in parameters]
    nesterov = torch.optim.SGD(outer, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    step, round_ = 0, 0
    while step < peer.task.steps and not peer.agreed_stop(round_):
        end = min(step + peer.task.local_steps, peer.task.steps)
        while step < end:
            step += 1
            set_lr(inner, peer.task.lr(DILOCO_LR, step))
            inner.zero_grad()
            found = peer.backward()
            finite(nn.utils.clip_grad_norm_(parameters, CLIP_NORM))
            inner.step()
            if step == end:
                exchange(parameters, outer, nesterov, peer.task.peers)
            peer.wrote(step, found, peer.task.batch)
        round_ += 1
    dist.destroy_process_group()


@torch.no_grad()
def exchange(parameters: Sequence[Tensor], outer: Sequence[Tensor], nesterov: torch.optim.SGD, peers: int) -> None:
    """All peers go on from the same point: one all-reduce of all parameters."""
    moved = torch.cat([(there - here).flatten() for there, here in zip(outer, parameters, strict=True)])
    dist.all_reduce(moved)
    moved /= peers
    for there, part in zip(outer, moved.split([tensor.numel() for tensor in outer]), strict=True):
        there.grad = part.view_as(there)
    nesterov.step()
    for here, there in zip(parameters, outer, strict=True):
        here.copy_(there)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
