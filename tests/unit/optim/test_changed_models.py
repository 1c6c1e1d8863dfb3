"""What people do to a model or an optimizer after `DeMoOptimizer` was made: right, or refused with the parameter's name."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from node.optim.base import BaseConfig
from node.optim.digest import state_digest
from node.optim.given_groups import settings_digest
from node.optim.local import LocalConfig
from node.optim.torch_optimizer import DeMoOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:parameters do not tell:UserWarning")

LR = 1e-2


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def backward(model: nn.Module, seed: int = 0) -> None:
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    model.zero_grad()
    (model(inputs) - inputs).square().mean().backward()


def digest(model: nn.Module) -> bytes:
    return state_digest([p.detach() for p in model.parameters() if p.requires_grad])


def bigger(model: nn.Sequential) -> None:
    model[0].weight.data = torch.randn(130, 64)
    model[0].bias.data = torch.randn(130)


def transposed(model: nn.Sequential) -> None:
    model[0].weight.data = torch.randn(64, 128).T


def assigned(model: nn.Module) -> None:
    """Makes new parameters, which an AdamW would not train either, without a word."""
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def new_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(64, 64))


def one_memory(model: nn.Sequential) -> None:
    model[2].bias.data = model[0].bias.data[:64]


def normed(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


CHANGES: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "bfloat16": (lambda model: model.bfloat16(), r"parameter 0\.weight is bfloat16, not fp32: call model\.float\(\)"),
    "half": (lambda model: model.half(), r"parameter 0\.weight is float16"),
    "double": (lambda model: model.double(), r"parameter 0\.weight is float64"),
    "one layer": (lambda model: model[2].double(), r"parameter 2\.weight is float64"),
    "meta": (lambda model: model.to("meta"), r"parameter 0\.weight"),
    "shape": (bigger, r"parameter 0\.weight had shape \(128, 64\), and has \(130, 64\) now: make a new optimizer"),
    "strides": (
        transposed,
        r"parameter 0\.weight is not contiguous .* \(it was changed after the optimizer was made\)",
    ),
    "frozen": (lambda model: model[2].requires_grad_(False), r"parameter 2\.weight was frozen after the optimizer"),
    "assign=True": (assigned, r"parameter 0\.weight is trained now and has no place in this optimizer"),
    "a new layer": (new_layer, r"parameter 3\.weight is trained now and has no place .*add_param_group"),
    "memory of another": (one_memory, r"parameters 2\.bias and 0\.bias share memory"),
    "weight norm": (normed, r"parameter 0\.parametrizations\.weight\.original0 is trained now and has no place"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("method", ["demo", "paper"])
def test_a_model_that_was_changed_is_refused_with_the_parameter_s_name(name: str, method: Any) -> None:
    change, words = CHANGES[name]
    model = tower()
    optimizer = DeMoOptimizer(model, lr=LR, method=method)
    backward(model)
    optimizer.step()
    change(model)
    if name not in ("meta", "shape", "strides", "memory of another", "one layer"):
        backward(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    if name != "meta":
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_in_a_round_of_local_steps_is_refused_at_its_end(name: str) -> None:
    """With the error that all ranks are told: one that ends a rank before the exchange leaves the others waiting."""
    change, words = CHANGES[name]
    model = tower()
    optimizer = DeMoOptimizer(model, lr=LR, **SIZED)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
    change(model)
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert optimizer.exchanged


def same_kind(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def from_a_vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).detach().clone(), model.parameters()
    )


def lent(model: nn.Module) -> None:
    """An average takes the parameters' places, and copies of them come back."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter, own in zip(model.parameters(), kept, strict=True):
        parameter.data = torch.zeros_like(own)
        parameter.data = own


HARMLESS: dict[str, Callable[[nn.Sequential], Any]] = {
    "nothing": lambda model: None,
    "an average that is lent": lent,
    "there and back": lambda model: model.double().float(),
    "new memory of the same kind": same_kind,
    "vector_to_parameters": from_a_vector,
    "float": lambda model: model.float(),
    "train and eval": lambda model: model.eval().train(),
    "load_state_dict": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "a buffer": lambda model: model.register_buffer("seen", torch.zeros(1)),
    "a frozen layer": lambda model: model[1].add_module("probe", nn.Linear(4, 4).requires_grad_(False)),
}


