"""The default base of a run is the one of `DeMoOptimizer`, and works with the settings of votes that change sums."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.base import BY_CHUNKS
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.training.optimizers import demo_config
from protos.optimizer_config import BaseOptimizerConfig, OptimizerConfig


def test_a_run_and_the_optimizer_have_one_default_base() -> None:
    base = demo_config(OptimizerConfig(), 128, b"").base
    assert base == replace(BY_CHUNKS, muon_except=base.muon_except)
    assert OptimizerConfig(cap=7).cap == 7, "votes alone decide by chunks, so their sums are capped"
    with pytest.raises(ValidationError, match=r"does not work with `base"):
        OptimizerConfig(cap=7, base=BaseOptimizerConfig(name="muon"))


def test_a_cap_and_shared_places_with_muon_by_chunks_are_the_same_on_both_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = []
    for backend in ("numba", "torch"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        peers = []
        for peer in range(3):
            torch.manual_seed(0)
            model = nn.Linear(128, 128)
            config = DeMoConfig(selection="random", one_in=8, cap=7, base=BY_CHUNKS, seed=b"run")
            peers.append(DeMo(model, config))
            for number, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * peer + number)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        votes = [peer.propose(2.0**-8) for peer in peers]
        for peer in peers:
            peer.settle(True)
            peer.apply([(it.size, it.payload) for it in votes], 2.0**-8)
        digests.append({state_digest(peer.parameters, 1) for peer in peers})
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1
