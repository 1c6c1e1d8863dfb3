"""Rivals with `hivemind.Optimizer` (hivemind 1.1.12): gradients averaged each step, and local steps. One process is one peer.

Settings, from hivemind's own words (the quick start of its docs, the guide in `hivemind.Optimizer`, examples/albert):
- `matchmaking_time`: "3-5s for small local runs, 10-15s over the internet or with many peers". The race takes the quick start's
  3 s, the least that is recommended.
- `averaging_timeout`: "around of 2x the actual time it takes to run all-reduce", and 10 s at least as in the quick start.
- 16 bits for gradients and state: "usually fine"; the albert example does so.
- `bandwidth`: what the link has, as the albert example asks for; `target_group_size`: a power of 2, here the peers.
- `offload_optimizer` with averaged gradients; clipping inside of the optimizer, as the albert example's LAMB does.
- One-round-stale gradients (`delay_grad_averaging`) are off: the guide calls them optional, and this rival averages each step.
- `average_state_every` of 10 with averaged gradients: "if peers hardly ever skip averaging rounds, they can average state less
  frequently".
hivemind is made for "very large batch sizes"; its quick start has 10,000 samples an epoch. A step of the race has 32, so two
things are kinder than its documents. The tracker looks more often; and a peer that has given its part of an epoch waits for the
others' parts. In a plain loop peers lost each other here within seconds: the first one stepped
alone, and the others loaded its state again and again.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from tests.bench.race.task import ADAMW_BETAS, CLIP_NORM, Peer, finite

LR: Final = 2e-3
MATCHMAKING_SECONDS: Final = 3.0
REQUEST_SECONDS: Final = 1.0
"""hivemind asks for less than `matchmaking_time`."""
AVERAGING_SECONDS_MIN: Final = 10.0
STATE_EPOCHS: Final = 10
TRACKER: Final = {"min_refresh_period": 0.1, "default_refresh_period": 0.5, "max_refresh_period": 1.0}
"""Seconds; hivemind's own are 0.5, 3 and 10."""
FIRST_PEER: Final = "first-peer.json"
MEETING_SECONDS_MAX: Final = 180.0
OTHERS_SECONDS_MAX: Final = 20.0
"""A peer goes on without what it does not see for so long."""
POLL_SECONDS: Final = 0.02


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the gradients it is given: hivemind averages them inside of its own step."""

    def step(self, closure: Any = None) -> Any:
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        finite(nn.utils.clip_grad_norm_(own, CLIP_NORM))
        return super().step(closure)


def averaging(peer: Peer, address: str) -> None:
    """Every step is an average of all peers' gradients."""
    _train(peer, address, local=False)


def local(peer: Peer, address: str) -> None:
    """Each peer steps on its own; parameters are averaged, in the background, each `local_steps` steps of all."""
    _train(peer, address, local=True)


def _train(peer: Peer, address: str, *, local: bool) -> None:
    import hivemind

    dht = hivemind.DHT(host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=_first_peer(peer), start=True)
    if peer.rank == 0:
        _tell(peer.folder / FIRST_PEER, [str(one) for one in dht.get_visible_maddrs()])
    optimizer = _optimizer(peer, dht, local=local)
    try:
        _meet(peer)
        if local:
            _each_step_counts(peer, optimizer)
        else:
            _each_epoch_counts(peer, optimizer)
    finally:
        optimizer.shutdown()
        dht.shutdown()


def _optimizer(peer: Peer, dht: Any, *, local: bool) -> Any:
    import hivemind

    task, half = peer.task, hivemind.compression.Float16Compression()
    parameters = list(peer.model.parameters())
    # a ring of 16-bit numbers sends 4 bytes a parameter
    ring_seconds = 8 * 4 * sum(p.numel() for p in parameters) / (task.mbit * 1e6) if task.mbit else 0.0

    def adamw(given: Any) -> ClippedAdamW:
        return ClippedAdamW(given, lr=LR, betas=ADAMW_BETAS, weight_decay=0.0)

    how: dict[str, Any] = {"optimizer": adamw(parameters), "use_local_updates": True}
    if not local:
        how = {"optimizer": adamw, "params": parameters, "offload_optimizer": True, "grad_compression": half}
        how |= {"average_state_every": STATE_EPOCHS, "tracker_opts": TRACKER}
        how["scheduler"] = lambda optimizer: _schedule(peer, optimizer)
    return hivemind.Optimizer(
        dht=dht,
        run_id="race",
        batch_size_per_step=task.batch,
        target_batch_size=task.batch * task.peers * (task.local_steps if local else 1),
        state_averaging_compression=half,
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=max(AVERAGING_SECONDS_MIN, 2 * ring_seconds),
        averager_opts={
            "request_timeout": REQUEST_SECONDS,
            "target_group_size": task.peers,
            **({"bandwidth": task.mbit} if task.mbit else {}),
        },
        verbose=True,
        **how,
    )


def _schedule(peer: Peer, optimizer: torch.optim.Optimizer) -> Any:
    """hivemind steps it once an epoch, from 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: peer.task.lr(LR, epoch + 1) / LR)


def _each_epoch_counts(peer: Peer, optimizer: Any) -> None:
    """A step is an epoch: the batches of a peer that went into it, and their mean loss."""
    losses: list[float] = []
    while (epoch := optimizer.local_epoch) < peer.task.steps and not peer.late:
        optimizer.zero_grad()
        losses.append(peer.backward())
        _wait_for_others(peer, optimizer)
        optimizer.step()
        if optimizer.local_epoch > epoch:
            peer.wrote(optimizer.local_epoch, statistics.fmean(losses), len(losses) * peer.task.batch)
            losses = []


def _wait_for_others(peer: Peer, optimizer: Any) -> None:
    """Say that the own part is done, and wait until all peers are seen and have done theirs."""
    tracker, until = optimizer.tracker, time.monotonic() + OTHERS_SECONDS_MAX
    tracker.report_local_progress(optimizer.local_epoch, peer.task.batch)
    while time.monotonic() < until:
        if tracker.global_progress.num_peers >= peer.task.peers and tracker.ready_to_update_epoch:
            return
        time.sleep(POLL_SECONDS)


def _each_step_counts(peer: Peer, optimizer: Any) -> None:
    """A step is a local one."""
    for step in range(1, peer.task.steps + 1):
        if peer.late:
            break
        for group in optimizer.param_groups:
            group["lr"] = peer.task.lr(LR, step)
        optimizer.zero_grad()
        found = peer.backward()
        optimizer.step()
        peer.wrote(step, found, peer.task.batch)


def _first_peer(peer: Peer) -> list[str]:
    """Where rank 0 is; nothing for rank 0 itself."""
    path = peer.folder / FIRST_PEER
    if not peer.rank:
        return []
    _wait_for([path])
    return list(json.loads(path.read_text()))


def _meet(peer: Peer) -> None:
    """Begin when all are ready, as peers in lockstep do."""
    _tell(peer.folder / f"ready-{peer.rank}", [])
    _wait_for([peer.folder / f"ready-{rank}" for rank in range(peer.task.peers)])


def _tell(path: Path, addresses: list[str]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(addresses))
    fresh.rename(path)


def _wait_for(paths: list[Path]) -> None:
    until = time.monotonic() + MEETING_SECONDS_MAX
    while missing := [path for path in paths if not path.exists()]:
        if time.monotonic() > until:
            raise TimeoutError(
                f"{missing[0]}: another peer did not write it within {MEETING_SECONDS_MAX:.0f} s; see its log"
            )
        time.sleep(POLL_SECONDS)
