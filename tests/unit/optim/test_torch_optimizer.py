"""DeMo in an ordinary training script: alone, and in two gloo processes that stay bit-identical."""

import copy
import re
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.local import LocalConfig
from node.optim.torch_optimizer import DeMoOptimizer, MomentumLost, ReplicasDiffer
from node.optim.votes import groups as votes
from protos.optimizer_config import OptimizerConfig
from tests.system.copied import ranks

pytestmark = pytest.mark.filterwarnings("ignore:parameters do not tell:UserWarning")

STEPS = 6


def model_and_data(seed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(65, 70), nn.Tanh(), nn.Linear(70, 3))
    generator = torch.Generator().manual_seed(seed)
    return model, torch.randn(32, 65, generator=generator), torch.randn(32, 3, generator=generator)


def groups_of(model):
    return [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters(), "group_size": 16}]


def train(model, optimizer, data, steps, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


def test_alone_it_is_demo():
    model, inputs, target = model_and_data(1)
    other, _, _ = model_and_data(1)
    train(model, DeMoOptimizer(model.parameters(), lr=1e-2, weight_decay=0.1), (inputs, target), STEPS)
    demo, lr = DeMo(other, DeMoConfig(beta=0.95, beta2=0.99, weight_decay=0.1)), float(np.float32(1e-2))
    for _ in range(STEPS):
        other.zero_grad()
        nn.functional.mse_loss(other(inputs), target).backward()
        proposal = demo.propose(lr)
        demo.settle(accepted=True)
        demo.apply([(proposal.size, proposal.payload)], lr)
    assert state_digest(list(model.parameters())) == state_digest(list(other.parameters()))


def test_schedulers_closures_and_named_parameters_work():
    model, inputs, target = model_and_data(1)
    optimizer = DeMoOptimizer(model.named_parameters(), lr=1e-2)
    train(model, optimizer, (inputs, target), 5, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)
    frozen = state_digest(list(model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, (inputs, target), 1)
    assert state_digest(list(model.parameters())) == frozen

    def closure():
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0


def test_state_dict_round_trip_continues_bit_for_bit(tmp_path):
    model, inputs, target = model_and_data(1)
    optimizer = DeMoOptimizer(groups_of(model), lr=1e-2)
    train(model, optimizer, (inputs, target), 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, (inputs, target), 3)

    other, _, _ = model_and_data(1)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    resumed = DeMoOptimizer(groups_of(other), lr=5.0)
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, (inputs, target), 3)
    assert state_digest(list(model.parameters())) == state_digest(list(other.parameters()))
    with pytest.raises(ValueError, match="parameter groups"):
        DeMoOptimizer(other.parameters(), lr=1.0).load_state_dict(saved["optimizer"])


def test_a_gradient_that_is_not_finite_abstains():
    model, inputs, target = model_and_data(1)
    optimizer = DeMoOptimizer(model.parameters(), lr=1e-2)
    digest = state_digest(list(model.parameters()))
    train(model, optimizer, (inputs * torch.nan, target), 1)
    assert optimizer.abstentions == 1
    assert state_digest(list(model.parameters())) == digest
    train(model, optimizer, (inputs, target), 1)
    assert state_digest(list(model.parameters())) != digest


def test_options_out_of_range_are_refused():
    model, _, _ = model_and_data(1)
    with pytest.raises(ValueError, match=r"learning rate -1\.0: expected is a finite number of at least 0"):
        DeMoOptimizer(model.parameters(), lr=-1.0)
    with pytest.raises(ValueError, match=r"YAML reads 1e-3 as text: write 1\.0e-3"):
        DeMoOptimizer(model.parameters(), lr="1e-3")
    with pytest.raises(votes.VotesError):
        DeMoOptimizer(model.parameters(), lr=1.0, group_size=100)


METHODS = {
    "top-k into AdamW": {"selection": "topk", "values": "2bit", "base": BaseConfig("adamw")},
    "muon": {"transform": "hadamard", "base": BaseConfig("muon", momentum=0.5)},
    "muon by chunks": {"base": BaseConfig("muon", block=64)},
    "DiLoCo": {"magnitudes": True, "values": "8bit", "base": BaseConfig("sgd"), "local": LocalConfig(3, lr=1e-2)},
}


def family(model, name, **more):
    lr = 1.0 if name == "DiLoCo" else 1e-2
    return DeMoOptimizer(model.named_parameters(), lr=lr, **METHODS[name], **more)


def test_a_saved_state_of_other_sizes_or_places_is_refused():
    """Their momentum has another unit, or the votes other places: nothing else of the state tells."""
    model, inputs, target = model_and_data(1)
    sized = {"values": "8bit", "base": BaseConfig("sgd")}
    plain = DeMoOptimizer(model, 1e-2, beta2=0.0, **sized)
    train(model, plain, (inputs, target), 2)
    with pytest.raises(
        ValueError, match=r"has magnitudes False, and this optimizer has magnitudes True: set magnitudes"
    ):
        DeMoOptimizer(model, 1e-2, magnitudes=True, **sized).load_state_dict(plain.state_dict())
    drawn = DeMoOptimizer(model, 1e-2, selection="random", seed=-3)
    DeMoOptimizer(model, 1e-2, selection="random", seed=-3).load_state_dict(drawn.state_dict())
    with pytest.raises(ValueError, match=r"has seed -3, and this optimizer has seed 4: set seed as it was"):
        DeMoOptimizer(model, 1e-2, selection="random", seed=4).load_state_dict(drawn.state_dict())
    DeMoOptimizer(model, 1e-2, beta2=0.0, seed=5, **sized).load_state_dict(
        plain.state_dict()
    )  # no place follows from it


def test_local_steps_without_sizes_are_refused_as_in_a_run():
    words = "local steps need `magnitudes = true` and base sgd: how far a peer went is the update's size"
    with pytest.raises(ValueError, match=re.escape(words)):
        DeMoOptimizer(nn.Linear(4, 4), 1e-2, local=LocalConfig(3))
    with pytest.raises(ValueError, match=re.escape(words)):
        OptimizerConfig.model_validate({"local": {"steps": 3}})
    DeMoOptimizer(nn.Linear(4, 4), 1e-2, local=LocalConfig(1))


def test_a_base_is_a_name_or_a_configuration():
    named, given = (DeMoOptimizer(nn.Linear(4, 4), 1e-2, base=base) for base in ("muon", BaseConfig("muon")))
    assert named._demos[0].config == given._demos[0].config
    with pytest.raises(
        TypeError, match=r'write a name such as "muon", BaseConfig\(.*, or base\.given\(name, function\)'
    ):
        DeMoOptimizer(nn.Linear(4, 4), 1e-2, base=torch.sign)
    with pytest.raises(ValueError, match="base 'moun' is none of sign, sgd, adamw, muon"):
        DeMoOptimizer(nn.Linear(4, 4), 1e-2, base="moun")


def test_local_steps_move_and_are_paid_back():
    """Between exchanges the parameters are the rank's own; at the exchange all that counts is what was voted."""
    model, inputs, target = model_and_data(1)
    optimizer = family(model, "DiLoCo")
    saved = optimizer.state_dict()
    train(model, optimizer, (inputs, target), 2)
    assert not optimizer.exchanged
    for use in (optimizer.state_dict, lambda: copy.deepcopy(optimizer), lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match=r"save and copy it when `optimizer\.exchanged` is true"):
            use()
    train(model, optimizer, (inputs * torch.nan, target), 1)  # the bad step is left out, the round still ends
    assert optimizer.exchanged
    assert optimizer.abstentions == 1
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_setting_that_does_not_exist_is_refused():
    model, _, _ = model_and_data(1)
    with pytest.raises(TypeError, match=r"topk: no such setting; there are alone, base, beta, beta2, .*top_k"):
        DeMoOptimizer(model.parameters(), lr=1.0, topk=3)


def _rank(rank, folder):
    """One process: trains on its own data with a bad gradient now and then, and writes its digest after every step."""
    torch.set_num_threads(1 + rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, inputs, target = model_and_data(10 + rank)
    optimizer = DeMoOptimizer(groups_of(model), lr=1e-2, process_group=dist.group.WORLD)
    digests = []
    for step in range(STEPS):
        bad = torch.nan if rank == 1 and step == 2 else 1.0
        train(model, optimizer, (inputs * bad, target), 1)
        digests.append(state_digest(list(model.parameters())).hex())
    differs = False
    with torch.no_grad():
        model[0].weight += rank
    try:
        train(model, DeMoOptimizer(model.parameters(), lr=1e-2, process_group=dist.group.WORLD), (inputs, target), 1)
    except ReplicasDiffer:
        differs = True
    abstentions, equal = optimizer.abstentions, []
    for name in METHODS:
        model, inputs, target = model_and_data(10 + rank)
        optimizer = family(model, name, process_group=dist.group.WORLD)
        for _ in range(3):
            train(model, optimizer, (inputs, target), 3)
            equal.append(state_digest(list(model.parameters())).hex())
    torch.save((digests, abstentions, differs, equal), f"{folder}/{rank}.pt")
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    assert group() is None, "a process group that outlives its end can abort the process"


def test_two_processes_stay_bit_identical(tmp_path):
    ranks(2, _rank, str(tmp_path))
    (first, none, differs, methods), (second, bad, _, others) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert first == second
    assert len(set(first)) == STEPS
    assert methods == others
    assert len(set(methods)) == 3 * len(METHODS)
    assert (none, bad) == (0, 2)
    assert differs


def _rank_with_silent_votes(rank, folder):
    """Rank 1 has no gradient for the second group, so that its payload alone is longer than there is room for."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, inputs, target = model_and_data(10 + rank)
    optimizer = DeMoOptimizer(groups_of(model), lr=1e-2, process_group=dist.group.WORLD)
    exchanges, gather = [], optimizer._exchange._gather
    optimizer._exchange._gather = lambda ballot: exchanges.append(len(ballot)) or gather(ballot)
    digests = []
    for step in range(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        if rank == 1 and step < 2:
            model[2].zero_grad()
        optimizer.step()
        digests.append(state_digest(list(model.parameters())).hex())
    torch.save((digests, exchanges), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(900)
def test_a_payload_with_silent_votes_needs_a_second_exchange_and_the_others_none(tmp_path):
    ranks(2, _rank_with_silent_votes, str(tmp_path))
    (one, exchanges), (other, theirs) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one == other
    assert exchanges == theirs
    assert exchanges[0] < 50, "of a first step only lengths are known"
    assert len(exchanges) == 1 + 4, "a later step has the room that the step before it needed"
    assert exchanges[3] > exchanges[4], "and no more"


def _rank_that_loses_its_momentum(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, inputs, target = model_and_data(10 + rank)
    optimizer = DeMoOptimizer(groups_of(model), lr=1e-2, process_group=dist.group.WORLD)
    train(model, optimizer, (inputs, target), 2)
    if rank == 1:
        optimizer._demos[1].momentum[0, 0, 0] = torch.nan
    before, words = state_digest(list(model.parameters())).hex(), ""
    try:
        train(model, optimizer, (inputs, target), 1)
    except MomentumLost as error:
        words = str(error)
    torch.save((before, state_digest(list(model.parameters())).hex(), words), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(900)
def test_a_rank_whose_momentum_is_no_number_ends_all_and_none_waits_for_it(tmp_path):
    """It raised on that rank alone; the other waited in its exchange for as long as gloo lets it: half an hour."""
    ranks(2, _rank_that_loses_its_momentum, str(tmp_path))
    ends = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for before, after, words in ends:
        assert "the momentum of rank 1 is not a number" in words
        assert before == after, "nothing was applied"
