"""Every way in which people save, load and copy an optimizer: nothing changes, and training goes on bit for bit."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from node.optim.base import BY_CHUNKS as BASE
from node.optim.base import BaseConfig
from node.optim.layout import Layout
from node.optim.local import LocalConfig
from node.optim.torch_optimizer import DeMoOptimizer
from tests.unit.optim.test_changed_models import backward, digest, tower

METHODS: dict[str, dict[str, Any]] = {
    "the default": {},
    "paper": {"method": "paper"},
    "random places into AdamW": {"selection": "random", "seed": 3, "base": BaseConfig("adamw", beta1=0.5)},
    "Nesterov into Muon": {"nesterov": 0.9, "base": BaseConfig("muon", momentum=0.5)},
    "Muon by chunks": {"base": BaseConfig("muon", block=64, output="sign")},
    "DiLoCo": {"magnitudes": True, "base": BaseConfig("sgd"), "local": LocalConfig(2)},
}
Made = tuple[nn.Sequential, DeMoOptimizer]


def made(name: str) -> Made:
    model = tower()
    return model, DeMoOptimizer(model, lr=1e-2, weight_decay=0.1, **METHODS[name])


def train(it: Made, first: int, last: int) -> None:
    for seed in range(first, last):
        backward(it[0], seed)
        it[1].step()


def by_torch_save(it: Made, fresh: Made, folder: Path) -> Made:
    buffer = io.BytesIO()
    torch.save({"model": it[0].state_dict(), "optimizer": it[1].state_dict()}, buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    fresh[0].load_state_dict(saved["model"])
    fresh[1].load_state_dict(saved["optimizer"])
    return fresh


def by_checkpoint(it: Made, fresh: Made, folder: Path, **options: Any) -> Made:
    """torch.distributed.checkpoint, as torchtitan, torchft and Lightning use it."""
    how = StateDictOptions(**options)
    saved = {"model": it[0].state_dict(), "optimizer": get_optimizer_state_dict(it[0], it[1], options=how)}
    checkpoint.save(saved, checkpoint_id=folder, no_dist=True)
    there = {"model": fresh[0].state_dict(), "optimizer": get_optimizer_state_dict(fresh[0], fresh[1], options=how)}
    checkpoint.load(there, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(fresh[0], fresh[1], there["optimizer"], options=how)
    return fresh


def by_copy(it: Made, fresh: Made, folder: Path) -> Made:
    return copy.deepcopy(it)


def by_pickle(it: Made, fresh: Made, folder: Path) -> Made:
    copied: Made = pickle.loads(pickle.dumps(it))
    return copied


WAYS: dict[str, Callable[..., Made]] = {
    "torch.save": by_torch_save,
    "checkpoint": by_checkpoint,
    "flat checkpoint": lambda *it: by_checkpoint(*it, flatten_optimizer_state_dict=True),
    "full checkpoint": lambda *it: by_checkpoint(*it, full_state_dict=True, cpu_offload=True),
    "deepcopy": by_copy,
    "pickle": by_pickle,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_saving_changes_nothing_and_what_is_saved_goes_on_bit_for_bit(name: str, way: str, tmp_path: Path) -> None:
    undisturbed, saving = made(name), made(name)
    for it in (undisturbed, saving):
        train(it, 0, 4)
    saving[1].zero_grad()  # torch makes an empty step at a save if it finds no state
    resumed = WAYS[way](saving, made(name), tmp_path)
    for it in (undisturbed, saving, resumed):
        train(it, 4, 8)
    assert digest(undisturbed[0]) == digest(saving[0]), "saving changed the training"
    assert digest(undisturbed[0]) == digest(resumed[0])
    assert resumed[1].state_dict()["state"][0]["step"] == (4 if name == "DiLoCo" else 8)


def test_the_state_is_where_torch_expects_it() -> None:
    it = made("random places into AdamW")
    train(it, 0, 2)
    assert set(it[1].state) == set(it[0].parameters())
    own = it[1].state[it[0][0].weight]
    expected = {"step", "gradients", "second", "momentum", "base_momentum", "base_square"}
    assert set(own) == expected | {"momentum_pool", "base_momentum_pool", "base_square_pool", "base_count"}
    assert set(it[1].state[it[0][2].weight]) == expected
    assert set(it[1].state[it[0][0].bias]) == {"step", "gradients", "second"}, "a vector's momentum is in the pool"
    assert own["momentum"].shape == (2, 64, 64)
    assert (own["step"], own["gradients"]) == (2, 2)
    assert set(it[1].state_dict()) == {"state", "param_groups"}


def test_a_copy_without_its_model_trains_parameters_of_its_own() -> None:
    it = made("the default")
    train(it, 0, 2)
    copied, before = copy.deepcopy(it[1]), digest(it[0])
    for parameter in copied.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    copied.step()
    assert digest(it[0]) == before
    train(it, 2, 3)


def state(name: str) -> dict[str, Any]:
    return copy.deepcopy(made(name)[1].state_dict())


def adamw_state() -> dict[str, Any]:
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    return optimizer.state_dict()


def other_model() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64))
    return DeMoOptimizer(model, lr=1.0).state_dict()


def damaged() -> dict[str, Any]:
    saved = state("the default")
    saved["state"][2]["momentum"] = saved["state"][2]["momentum"][:1]
    return saved


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "of AdamW": (adamw_state, r"of another model or another optimizer \(it has exp_avg, exp_avg_sq, step; expected"),
    "another method": (
        lambda: state("paper"),
        r"has method paper, chunks of 64, and this optimizer has method dct, muon by chunks",
    ),
    "another base": (lambda: state("random places into AdamW"), "has method dct, adamw, and this optimizer"),
    "no second moment": (
        lambda: DeMoOptimizer(tower(), lr=1.0, beta2=0.0).state_dict(),
        "has no second moment, and this optimizer has a second moment: set beta2 as it was",
    ),
    "another model": (other_model, r"belongs to another model \(the layouts differ\)"),
    "nothing": (lambda: {}, "no param_groups and no state"),
    "a model's": (lambda: tower().state_dict(), r"it has 0\.weight, 0\.bias"),
    "empty": (lambda: {**state("the default"), "state": {}}, "has nothing for parameter 0"),
    "damaged": (damaged, r"the saved momentum of parameter 2 has shape \(1, 64, 64\), not \(2, 64, 64\)"),
    "a version before": (
        lambda: {"demo": [], "state": {}, "param_groups": []},
        "a version before December 2026 saved this state",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_of_another_kind_says_so_and_changes_nothing(name: str) -> None:
    it, undisturbed = made("the default"), made("the default")
    for one in (it, undisturbed):
        train(one, 0, 3)
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        it[1].load_state_dict(make())
    assert it[1].param_groups[0]["lr"] == 1e-2
    for one in (it, undisturbed):
        train(one, 3, 6)
    assert digest(it[0]) == digest(undisturbed[0])


def test_hooks_on_a_loaded_state_are_heard() -> None:
    saving, loading = made("the default"), made("the default")
    train(saving, 0, 2)

    def halved(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        saved["param_groups"] = [{**group, "lr": group["lr"] / 2} for group in saved["param_groups"]]
        return saved

    loading[1].register_load_state_dict_pre_hook(halved)
    loading[1].load_state_dict(saving[1].state_dict())
    assert loading[1].param_groups[0]["lr"] == 5e-3


def test_a_rank_without_a_state_of_its_own_takes_what_is_equal_on_all() -> None:
    saving, new = made("random places into AdamW"), made("random places into AdamW")
    train(saving, 0, 3)
    new[1].load_replicated(saving[1].state_dict())
    first = new[0][0].weight
    assert torch.equal(new[1].state[first]["base_square"], saving[1].state[saving[0][0].weight]["base_square"])
    assert not new[1].state[first]["momentum"].any()
    assert new[1].state[first]["step"] == 3


def wrapped(model: nn.Sequential, how: str) -> nn.Module:
    """The same parameters under other names: of the whole model, or of its parts."""
    if how == "compile":
        return torch.compile(model)  # type: ignore[return-value]
    if how == "compile blocks":
        return nn.Sequential(*(torch.compile(part) for part in model))
    return nn.Sequential(*(checkpoint_wrapper(part) for part in model))


@pytest.mark.parametrize("how", ["compile", "compile blocks", "checkpointing"])
@pytest.mark.parametrize("named", [False, True])
def test_a_compiled_model_and_the_model_itself_have_one_state(how: str, named: bool) -> None:
    whole, model = made("the default"), tower()
    source: Any = wrapped(model, how)
    optimizer = DeMoOptimizer(
        list(source.named_parameters()) if named else source, lr=1e-2, weight_decay=0.1, base=BASE
    )
    train(whole, 0, 2)
    optimizer.load_state_dict(copy.deepcopy(whole[1].state_dict()))
    model.load_state_dict(whole[0].state_dict())
    train((model, optimizer), 2, 4)
    train(whole, 2, 4)
    assert digest(model) == digest(whole[0])
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["param_names"][0] == "0.weight"
    # a version before kept the wrapper's names, and made the layout's digest of them
    saved["param_groups"][0] |= {
        "param_names": [name for name, _ in source.named_parameters()], "layout": Layout.of(source).digest().hex()
    }  # fmt: skip
    fresh = made("the default")
    fresh[1].load_state_dict(saved)
    fresh[0].load_state_dict(model.state_dict())
    train(fresh, 4, 5)
    train((model, optimizer), 4, 5)
    assert digest(model) == digest(fresh[0])


@pytest.mark.parametrize("seed", [1.5, "3", None, 2**63])
def test_a_seed_is_a_whole_number_of_8_bytes(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed = .*: expected is a whole number"):
        DeMoOptimizer(tower(), lr=1.0, seed=seed)
