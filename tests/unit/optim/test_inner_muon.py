"""Local steps with Muon: matrices move as torch's Muon moves them, tables and vectors as AdamW does; the state comes back."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from node.front.swarmentum import DeMoOptimizer
from node.optim.layout import Layout, named_tensors
from node.optim.local import LocalConfig, LocalSteps
from protos.optimizer_config import OptimizerConfig

MUON = LocalConfig(steps=3, lr=1e-2, weight_decay=0.1, clip_norm=None, optimizer="muon")


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 8))


def made(net: nn.Module, config: LocalConfig = MUON) -> LocalSteps:
    return LocalSteps([tensor for _, tensor in named_tensors(net)], config, Layout.of(net).places)


def backward(net: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    net.zero_grad(set_to_none=True)
    net(torch.randint(0, 32, (4, 5))).square().mean().backward()


def test_matrices_move_by_torchs_muon_and_all_else_by_adamw() -> None:
    net, truth = model(), model()
    inner = made(net)
    matrices = [truth[1].weight, truth[3].weight]  # type: ignore[union-attr]
    rest = [p for p in truth.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")  # type: ignore[arg-type]
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    before = [p.detach().clone() for p in net.parameters()]
    inner.borrow()
    for seed in range(MUON.steps):
        for one in (net, truth):
            backward(one, seed)
        inner.step()
        muon.step()
        adamw.step()
    for ours, theirs in zip(net.parameters(), truth.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    inner.give_back()
    for ours, theirs, start in zip(net.parameters(), truth.parameters(), before, strict=True):
        assert torch.equal(ours, start), "the replicated parameters are back bit for bit"
        assert ours.grad is not None
        assert torch.equal(ours.grad, start - theirs)


def test_a_saved_state_goes_on_bit_for_bit_and_another_optimizers_is_refused() -> None:
    def rounds(net: nn.Module, inner: LocalSteps, seeds: Any) -> list[torch.Tensor]:
        inner.borrow()
        for seed in seeds:
            backward(net, seed)
            inner.step()
        inner.give_back()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    net = model()
    inner = made(net)
    rounds(net, inner, range(3))
    saved = copy.deepcopy(inner.state_dict())
    again = made(net)
    again.load_state_dict(saved)
    assert all(map(torch.equal, rounds(net, inner, range(3, 6)), rounds(net, again, range(3, 6))))
    with pytest.raises(ValueError, match="another inner optimizer"):
        made(net, LocalConfig(steps=3)).load_state_dict(saved)


def test_a_script_with_muon_inside_saves_and_loads() -> None:
    def optimizer(net: nn.Module) -> DeMoOptimizer:
        sized = {"magnitudes": True, "base": "sgd", "beta": 0.95}
        return DeMoOptimizer(net, lr=0.7, alone=True, local=MUON, **sized)

    def run(net: nn.Module, one: DeMoOptimizer, seeds: Any) -> None:
        for seed in seeds:
            backward(net, seed)
            one.step()

    net = model()
    first = optimizer(net)
    run(net, first, range(6))
    other = model()
    other.load_state_dict(net.state_dict())
    second = optimizer(other)
    second.load_state_dict(first.state_dict())
    for both in ((net, first), (other, second)):
        run(*both, range(6, 12))
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_sparseloco_is_a_recipe_of_the_published_settings() -> None:
    made_of = OptimizerConfig.model_validate({"recipe": "sparseloco", "local": {"optimizer": "muon", "steps": 30}})
    assert (made_of.selection, made_of.top_k, made_of.values, made_of.transform) == ("topk", 64, "2bit", "identity")
    assert (made_of.lr, made_of.nesterov, made_of.local.steps, made_of.local.optimizer) == (1.0, 0.0, 30, "muon")
