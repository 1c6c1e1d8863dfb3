"""The method `paper` as a setting: of a run, of a replica, and of `DeMoOptimizer`."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from coordinator.commands.planning import planned
from node.commands.model_layout import layout_of
from node.optim.base import BaseConfig
from node.optim.demo import DeMo
from node.optim.local import LocalConfig
from node.optim.paper_demo import PaperConfig, PaperDeMo
from node.optim.torch_optimizer import DeMoOptimizer
from node.training.optimizers import form_of, optimizer_of, paper_config
from node.training.replica import Replica
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig, TrustConfig, config_from_json
from tests.unit.optim.test_settings import LR

PAPER = OptimizerConfig(method="paper")


def test_unset_keys_have_the_papers_defaults_on_both_sides_of_the_wire() -> None:
    assert (PAPER.beta, PAPER.beta2, PAPER.top_k, PAPER.base.name, PAPER.chunk) == (0.999, 0.0, 32, "sign", 64)
    assert paper_config(PAPER, PAPER.vote_size) == PaperConfig(clip_norm=1.0)
    config = RunConfig(optimizer=OptimizerConfig(method="paper", beta=0.9, chunk=32, top_k=8))
    assert config_from_json(config.canonical_json()) == config
    assert paper_config(config.optimizer, 16) == PaperConfig(beta=0.9, chunk=32, top_k=16, clip_norm=1.0)


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ({"overlap": True}, "overlap = true", "look-ahead"),
        ({"cap": 7}, "cap = 7", "has no cap"),
        ({"magnitudes": True, "base": {"name": "sgd"}}, "magnitudes = true", "the sign at the end"),
        ({"local": {"steps": 4}}, "local.steps", "votes on gradients"),
        ({"base": {"name": "muon"}}, "base", "applies the sign"),
        ({"values": "8bit"}, 'values = "8bit"', "16 bits"),
        ({"transform": "hadamard"}, 'transform = "hadamard"', "DCT"),
        ({"selection": "groups"}, 'selection = "groups"', "largest coefficients of a chunk"),
        ({"beta2": 0.99}, "beta2 = 0.99", "no second moment"),
        ({"decay": "matrices"}, 'decay = "matrices"', "all parameters"),
        ({"method": "demo", "values": "16bit"}, 'values = "16bit"', 'method = "paper"'),
        ({"method": "demo", "chunk": 32}, "chunk = 32", "chunks of 64"),
    ],
)
def test_settings_of_the_other_method_are_refused_by_key_and_reason(
    settings: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ValidationError) as error:
        OptimizerConfig.model_validate({"method": "paper", **settings})
    assert key in str(error.value)
    assert reason in str(error.value)


def test_checks_of_votes_do_not_work_with_it() -> None:
    with pytest.raises(ValidationError, match=r"trust.enabled.*optimizer.method"):
        RunConfig(optimizer=PAPER, trust=TrustConfig(enabled=True), clock=ClockConfig(min_peers=3))
    made, said = planned(RunConfig(optimizer=PAPER, clock=ClockConfig(min_peers=3)), 7000, anchor=True)
    assert not made.trust.enabled
    assert "method paper" in said


def test_run_create_knows_how_long_its_payloads_are() -> None:
    optimizer = OptimizerConfig(method="paper", chunk=32, top_k=8)
    facts = layout_of(RunConfig(optimizer=optimizer))
    model = nn.Linear(64, 96)  # 6 chunks of 32 x 32, and of the bias 3 of 1 x 32
    layout, form = form_of(model, optimizer)
    assert (form.votes(layout.chunks, 8), form.bytes_max(layout.chunks, 8)) == (72, 9 + 4 * 72)
    assert facts.payload_bytes > 4 * facts.votes > 4 * facts.parameters * 8 / 1024


def test_a_replica_changes_its_k() -> None:
    model = nn.Linear(64, 96)
    replica = Replica(bytes(32), model, OptimizerConfig(method="paper", chunk=32), 8)
    assert isinstance(replica.demo, PaperDeMo)
    sizes = replica.payload_bytes
    for size in (8, 64):
        replica.size = size
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(size))
        votes = replica.demo.propose(LR)
        assert (votes.size, len(votes.payload)) == (size, sizes[size])
        replica.demo.settle(True)
    assert isinstance(optimizer_of(model, OptimizerConfig(), 128, b""), DeMo)
    assert len(replica.digest()) == 32


def test_the_optimizer_alone_is_the_papers_method_and_learns() -> None:
    torch.manual_seed(1)
    model, inputs = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(64, 16)
    wanted = inputs[:, :1] * inputs[:, 1:2]
    optimizer = DeMoOptimizer(model, 1e-2, method="paper", chunk=16, top_k=8, clip_norm=None)
    twin = PaperDeMo(
        [(name, nn.Parameter(p.detach().clone())) for name, p in model.named_parameters()],
        PaperConfig(chunk=16, top_k=8),
    )
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        losses.append(loss.item())
        for own, parameter in zip(twin.parameters, model.parameters(), strict=True):
            own.grad = None if parameter.grad is None else parameter.grad.clone()
        lr = float(torch.tensor(1e-2))
        votes = twin.propose(lr)
        twin.settle(True)
        twin.apply([(votes.size, votes.payload)], lr)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters, model.parameters(), strict=True))
    assert losses[-1] < 0.5 * losses[0]
    again = DeMoOptimizer(model, 1e-2, method="paper", chunk=16, top_k=8)
    again.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="chunks of 16"):
        DeMoOptimizer(model, 1e-2, method="paper", chunk=32).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base": BaseConfig("muon")}, "base"),
        ({"beta2": 0.99}, "beta2"),
        ({"group_size": 16}, "group_size"),
        ({"local": LocalConfig(steps=3)}, "local"),
        ({"values": "8bit", "overlap": True}, "overlap, values"),
        ({"chunk": 63}, "chunk = 63: expected is 8, 16, 32, 64 or 128"),
    ],
)
def test_the_optimizer_alone_refuses_what_the_paper_has_not(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DeMoOptimizer(nn.Linear(4, 4), 1e-3, method="paper", **settings)
    with pytest.raises(ValueError, match="methods are demo"):
        DeMoOptimizer(nn.Linear(4, 4), 1e-3, chunk=32)
