"""Nesterov momentum in the peer, and the recipe that has it: DiLoCo with DeMo (arXiv 2510.03371)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from coordinator.commands.planning import recipe_of
from node.commands.model_layout import layout_of
from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.local import LocalConfig
from node.optim.torch_optimizer import DeMoOptimizer
from node.optim.voting import Nesterov
from node.training.optimizers import demo_config, local_config
from protos import toml_file
from protos.optimizer_config import OptimizerConfig
from protos.optimizer_defaults import RECIPES
from protos.run_config import ClockConfig, RunConfig, TrustConfig, config_from_json

LR = 2.0**-3
SIZED: dict[str, Any] = {"values": "8bit", "magnitudes": True, "base": BaseConfig("sgd"), "clip_norm": None}


def gradients(model: nn.Module, seed: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        drawn = torch.Generator().manual_seed(100 * seed + index)
        parameter.grad = torch.randn(parameter.shape, generator=drawn)


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 96)


def test_it_is_torch_s_nesterov() -> None:
    model, twin = network(), network()
    nesterov, sgd = Nesterov(list(model.parameters()), 0.9), torch.optim.SGD(twin.parameters(), 1.0, 0.9, nesterov=True)
    for step in range(6):
        gradients(model, step)
        gradients(twin, step)
        if step == 4:  # no gradient is a gradient of zeros
            model.bias.grad = None
            twin.bias.grad.zero_()
        before = [parameter.detach().clone() for parameter in twin.parameters()]
        nesterov.advance()
        sgd.step()
        for parameter, was, own in zip(twin.parameters(), before, model.parameters(), strict=True):
            assert own.grad is not None
            torch.testing.assert_close(own.grad, was - parameter.detach(), rtol=1e-4, atol=1e-5)


def test_the_votes_of_all_peers_come_to_dilocos_outer_optimizer() -> None:
    """With a vote for every coefficient, the peers' own momenta move the model as Nesterov on the mean gradient does."""
    config = DeMoConfig(selection="full", nesterov=0.9, beta=0.0, **SIZED)
    models, twin = [network() for _ in range(3)], network()
    peers = [DeMo(model, config) for model in models]
    sgd = torch.optim.SGD(twin.parameters(), LR, 0.9, nesterov=True)
    start = [parameter.detach().clone() for parameter in twin.parameters()]
    for step in range(8):
        entry, total = [], [torch.zeros_like(parameter) for parameter in twin.parameters()]
        for rank, (model, demo) in enumerate(zip(models, peers, strict=True)):
            gradients(model, 10 * step + rank)
            for mean, parameter in zip(total, model.parameters(), strict=True):
                assert parameter.grad is not None
                mean.add_(parameter.grad, alpha=1 / 3)
            votes = demo.propose(LR)
            demo.settle(True)
            entry.append((votes.size, votes.payload))
        for demo in peers:
            demo.apply(entry, LR)
        for mean, parameter in zip(total, twin.parameters(), strict=True):
            parameter.grad = mean
        sgd.step()
        assert len({state_digest(demo.replicated) for demo in peers}) == 1
    for ours, theirs, was in zip(models[0].parameters(), twin.parameters(), start, strict=True):
        moved, wanted = (ours - was).detach(), (theirs - was).detach()
        assert float(torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0)) > 0.999
        assert float(moved.norm()) == pytest.approx(float(wanted.norm()), rel=0.02)


def test_without_it_the_same_votes_go_less_far() -> None:
    moved = {}
    for nesterov in (0.0, 0.9):
        model = network()
        demo = DeMo(model, DeMoConfig(selection="full", nesterov=nesterov, beta=0.0, **SIZED))
        start = model.weight.detach().clone()
        for _ in range(8):
            gradients(model, 1)
            votes = demo.propose(LR)
            demo.settle(True)
            demo.apply([(votes.size, votes.payload)], LR)
        moved[nesterov] = float((model.weight.detach() - start).norm())
    # sum over t of (1 + .9 + ... + .9^t) + .9 t-th term, of 8 equal gradients, against 8
    own, total = 0.0, 0.0
    for _ in range(8):
        own = 0.9 * own + 1
        total += 1 + 0.9 * own
    assert moved[0.9] / moved[0.0] == pytest.approx(total / 8, rel=0.02)


def test_it_clips_before_the_momentum_and_keeps_its_state() -> None:
    config = DeMoConfig(nesterov=0.9, clip_norm=1.0, selection="topk", values="8bit")
    model, again = network(), network()
    demo, other = DeMo(model, config), DeMo(again, config)
    gradients(model, 1)
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())
    assert demo.propose(LR).gradient_norm == pytest.approx(norm)
    assert model.weight.grad is not None
    clipped = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float(clipped.norm()) == pytest.approx(1.9, rel=1e-3)
    other.load_state_dict(demo.state_dict())
    for each, its in ((demo, model), (other, again)):
        each.settle(True)
        gradients(its, 2)
    assert demo.propose(LR).payload == other.propose(LR).payload
    plain = DeMo(network(), DeMoConfig(selection="topk", values="8bit"))
    with pytest.raises(ValueError, match="has a Nesterov momentum, and this optimizer has no"):
        plain.load_state_dict(demo.state_dict())
    with pytest.raises(ValueError, match="has no Nesterov momentum, and this optimizer has a"):
        other.load_state_dict(plain.state_dict())