SIZED: dict[str, Any] = {"magnitudes": True, "base": BaseConfig("sgd"), "local": LocalConfig(2)}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize(("method", "at"), [("demo", 2), ("DiLoCo", 2), ("DiLoCo", 1), ("DiLoCo", 3)])
def test_what_changes_nothing_goes_on_as_before(name: str, method: str, at: int) -> None:
    """In a round of local steps, too: its steps moved the memory that a parameter had when the round began."""
    digests = []
    for change in (HARMLESS["nothing"], HARMLESS[name]):
        model = tower()
        optimizer = DeMoOptimizer(model, lr=LR, **(SIZED if method == "DiLoCo" else {}))
        for seed in range(4):
            if seed == at:
                change(model)
            backward(model, seed)
            optimizer.step()
        digests.append(digest(model))
    assert digests[0] == digests[1]


def test_a_thawed_parameter_is_named_and_can_be_added() -> None:
    model = tower()
    model[0].weight.requires_grad_(False)
    optimizer = DeMoOptimizer(model.named_parameters(), lr=LR)
    backward(model)
    optimizer.step()
    model[0].weight.requires_grad_(True)
    backward(model)
    with pytest.raises(
        ValueError, match=r"parameter 0\.weight is trained now and has no place in this optimizer: it was fro"
    ):
        optimizer.step()
    optimizer.add_param_group({"params": [model[0].weight], "lr": LR})
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]
    before = model[0].weight.detach().clone()
    for seed in range(2):
        backward(model, seed)
        optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_a_group_s_list_of_parameters_is_not_changed_by_hand() -> None:
    model, other = tower(), nn.Parameter(torch.zeros(64))
    optimizer = DeMoOptimizer(model, lr=LR)
    for change in (lambda params: params.append(other), lambda params: params.pop(0)):
        backward(model)
        kept = list(optimizer.param_groups[0]["params"])
        change(optimizer.param_groups[0]["params"])
        with pytest.raises(ValueError, match=r"optimizer\.param_groups were changed: call optimizer\.add_param_group"):
            optimizer.step()
        optimizer.param_groups[0]["params"] = kept
        optimizer.step()


@pytest.mark.parametrize(
    "option",
    [
        "beta2",
        "betas",
        "eps",
        "base",
        "selection",
        "seed",
        "nesterov",
        "maximize",
        "learning_rate",
        "wd",
        "wieght_decay",
    ],
)
def test_an_option_of_a_group_that_would_have_no_effect_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: no option of one group; a group may set lr, beta"):
        DeMoOptimizer([{"params": tower().parameters(), option: 0.5}], lr=LR)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_k": 64}, "top_k 64 has no effect with selection 'groups'"),
        ({"selection": "topk", "group_size": 16}, "group_size 16 has no effect with selection 'topk'"),
        ({"clip_norm": 0.5}, r"clip_norm 0\.5 has no effect with beta2 0\.99: leave it out, or set beta2 to 0"),
        ({"base": BaseConfig("adamw", momentum=0.9)}, r"momentum 0\.9 has no effect with base 'adamw'"),
        ({"base": BaseConfig("muon", beta1=0.9)}, r"beta1 0\.9 has no effect with base 'muon'"),
    ],
)
def test_a_setting_that_another_one_leaves_without_effect_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeMoOptimizer(tower(), lr=LR, **settings)


@pytest.mark.parametrize(
    ("option", "value"), [("beta", 0.5), ("betas", (0.9, 0.95)), ("maximize", True), ("cap", 1), ("weigth_decay", 0.1)]
)
def test_an_option_that_comes_into_a_group_later_is_refused(option: str, value: Any) -> None:
    model = tower()
    optimizer = DeMoOptimizer(model, lr=LR)
    backward(model)
    optimizer.param_groups[0][option] = value
    with pytest.raises(
        ValueError, match=f"{option} in optimizer.param_groups has no effect: a group may change lr, mom"
    ):
        optimizer.step()
    del optimizer.param_groups[0][option]
    optimizer.param_groups[0].update(momentum=0.5, lr_scale=0.1)  # other words are the program's own
    optimizer.step()


