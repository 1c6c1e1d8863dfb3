"""A check as the training thread makes it: on the plain gradient, which changes nothing, or not at all."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.data.samples import Samples
from node.training.loop import Trainer
from node.training.replica import Replica
from node.training.telemetry import Summary
from protos.assignment import Range, SampleShare
from protos.identity import Identity
from protos.log import Contribution, Entry, SignedEntry, Verdict
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig, TrustConfig
from protos.slices import Update
from protos.tick import Tick

RUN, VOCABULARY, CONTEXT, SHARE = bytes(range(32)), 64, 8, 16
HONEST, FLIPPED, ME = (Identity.from_seed(bytes([n]) * 32) for n in range(3))
POOL = (Range(0, 3 * SHARE),)
LR = float(np.float32(1e-3))


class Table(nn.Module):
    """What follows what."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(0.02 * torch.randn(VOCABULARY, VOCABULARY, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


def samples() -> Samples:
    tokens = np.random.default_rng(0).integers(0, 8, 4000).cumsum() % VOCABULARY
    return Samples(tokens.astype(np.uint8), CONTEXT, 0)


def replica(local_steps: int) -> Replica:
    torch.manual_seed(0)
    local: dict[str, object] = {
        "magnitudes": True,
        "base": {"name": "sgd"},
        "beta2": 0,
        "local": {"steps": local_steps},
    }
    optimizer = OptimizerConfig.model_validate({"group_size": 8, **(local if local_steps > 1 else {})})
    return Replica(RUN, Table(), optimizer, 8)


def votes(local_steps: int, share: Range) -> Update:
    peer = replica(local_steps)
    peer.gradients(samples(), (share,), 4, None, lambda: False)
    peer.vote(1, LR)
    made = peer.demo.open_votes
    return Update(1, made.size, made.payload)


def trainer_of(local_steps: int, stopping: Callable[[], bool], folder: Path, found: list[Verdict]) -> Trainer:
    shares = tuple(SampleShare(peer.public_key, SHARE) for peer in (HONEST, FLIPPED, ME))
    trainer = Trainer(
        config=RunConfig(clock=ClockConfig(min_peers=3), trust=TrustConfig(enabled=True)),
        replica=replica(local_steps),
        swarm=SimpleNamespace(found=found.extend),  # type: ignore[arg-type]
        samples=samples(),
        store=None,  # type: ignore[arg-type]
        private_path=folder / "private.pt",
        micro_batch=4,
        autocast=None,
        summary=Summary(ME.peer_id, "cpu"),
        steps=None,  # type: ignore[arg-type]
        stopping=stopping,  # type: ignore[arg-type]
    )
    trainer.checker.ticks = {
        1: Tick(1, RUN, 1, shares, POOL, 0),
        2: Tick(2, RUN, 1, shares, POOL, 0),
    }  # the next one is here, too
    return trainer


def committed(local_steps: int) -> Any:
    honest = votes(local_steps, Range(0, SHARE))
    other = votes(local_steps, Range(SHARE, 2 * SHARE))
    front = len(other.votes) - 256  # the scale, where the votes have one; then 512 codes of 4 bits, the sign on top
    flipped = Update(1, 8, other.votes[:front] + bytes(byte ^ 0b10001000 for byte in other.votes[front:]))
    parts = tuple(
        Contribution(peer.public_key, peer.public_key, 1, SHARE, 1, 1.0, 1000, place)
        for place, peer in enumerate((HONEST, FLIPPED, ME), 1)
    )
    entry = Entry(1, RUN, parts, 0, b"", (), 0)
    mine = votes(local_steps, Range(2 * SHARE, 3 * SHARE))
    by_author = {HONEST.public_key: honest, FLIPPED.public_key: flipped, ME.public_key: mine}
    return SimpleNamespace(signed=SignedEntry(entry, b"h" * 32, b""), by_author=by_author)


@pytest.mark.parametrize("local_steps", [1, 4])
def test_votes_that_fit_their_samples_are_told_from_flipped_ones(local_steps: int, tmp_path: Path) -> None:
    found: list[Verdict] = []
    trainer = trainer_of(local_steps, lambda: False, tmp_path, found)
    before = trainer.replica.whole_digest()
    trainer.checker.check(committed(local_steps))
    own = {verdict.subject: verdict.own for verdict in found}
    assert own[HONEST.public_key] > 3.0 > -3.0 > own[FLIPPED.public_key], own
    assert trainer.replica.whole_digest() == before
    if trainer.replica.local is not None:
        assert not trainer.replica.local.state_dict()["state"], "the check moved the checker's own AdamW"


def test_a_gradient_that_is_not_finite_accuses_nobody(tmp_path: Path) -> None:
    """Its figures would be NaN, for which the coordinator refuses the whole report."""
    found: list[Verdict] = []
    trainer = trainer_of(1, lambda: False, tmp_path, found)
    with torch.no_grad():
        trainer.replica.demo.parameters[0][3, 3] = torch.nan  # type: ignore[attr-defined]
    trainer.checker.check(committed(1))
    assert not found


def test_a_peer_that_is_about_to_stop_accuses_nobody(tmp_path: Path) -> None:
    """Of no samples the gradient is none, which no votes fit."""
    found: list[Verdict] = []
    for asked_before in range(3):
        asked = iter([False] * asked_before)
        trainer_of(1, lambda: next(asked, True), tmp_path, found).checker.check(committed(1))  # noqa: B023
    assert not found