def test_what_never_has_a_gradient_has_no_votes() -> None:
    model = nn.ModuleDict({"used": nn.Linear(64, 64, bias=False), "idle": nn.Linear(64, 64, bias=False)})
    demo = DeMo(model, DeMoConfig(nesterov=0.9, selection="full"))
    idle = model["idle"].weight.detach().clone()
    for step in range(3):
        model["used"].weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        model["idle"].weight.grad = None
        votes = demo.propose(LR)
        demo.settle(True)
        demo.apply([(votes.size, votes.payload)], LR)
    assert torch.equal(idle, model["idle"].weight)


# ---- the recipe -------------------------------------------------------------------------------------------------------


RECIPE = OptimizerConfig(recipe="diloco-demo")


def test_one_setting_is_the_whole_recipe_on_both_sides_of_the_wire() -> None:
    assert demo_config(RECIPE, RECIPE.vote_size, b"run") == DeMoConfig(
        beta=0.95, nesterov=0.9, selection="topk", top_k=640, seed=b"run", **SIZED
    )
    assert local_config(RECIPE) == LocalConfig(30, 4e-4, 0.9, 0.95, 0.1, 1.0)
    assert RECIPE.lr == 0.7
    config = RunConfig(optimizer=RECIPE)
    assert config_from_json(config.canonical_json()) == config
    assert OptimizerConfig() == OptimizerConfig(recipe="none")


def test_keys_that_are_set_count_more_than_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[optimizer]\nrecipe = "diloco-demo"\ntop_k = 32\nbeta = 0.9\n[optimizer.local]\nsteps = 10\n')
    optimizer = toml_file.load(file, RunConfig).optimizer
    assert (optimizer.top_k, optimizer.beta, optimizer.local.steps) == (32, 0.9, 10)
    assert (optimizer.nesterov, optimizer.local.lr, optimizer.local.weight_decay) == (0.9, 4e-4, 0.1)
    assert (optimizer.base.name, optimizer.magnitudes, optimizer.beta2) == ("sgd", True, 0.0)
    said = recipe_of(RunConfig(optimizer=optimizer))
    assert said.startswith("Recipe diloco-demo: lr = 0.7, beta = 0.9,")
    assert "top_k = 32" in said
    assert "local.steps = 10" in said
    assert said.count(" = ") == sum(len(v) if isinstance(v, dict) else 1 for v in RECIPES["diloco-demo"].values())
    assert recipe_of(RunConfig()) == ""
    assert layout_of(RunConfig(optimizer=optimizer)).votes


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "paper", "recipe": "diloco-demo"}, "recipe"),
        ({"recipe": "diloco-demo", "beta2": 0.99}, "beta2"),
        ({"recipe": "diloco-demo", "overlap": True}, "overlap"),
        ({"recipe": "diloco"}, "recipe"),
        ({"nesterov": 0.9}, "`nesterov` needs `beta2 = 0`"),
        ({"method": "paper", "nesterov": 0.9}, "the paper's momentum is plain"),
        ({"method": "paper", "selection": "random"}, "selection"),
        ({"selection": "random", "one_in": 3}, "one_in"),
        ({"selection": "topk", "top_k": 640}, "`top_k = 640` needs"),
        ({"method": "paper", "top_k": 1024}, "`top_k = 1024` needs"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        OptimizerConfig.model_validate(settings)


@pytest.mark.parametrize("selection", ["random", "striding", "slicing", "full"])
def test_votes_at_the_same_places_can_be_checked(selection: str) -> None:
    optimizer = OptimizerConfig.model_validate({"selection": selection})
    clock = ClockConfig(min_peers=3)
    RunConfig(optimizer=optimizer, clock=clock, trust=TrustConfig(enabled=True)).check_new()
    assert optimizer.shared
    assert not OptimizerConfig().shared


def test_the_optimizer_alone_has_it_without_a_second_moment() -> None:
    model = network()
    optimizer = DeMoOptimizer(model, 0.7, nesterov=0.9, magnitudes=True, values="8bit", base=BaseConfig("sgd"))
    assert (optimizer._demos[0].config.nesterov, optimizer._demos[0].config.beta2) == (0.9, 0.0)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="beta2 = 0"):
        DeMoOptimizer(network(), 0.7, nesterov=0.9, beta2=0.99)


def test_the_optimizer_alone_with_the_keywords_of_the_docs_is_the_recipe() -> None:
    """docs/optimizers.md has this call."""
    optimizer = DeMoOptimizer(
        network(), lr=0.7, beta=0.95, nesterov=0.9, selection="topk", top_k=640, values="8bit", magnitudes=True,
        base=BaseConfig("sgd"), local=LocalConfig(30, 4e-4, 0.9, 0.95, 0.1),
    )  # fmt: skip
    assert optimizer._demos[0].config == demo_config(RECIPE, RECIPE.vote_size, bytes(8))
    assert optimizer._local.config == local_config(RECIPE)