def test_a_schedule_that_goes_below_zero_is_refused() -> None:
    """Votes hold the rate, so a negative one would go on downhill, and no other optimizer does."""
    model = tower()
    optimizer = DeMoOptimizer(model, lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 2)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
        schedule.step()
    with pytest.raises(ValueError, match=r"learning rate -0.00\d+: expected is a finite number of at least 0"):
        optimizer.step()


def sparse(parameter: Tensor) -> Tensor:
    return torch.eye(*parameter.shape).to_sparse()


def test_gradients_of_another_kind_are_refused_with_the_parameter_s_name() -> None:
    embedding = nn.Embedding(100, 64, sparse=True)
    optimizer = DeMoOptimizer(embedding, lr=LR)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter weight has a sparse_coo gradient.*sparse=False"):
        optimizer.step()


def test_gradients_of_another_shape_in_memory_are_taken_as_they_are() -> None:
    """Expanded and transposed gradients are what autograd makes of sums and of transposed products."""
    digests = []
    for make in (lambda it: it.clone(), lambda it: it.T.contiguous().T, lambda it: it[:1].expand(8, 8)):
        model = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = DeMoOptimizer(model, lr=LR)
        model.weight.grad = make(torch.arange(8.0).expand(8, 8))
        optimizer.step()
        digests.append(digest(model))
    assert len(set(digests)) == 1


STATE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cleared": (lambda state: state.clear(), "optimizer.state was changed"),
    "an entry less": (lambda state: state[next(iter(state))].pop("momentum"), r"momentum was taken out"),
    "copied": (lambda state: [it.update(copy.deepcopy(it)) for it in state.values()], "replaced"),
    "offloaded": (
        lambda state: [it.update({k: v.to("meta") for k, v in it.items()}) for it in state.values()], "replaced or moved"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATE)
def test_a_state_that_was_changed_by_hand_is_refused(name: str) -> None:
    """The step does not read it from there, so what somebody meant would not happen."""
    model = tower()
    optimizer = DeMoOptimizer(model, lr=LR)
    saved = copy.deepcopy(optimizer.state_dict())
    change, words = STATE[name]
    change(optimizer.state)
    backward(model)
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_a_default_device_of_the_program_moves_no_table_and_no_byte_of_the_step() -> None:
    """`torch.set_default_device("cuda")` beside parameters on the card, or on the CPU; meta stands for it here."""
    digests = []
    for device in ("cpu", "meta"):
        model, inputs = tower(), torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        torch.set_default_device(device)
        try:
            optimizer = DeMoOptimizer(model, lr=LR)
            for _ in range(3):
                model.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
        finally:
            torch.set_default_device(None)
        digests.append(digest(model))
    assert digests[0] == digests[1]


SIZED: dict[str, Any] = {"values": "8bit", "magnitudes": True, "base": "sgd", "local": LocalConfig(2)}


@pytest.mark.parametrize("settings", [{}, {"method": "paper"}, SIZED], ids=["demo", "paper", "local"])
@pytest.mark.parametrize("program", ["autocast", "default_dtype"])
def test_precision_that_the_program_chose_for_its_model_changes_no_bit_of_the_step(
    program: str, settings: dict[str, Any]
) -> None:
    """A loop that is in autocast as a whole: the paper's transform multiplied bf16 there."""
    digests = []
    for chosen in (False, True):
        model, generator = tower(), torch.Generator().manual_seed(0)
        optimizer = DeMoOptimizer(model, lr=LR, **settings)
        gradients = [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(4)]
        torch.set_default_dtype(torch.bfloat16 if chosen and program == "default_dtype" else torch.float32)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=chosen and program == "autocast"):
                for step in gradients:
                    for parameter, gradient in zip(model.parameters(), step, strict=True):
                        parameter.grad = gradient
                    optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        digests.append(digest(model))
    assert digests[0] == digests[1]


