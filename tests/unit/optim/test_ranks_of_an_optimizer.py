"""Two ranks over gloo in real processes: they make the same step with the same settings, or all of them say what differs."""

import datetime
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from node.optim.base import BaseConfig
from node.optim.local import LocalConfig
from node.optim.torch_optimizer import DeMoOptimizer, ExchangeFailed
from tests.system.copied import ranks
from tests.unit.optim.test_changed_models import digest, tower

RANKS = 2
Found = dict[str, Any]


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * rank + step))


def backward(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> torch.Tensor:
    inputs = batch(rank, step).to(next(model.parameters()).dtype)
    model.zero_grad()
    loss: torch.Tensor = (model(inputs) - inputs).square().mean() * factor
    loss.backward()
    return loss


def steps_of(model: nn.Module, optimizer: DeMoOptimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        backward(model, rank, step)
        optimizer.step()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def all_ranks_by_default(rank: int, folder: Path) -> Found:
    model = tower()
    steps_of(model, DeMoOptimizer(model, lr=1e-2), rank, 0, 3)
    alone = tower()
    steps_of(alone, DeMoOptimizer(alone, lr=1e-2, alone=True), rank, 0, 3)
    return {"digest": digest(model).hex(), "alone": digest(alone).hex()}


def a_scaler_finds_an_infinity_on_one_rank(rank: int, folder: Path) -> Found:
    model = tower()
    optimizer = DeMoOptimizer(model, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(6):
        optimizer.zero_grad()
        inputs = batch(rank, step)
        loss = (model(inputs) - inputs).square().mean() * (float("inf") if (rank, step) == (0, 2) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    return {"digest": digest(model).hex(), "abstentions": optimizer.abstentions}


def a_schedule_stands_still_on_one_rank(rank: int, folder: Path) -> Found:
    model = tower()
    optimizer = DeMoOptimizer(model, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    steps_of(model, optimizer, rank, 0, 2)
    if rank == 0:
        schedule.step()
    before = digest(model).hex()
    backward(model, rank, 2)
    found = {"error": error_of(optimizer.step), "same": before == digest(model).hex()}
    if rank == 1:
        schedule.step()
    steps_of(model, optimizer, rank, 3, 5)
    return {**found, "digest": digest(model).hex()}


def a_model_is_cast_on_one_rank(rank: int, folder: Path) -> Found:
    model = tower()
    optimizer = DeMoOptimizer(model, lr=1e-2)
    steps_of(model, optimizer, rank, 0, 2)
    if rank == 1:
        model.double()
    backward(model, rank, 2)
    found = {"error": error_of(optimizer.step)}
    model.float()
    steps_of(model, optimizer, rank, 3, 5)
    return {**found, "digest": digest(model).hex()}


def a_rate_is_no_number_on_one_rank(rank: int, folder: Path) -> Found:
    model = tower()
    optimizer = DeMoOptimizer(model, lr=1e-2)
    optimizer.param_groups[0]["lr"] = float("nan") if rank else 1e-2
    backward(model, rank, 0)
    return {"error": error_of(optimizer.step)}


def two_optimizers_in_another_order(rank: int, folder: Path) -> Found:
    models = {name: nn.Linear(64, 64) for name in ("judge", "maker")}
    for parameter in nn.ModuleDict(models).parameters():
        nn.init.constant_(parameter, 0.1)
    optimizers = {name: DeMoOptimizer(nn.ModuleDict({name: model}), lr=1e-2) for name, model in models.items()}
    found: list[str] = []
    for names in (["judge", "maker"], ["judge", "maker"] if rank else ["maker", "judge"]):
        for name in names:
            models[name](batch(rank, 0)).square().mean().backward()
            found.append(error_of(optimizers[name].step))
    return {"errors": found}


def two_optimizers_that_look_alike_in_another_order(rank: int, folder: Path) -> Found:
    if rank:  # one more that is gone, does not vote, or has other settings
        DeMoOptimizer(tower(), lr=1e-2)
    alone = DeMoOptimizer(tower(), lr=1e-2, alone=True) if rank else None
    another = DeMoOptimizer(tower(), lr=1e-2, base="adamw") if rank else None
    models = [tower(), tower()]
    optimizers = [DeMoOptimizer(model, lr=1e-2) for model in models]
    found: list[str] = []
    for numbers in ((1, 0) if rank else (0, 1), (0, 1), (0, 1)):
        for number in numbers:
            backward(models[number], rank, number)
            found.append(error_of(optimizers[number].step))
    del alone, another
    return {"errors": found, "digests": [digest(it).hex() for it in models]}


def a_rank_alone_moves_its_parameters(rank: int, folder: Path) -> Found:
    model, found = tower(), {}
    optimizer = DeMoOptimizer(model, lr=1e-2)
    steps_of(model, optimizer, rank, 0, 2)
    saved = {name: it.clone() for name, it in model.state_dict().items()}
    steps_of(model, optimizer, rank, 2, 4)
    if rank == 0:
        model.load_state_dict(saved)
    found["error"] = error_of(lambda: steps_of(model, optimizer, rank, 4, 5))
    model.load_state_dict(saved)
    steps_of(model, optimizer, rank, 4, 6)
    return {**found, "digest": digest(model).hex()}


def settings_differ(rank: int, folder: Path) -> Found:
    found = {}
    for name, (one, other) in {
        "group_size": ({"group_size": 16}, {"group_size": 128}),
        "base": ({"base": "adamw"}, {}),
        "momentum": ({"beta": 0.9}, {"beta": 0.95}),
        "weights": ({}, {}),
    }.items():
        model = tower()
        if name == "weights" and rank:
            nn.init.ones_(model[0].bias)
        optimizer = DeMoOptimizer(model, lr=1e-2, **(other if rank else one))
        backward(model, rank, 0)
        found[name] = error_of(optimizer.step)
    return found


def a_rank_loads_another_step_or_another_rank(rank: int, folder: Path) -> Found:
    model = tower()
    optimizer = DeMoOptimizer(model, lr=1e-2)
    steps_of(model, optimizer, rank, 0, 2)
    early = torch.load(_saved({"it": optimizer.state_dict()}, folder / f"early{rank}.pt"), weights_only=True)["it"]
    steps_of(model, optimizer, rank, 2, 4)
    dist.barrier()
    theirs = torch.load(folder / f"early{1 - rank}.pt", weights_only=True)["it"]
    found = {"rank": error_of(lambda: optimizer.load_state_dict(theirs))}
    if rank:
        optimizer.load_state_dict(early)
    backward(model, rank, 4)
    found["step"] = error_of(optimizer.step)
    new = DeMoOptimizer(model, lr=1e-2)
    new.load_replicated(theirs)
    steps_of(model, new, rank, 5, 7)
    return {**found, "digest": digest(model).hex()}


def _saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def a_checkpoint_of_both_ranks(rank: int, folder: Path) -> Found:
    found = {}
    for flat in (False, True):
        how = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, fresh = tower(), tower()
        base: dict[str, Any] = {"base": BaseConfig("adamw", beta1=0.5)}
        optimizer, resumed = (DeMoOptimizer(it, lr=1e-2, **base) for it in (model, fresh))
        steps_of(model, optimizer, rank, 0, 3)
        optimizer.zero_grad()
        saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=how)}
        where = folder / f"checkpoint{flat}"
        checkpoint.save(saved, checkpoint_id=where)
        there = {"model": fresh.state_dict(), "optimizer": get_optimizer_state_dict(fresh, resumed, options=how)}
        checkpoint.load(there, checkpoint_id=where)
        set_optimizer_state_dict(fresh, resumed, there["optimizer"], options=how)
        for it, made in ((model, optimizer), (fresh, resumed)):
            steps_of(it, made, rank, 3, 6)
        found[f"digests {flat}"] = [digest(model).hex(), digest(fresh).hex()]
    return found


def a_model_in_ddp(rank: int, folder: Path) -> Found:
    model = tower()
    wrapped = DistributedDataParallel(model)
    found = {"given": error_of(partial(DeMoOptimizer, wrapped, lr=1e-2))}
    optimizer = DeMoOptimizer(model.parameters(), lr=1e-2)
    backward(wrapped, rank, 0)
    found["unseen"] = error_of(optimizer.step)
    del wrapped
    model = tower()
    quiet = DistributedDataParallel(model)
    quiet.register_comm_hook(None, noop_hook)
    steps_of(quiet, DeMoOptimizer(model, lr=1e-2), rank, 0, 3)
    plain = tower()
    steps_of(plain, DeMoOptimizer(plain, lr=1e-2), rank, 0, 3)
    return {**found, "digest": digest(model).hex(), "same": digest(model) == digest(plain)}


def first_steps_without_equal_votes(rank: int, folder: Path) -> Found:
    """An overflow, as the first steps of a GradScaler have; places of a rank's own; a rate that warms up from 0."""
    found = {}
    for name, settings in (("overflow", {}), ("own places", {"selection": "independent"})):
        model = tower()
        wrapped = DistributedDataParallel(model)
        optimizer = DeMoOptimizer(model.parameters(), lr=1e-2, **settings)
        if name == "overflow":
            backward(wrapped, rank, 0, float("inf"))
            optimizer.step()
        backward(wrapped, rank, 1)
        found[name] = error_of(optimizer.step)
        del wrapped
    model = tower()
    quiet = DistributedDataParallel(model)
    quiet.register_comm_hook(None, noop_hook)
    optimizer = DeMoOptimizer(model, lr=0.0, method="paper")
    backward(quiet, rank, 0)
    found["warm-up"] = error_of(optimizer.step)
    return found


def one_batch_for_all(rank: int, folder: Path) -> Found:
    model = tower()
    optimizer = DeMoOptimizer(model, lr=1e-2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps_of(model, optimizer, 0, 0, 2)
    return {"told": [(it.category.__name__, str(it.message), Path(it.filename).name) for it in told]}


def a_rank_has_fewer_batches(rank: int, folder: Path) -> Found:
    found = {}
    sized: dict[str, Any] = {"magnitudes": True, "base": BaseConfig("sgd"), "local": LocalConfig(2)}
    for name, settings, batches in (("each step", {}, (4, 7)), ("local steps", sized, (5, 8))):
        model = tower()
        optimizer = DeMoOptimizer(model, lr=1e-2, weight_decay=0.1, **settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        with Join([optimizer]):
            for step in range(batches[rank]):
                backward(model, rank, step)
                optimizer.step()
                if optimizer.exchanged:
                    schedule.step()
        found[name] = [digest(model).hex(), optimizer.state_dict()["state"][0]["step"].item()]
    return found


def parameters_are_added_on_one_rank(rank: int, folder: Path) -> Found:
    model = tower()
    model[2].requires_grad_(False)
    optimizer = DeMoOptimizer(model, lr=1e-2)
    steps_of(model, optimizer, rank, 0, 2)
    if rank:
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": model[2].parameters()})
    backward(model, rank, 2)
    found = {"error": error_of(optimizer.step)}
    if not rank:
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": model[2].parameters()})
    steps_of(model, optimizer, rank, 3, 5)
    return {**found, "digest": digest(model).hex()}


SCENES = (
    all_ranks_by_default, a_scaler_finds_an_infinity_on_one_rank, a_schedule_stands_still_on_one_rank,
    a_model_is_cast_on_one_rank, a_rate_is_no_number_on_one_rank, two_optimizers_in_another_order,
    two_optimizers_that_look_alike_in_another_order,
    a_rank_alone_moves_its_parameters, settings_differ, a_rank_loads_another_step_or_another_rank, a_checkpoint_of_both_ranks,
    a_model_in_ddp, first_steps_without_equal_votes, one_batch_for_all, a_rank_has_fewer_batches,
    parameters_are_added_on_one_rank,
)  # fmt: skip


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=60)
    )  # fmt: skip
    found = {scene.__name__: scene(rank, Path(folder)) for scene in SCENES}
    model = tower()
    optimizer = DeMoOptimizer(model, lr=1e-2)
    steps_of(model, optimizer, rank, 0, 2)
    if rank == 0:  # rank 1 has ended meanwhile, or ends
        backward(model, rank, 2)
        try:
            optimizer.step()
        except ExchangeFailed as error:
            found["a_rank_ends"] = {"error": str(error)}
    torch.save(found, f"{folder}/{rank}.pt")
    del optimizer
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What each rank found in each scene: one start of the processes for all."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks(RANKS, _rank, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def of(found: list[dict[str, Found]], scene: Callable[..., Any]) -> tuple[Found, Found]:
    one, other = (it[scene.__name__] for it in found)
    return one, other


@pytest.mark.parametrize(
    "scene",
    [all_ranks_by_default, a_scaler_finds_an_infinity_on_one_rank, a_schedule_stands_still_on_one_rank,
     a_model_is_cast_on_one_rank, a_rank_loads_another_step_or_another_rank, a_model_in_ddp, parameters_are_added_on_one_rank],
    ids=lambda scene: scene.__name__,
)  # fmt: skip
def test_replicas_are_equal_at_the_end_of(scene: Callable[..., Any], found: list[dict[str, Found]]) -> None:
    one, other = of(found, scene)
    assert one["digest"] == other["digest"]


def test_none_means_all_ranks_and_alone_has_to_be_asked_for(found: list[dict[str, Found]]) -> None:
    one, other = of(found, all_ranks_by_default)
    assert one["alone"] != other["alone"]


def test_a_scaler_abstains_on_the_rank_that_found_it(found: list[dict[str, Found]]) -> None:
    assert [it["abstentions"] for it in of(found, a_scaler_finds_an_infinity_on_one_rank)] == [1, 0]


def test_a_rate_that_differs_is_told_on_all_ranks_before_anything_is_applied(found: list[dict[str, Found]]) -> None:
    for it in of(found, a_schedule_stands_still_on_one_rank):
        assert "RanksDiffer: the ranks differ in lr of group 0: rank 0 has 0.005, and rank 1 has 0.01." in it["error"]
        assert it["same"]


def test_a_rank_that_cannot_go_on_tells_the_others_why(found: list[dict[str, Found]]) -> None:
    one, other = of(found, a_model_is_cast_on_one_rank)
    assert one["error"].startswith("RanksDiffer: rank 1 cannot go on: parameter 0.weight is float64")
    assert other["error"].startswith("ParameterChanged: parameter 0.weight is float64")
    one, other = of(found, a_rate_is_no_number_on_one_rank)
    assert one["error"].startswith("RanksDiffer: rank 1 cannot go on: learning rate nan")
    assert other["error"].startswith("ValueError: learning rate nan: expected is a finite number")


def test_replicas_that_drift_apart_later_are_told(found: list[dict[str, Found]]) -> None:
    one, other = of(found, a_rank_alone_moves_its_parameters)
    assert one["error"].startswith(
        "ReplicasDiffer: the ranks have not the same parameters any more (rank 0 and rank 1)"
    )
    assert one == other, "one state on all ranks, and they go on"


def test_votes_of_one_optimizer_never_move_the_model_of_another(found: list[dict[str, Found]]) -> None:
    for it in of(found, two_optimizers_in_another_order):
        assert it["errors"][:2] == ["nothing was raised"] * 2
        assert all("the ranks differ in the layout or the settings" in error for error in it["errors"][2:])


def test_optimizers_that_look_alike_do_not_swap_their_first_votes(found: list[dict[str, Found]]) -> None:
    """Each model of a rank was equal to the other model of the other rank from then on, and nothing said so."""
    one, other = of(found, two_optimizers_that_look_alike_in_another_order)
    assert one == other
    assert all("RanksDiffer: the ranks step different optimizers" in error for error in one["errors"][:2])
    assert one["errors"][2:] == ["nothing was raised"] * 4
    assert one["digests"][0] != one["digests"][1]


def test_settings_that_differ_are_named(found: list[dict[str, Found]]) -> None:
    for it in of(found, settings_differ):
        assert "the ranks differ in group_size of group 0: rank 0 has 16, and rank 1 has 128" in it["group_size"]
        assert re.search("the ranks differ in the layout or the settings.*parameters in the same order", it["base"])
        assert "the ranks differ in momentum of group 0: rank 0 has 0.9" in it["momentum"]
        assert it["weights"].startswith("ReplicasDiffer: the ranks do not start from the same parameters")


def test_a_state_of_another_rank_or_another_step_says_so(found: list[dict[str, Found]]) -> None:
    one, other = of(found, a_rank_loads_another_step_or_another_rank)
    assert "the saved state is that of rank 1 of 2, and this is that of rank 0 of 2" in one["rank"]
    assert "the saved state is that of rank 0 of 2, and this is that of rank 1 of 2" in other["rank"]
    for it in (one, other):
        assert "the ranks are in different steps (rank 0 in step 5, rank 1 in step 3)" in it["step"]


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_keeps_each_rank_s_momentum(flat: bool, found: list[dict[str, Found]]) -> None:
    one, other = of(found, a_checkpoint_of_both_ranks)
    assert len({*one[f"digests {flat}"], *other[f"digests {flat}"]}) == 1


def test_a_model_whose_gradients_are_averaged_is_refused(found: list[dict[str, Found]]) -> None:
    for it in of(found, a_model_in_ddp):
        assert "give the module itself, DeMoOptimizer(ddp.module, ...)" in it["given"]
        assert "the model is wrapped in DistributedDataParallel" in it["unseen"]
        assert "register_comm_hook(None, noop_hook)" in it["unseen"]
        assert it["same"], "with that hook it trains as without DDP"


def test_equal_gradients_are_seen_where_votes_do_not_show_them(found: list[dict[str, Found]]) -> None:
    for it in of(found, first_steps_without_equal_votes):
        for name in ("overflow", "own places"):
            assert "the model is wrapped in DistributedDataParallel" in it[name]
        assert it["warm-up"] == "nothing was raised", (
            "the paper's votes are empty at a rate of 0, whatever the gradient"
        )


def test_ranks_that_read_the_same_batches_are_told(found: list[dict[str, Found]]) -> None:
    for it in of(found, one_batch_for_all):
        [(kind, words, _)] = it["told"]
        assert kind == "RuntimeWarning"
        assert "give each rank batches of its own" in words


@pytest.mark.parametrize(("name", "steps"), [("each step", 7), ("local steps", 4)])
def test_a_rank_that_leaves_follows_the_others(name: str, steps: int, found: list[dict[str, Found]]) -> None:
    one, other = of(found, a_rank_has_fewer_batches)
    assert one[name] == other[name]
    assert one[name][1] == steps


def test_parameters_that_one_rank_alone_added_are_told(found: list[dict[str, Found]]) -> None:
    for it in of(found, parameters_are_added_on_one_rank):
        assert "RanksDiffer: the ranks differ in" in it["error"]
        assert "group 1" in it["error"]


def test_a_rank_that_ended_is_named_as_the_cause(found: list[dict[str, Found]]) -> None:
    assert "another rank has ended, or has fewer batches than this one" in found[0]["a_rank_ends"]["error"]