def test_numbers_of_numpy_and_torch_are_checked_and_compared_as_pythons_own() -> None:
    """A float32 of numpy went by every bound, and ranks with other caps of numpy's had one digest of their settings."""
    for given in ({"weight_decay": np.float32(-0.5)}, {"cap": np.int64(1)}, {"beta": torch.tensor(1.5)}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} = .*: expected is"):
            DeMoOptimizer(tower(), lr=LR, **given)  # type: ignore[arg-type]
    digests = []
    for kind in (float, np.float32, torch.tensor):
        model = tower()
        optimizer = DeMoOptimizer(model, lr=LR, group_size=np.int64(64) if kind is np.float32 else 64)
        optimizer.param_groups[0]["weight_decay"] = kind(0.5)
        backward(model)
        optimizer.step()
        digests.append(digest(model))
    assert len(set(digests)) == 1
    said = [settings_digest(DeMoOptimizer(tower(), lr=LR, cap=np.int64(cap)).settings.values, ()) for cap in (2, 3)]
    assert said[0] != said[1]


OPTIONS = ("lr", "momentum", "weight_decay", "clip_norm")
NO_NUMBERS = [(option, value) for option in OPTIONS for value in (None, "fast", [0.5], 1j, torch.ones(2))]


@pytest.mark.parametrize(("option", "value"), [*NO_NUMBERS, *(("lr", rate) for rate in (math.nan, math.inf, 1e39))])
def test_an_option_that_is_no_number_is_told_as_every_fault_is(option: str, value: Any) -> None:
    """On all ranks: a rank that raised before the exchange kept the others waiting. A list was taken for a beta in silence."""
    model = tower()
    optimizer = DeMoOptimizer(model, lr=LR)
    backward(model)
    before = digest(model)
    optimizer.param_groups[0][option] = value
    word = {"lr": "learning rate", "momentum": "beta ="}.get(option, f"{option} =")
    if (option, value) == ("clip_norm", None):
        optimizer.step()
    else:
        kind = "finite number of at least 0" if option == "lr" else ".*number"
        with pytest.raises(ValueError, match=f"{word} .*: expected is a {kind}"):
            optimizer.step()
        assert digest(model) == before


def test_an_option_that_has_no_effect_is_refused_later_too() -> None:
    model = tower()
    optimizer = DeMoOptimizer(model, lr=LR)
    backward(model)
    optimizer.param_groups[0]["clip_norm"] = 0.1
    with pytest.raises(ValueError, match=r"clip_norm 0\.1 has no effect with beta2 0\.99"):
        optimizer.step()


def test_a_parameter_in_two_groups_is_refused() -> None:
    """The later group took it, and both moved it."""
    weight = nn.Parameter(torch.ones(64, 64))
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        DeMoOptimizer([{"params": [weight], "lr": 1.0}, {"params": [weight]}], lr=LR)


@pytest.mark.parametrize("given", [set, lambda params: [{"params": set(params)}]])
def test_a_set_of_parameters_is_refused(given: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="a set, which has no order"):
        DeMoOptimizer(given(tower().parameters()), lr=LR)


@pytest.mark.parametrize("view", [dict[str, Any].items, dict[str, Any].values])
def test_a_view_of_a_dict_of_parameters_has_an_order(view: Callable[[Any], Any]) -> None:
    """Python calls items and keys of a dict sets, and they were refused as such."""
    named = dict(tower().named_parameters())
    optimizer = DeMoOptimizer(view(named), lr=LR)
    DeMoOptimizer([{"params": view(named)}], lr=LR)
    assert [id(it) for it in optimizer.param_groups[0]["params"]] == [id(it) for it in named.values()]


def test_an_optimizer_that_is_made_and_stepped_in_inference_mode_goes_on_outside() -> None:
    inside, outside = tower(), tower()
    with torch.inference_mode():
        optimizer = DeMoOptimizer(inside, lr=LR)
    plain = DeMoOptimizer(outside, lr=LR)
    for mode in (True, False):
        backward(inside)
        backward(outside)
        with torch.inference_mode(mode):
            optimizer.step()
        plain.step()
    assert digest(inside) == digest(outside)


def test_a_step_without_any_gradient_abstains_and_decays_nothing() -> None:
    """As torch's optimizers: a script that skips a batch, and tools that make an empty step."""
    model = tower()
    optimizer = DeMoOptimizer(model, lr=LR, weight_decay=0.5)
    backward(model)
    optimizer.step()
    before = digest(model)
    optimizer.zero_grad()
    optimizer.step()
    assert (digest(model), optimizer.abstentions) == (before, 1)


def test_a_scaler_s_gradients_are_divided_once_and_an_infinity_abstains() -> None:
    digests = []
    for scaled in (False, True):
        model = tower()
        optimizer = DeMoOptimizer(model, lr=LR, beta2=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(6):
            optimizer.zero_grad()
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            loss = (model(inputs) - inputs).square().mean() * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        digests.append(digest(model))
        assert optimizer.abstentions == 1
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("starter", "name"),
    [
        ("mpirun", "OMPI_COMM_WORLD_SIZE"),
        ("mpiexec", "PMI_SIZE"),
        ("srun", "SLURM_STEP_NUM_TASKS"),
        ("torchrun", "WORLD_SIZE"),
    ],
)
def test_ranks_that_torch_distributed_does_not_know_are_not_trained_apart(
    starter: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of mpirun and srun trained apart, in silence."""
    model = tower()
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        RuntimeError, match=rf"{starter}.* started 2 ranks.*init_process_group\(\) first, or give alone=True"
    ):
        DeMoOptimizer(model, lr=LR)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with pytest.raises(RuntimeError, match="started 2 ranks"):
        DeMoOptimizer(model, lr=LR)
    dist.destroy_process_group()
    optimizer = DeMoOptimizer(model, lr=LR, alone=True)
    backward(model)
    optimizer.step()
    monkeypatch.setenv(name, "1")
    later = DeMoOptimizer(model, lr=LR)
    monkeypatch.setenv(name, "2")
    with pytest.raises(RuntimeError, match=f"{starter}.* started 2 ranks"):
        later.step()


def test_lightning_clips_what_it_has_unscaled() -> None:
    """It refused `gradient_clip_val` with mixed precision: such optimizers unscale in `step` alone; this one takes both."""
    asked = "getattr(optimizer, '_step_supports_amp_scaling', False)"
    optimizer = DeMoOptimizer(tower(), lr=LR)
    for asks, answer in (("torch.amp.grad_scaler", True), ("lightning.fabric.plugins.precision.amp", False)):
        assert eval(asked, {"__name__": asks, "optimizer": optimizer}) is answer


def test_a_group_without_a_parameter_to_train_is_no_mistake() -> None:
    """A trainer's group of parameters without decay is empty for LoRA. It was refused as if the whole model were frozen."""
    digests = list[bytes]()
    for empty in ([], [{"params": []}], [{"params": [nn.Parameter(torch.ones(3), requires_grad=False)], "lr": 0.5}]):
        model = tower()
        optimizer = DeMoOptimizer([*empty, {"params": list(model.parameters())}], lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * (len(empty) + 1))
        for step in range(4):
            backward(model, step)
            optimizer.step()
            schedule.step()
            if step == 1:
                again = DeMoOptimizer([*empty, {"params": list(model.parameters())}], lr=LR)
                again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                for group, was in zip(again.param_groups, optimizer.param_groups, strict=True):
                    assert group["lr"] == was["lr"]
                schedule.optimizer = optimizer = again
        digests.append(digest(model))
    assert len(set(digests)) == 1
    frozen = optimizer.param_groups[0]["params"][0].requires_grad_(True)
    with pytest.raises(ValueError, match="parameter 0 is trained now and has no place"):
        optimizer.step()
    optimizer.add_param_group({"params": [frozen]})
    frozen.grad = torch.ones(3)
    optimizer.step()
    assert (frozen < 1).all()
    with pytest.raises(ValueError, match="no parameter to train: all are frozen"):
        DeMoOptimizer([{"params": []}, {"params": [nn.Parameter(torch.ones(3), requires_grad=False)]}], lr=LR)


def test_a_rank_that_never_votes_is_told_once() -> None:
    """A model that is another copy, or a loss that is never finite, trained nothing, in silence."""
    model = tower()
    optimizer = copy.deepcopy(DeMoOptimizer(model, lr=LR))  # its parameters are copies, too
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(25):
            backward(model)
            optimizer.step()
    assert [str(it.message)[:57] for it in told] == ["this rank has had no votes for the model in 20 steps in a"]
    assert "nothing trains it; backward() leaves no gradient in these parameters" in str(told[0].message)
    optimizer = DeMoOptimizer(model, lr=LR)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(44):
            backward(model)
            if step not in (19, 22):  # a row begins anew after each vote
                model[0].weight.grad.fill_(math.nan)
            optimizer.step()
    assert len(told) == 1
    assert "gradients are there, and are not finite" in str(told[0].message)
    assert optimizer.abstentions == 42


def test_a_rank_that_never_votes_is_told_with_local_steps_and_of_one_group() -> None:
    """With local steps nothing was counted; and a group that was silent alone was told as if the others were, too."""
    model, settings = tower(), {"magnitudes": True, "base": "sgd", "local": LocalConfig(steps=3)}
    elsewhere = copy.deepcopy(DeMoOptimizer(model, lr=LR, **settings))
    parted = DeMoOptimizer(groups(model), lr=LR)

    def train(optimizer: DeMoOptimizer) -> None:
        for _ in range(24):
            optimizer.zero_grad()
            backward(model)
            model[0].weight.grad.fill_(math.nan)
            optimizer.step()

    with pytest.warns(RuntimeWarning, match=r"no votes for the model in 20 steps in a row, .* leaves no gradient"):
        train(elsewhere)
    assert elsewhere.abstentions == 24
    with pytest.warns(
        RuntimeWarning, match=r"no votes for a group of parameters, or all, in 20 .* nothing trains them; gr"
    ):
        train(parted)


def groups(model: nn.Sequential) -> Iterable[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.1}]


def test_votes_of_a_group_go_back_if_another_group_cannot_go_on() -> None:
    """Momentum is only spent on votes that were applied."""
    model, other = tower(), tower()
    optimizer, undisturbed = (DeMoOptimizer(groups(it), lr=LR, beta=0.0) for it in (model, other))
    for it, made in ((model, optimizer), (other, undisturbed)):
        backward(it)
        made.step()
    optimizer._demos[1]._momentum.fill_(torch.nan)
    backward(model)
    with pytest.raises(RuntimeError, match="the momentum of rank 0 is not a number"):
        optimizer.step()
    assert not any(demo.pending for demo in optimizer._demos)
    assert digest(model) == digest(other)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_step_that_was_broken_off_can_be_made_again(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a notebook's stop button does, or a loop that goes on after a batch that was too large."""

    def broken(*_: Any) -> Any:
        raise error

    model = tower()
    optimizer = DeMoOptimizer(groups(model), lr=LR)
    backward(model)
    with monkeypatch.context() as patched:
        patched.setattr(optimizer._demos[1], "propose", broken)
        with pytest.raises(error):
            optimizer.step()
    before = digest(model)
    optimizer.step()
    assert digest(model) != before


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_compiled_step_moves_the_model_as_a_plain_one_does(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile(optimizer.step)`, as torch's pages show it: inductor failed at the votes' views."""
    monkeypatch.setenv("SWARMENTUM_OPTIM_BACKEND", backend)
    digests = []
    for compiled in (False, True):
        model = tower()
        optimizer = DeMoOptimizer(model, lr=1e-2, weight_decay=0.1)
        step = torch.compile(lambda it=optimizer: it.step()) if compiled else optimizer.step
        for seed in range(2):
            backward(model, seed)
            step()
        digests.append(digest(model))
    assert digests[0] == digests[1]
