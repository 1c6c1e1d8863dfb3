"""FlexDeMo: two peers of two ranks each, sharded with FSDP2 over gloo, against the same two peers on one device each.

Then one of two ranks alone, with every base: its parameters and base state against a whole model that is given the same votes.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from node.optim.base import BY_CHUNKS, BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.local import LocalConfig, LocalSteps
from node.optim.sharded_demo import ShardedDeMo
from node.optim.spread import whole
from node.optim.step import NonFiniteGradient
from node.optim.torch_optimizer import DeMoOptimizer, RanksDiffer, ReplicasDiffer
from node.optim.votes.groups import NotANumber
from node.optim.votes.payload import PLAIN
from tests.system.copied import ranks

STEPS, PEERS, SHARDS, BATCH = 4, 2, 2, 8
METHODS: dict[str, dict[str, Any]] = {
    "groups": {"group_size": 16, "weight_decay": 0.1},
    "second moment": {"group_size": 32, "beta2": 0.95},
    "top-k": {"selection": "topk", "top_k": 64, "values": "2bit", "transform": "hadamard", "beta2": 0.0},
    "random": {"selection": "random", "one_in": 8},
    "cap": {"group_size": 8, "cap": 3, "weight_decay": 0.1},
    "striding": {"selection": "striding", "values": "2bit", "one_in": 4},
    "Nesterov": {"selection": "slicing", "nesterov": 0.9, "beta2": 0.0},
    "local": {"local": LocalConfig(steps=2, lr=1e-2), "magnitudes": True, "values": "8bit", "base": BaseConfig("sgd")},
}
BASES: dict[str, dict[str, Any]] = {
    "sgd": {"values": "8bit", "magnitudes": True, "base": BaseConfig("sgd", momentum=0.9, nesterov=True)},
    "adamw": {"beta2": 0.9, "weight_decay": 0.1, "base": BaseConfig("adamw", beta1=0.5)},
    "muon": {"group_size": 16, "transform": "hadamard", "base": BaseConfig("muon", momentum=0.8)},
    "sign": {"selection": "topk", "refused": "drop"},
    "muon by chunks": {"weight_decay": 0.1, "base": BaseConfig("muon", block=64, iterations=3)},
    "signs of chunks": {"transform": "hadamard", "base": BaseConfig("muon", block=64, iterations=2, output="sign")},
}
CHECKPOINTED = ("second moment", "Nesterov", "local", "adamw")
LR = 2.0**-7


def network() -> nn.Sequential:
    """Odd sizes: strips on both sides, a bias that one rank holds nothing of, chunks that two ranks touch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 200), nn.Tanh(), nn.Linear(200, 130), nn.Tanh(), nn.Linear(130, 1))


def batch(peer: int, step: int) -> Tensor:
    return torch.randn(BATCH, 70, generator=torch.Generator().manual_seed(100 * step + peer))


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def sharded(mesh: Any) -> nn.Sequential:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wholes(model: nn.Module) -> list[Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[operator]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PEERS * SHARDS)
    mesh = init_device_mesh("cpu", (PEERS, SHARDS), mesh_dim_names=("peer", "shard"))
    peer, shard = rank // SHARDS, rank % SHARDS
    digests: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        model = sharded(mesh["shard"])
        group = mesh["peer"].get_group()
        optimizer = DeMoOptimizer(model, lr=1e-2, process_group=group, **method)
        for step in range(STEPS):
            # each rank of a peer has half of its batch; FSDP averages
            rows = batch(peer, step).chunk(SHARDS)[shard]
            if name == "groups" and step == 2 and rank == 3:
                rows = rows * torch.nan  # the whole peer abstains
            optimizer.zero_grad()
            loss(model, rows).backward()
            optimizer.step()
            if optimizer.exchanged:
                digests.setdefault(name, []).append(state_digest(wholes(model)).hex())
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        digests[name].append(str(optimizer.abstentions))
    for name in CHECKPOINTED:
        digests[f"{name} saved"] = _checkpoint(mesh, rank, name, Path(folder))
    with pytest.raises(ValueError, match=r"sharded over 2 of 4 ranks: give .*process_group=mesh\[\"peer\"\]"):
        DeMoOptimizer(sharded(mesh["shard"]), lr=1e-2)
    for name, method in BASES.items():
        _bases(mesh["shard"], DeMoConfig(**method), name)
    _nobody_waits_for_a_rank_that_cannot_vote(mesh["shard"])
    _what_differs_is_told(mesh, rank)
    torch.save(digests, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _checkpoint(mesh: Any, rank: int, name: str, folder: Path) -> list[str]:
    """Digests at the end of training in one go, and of training that a distributed checkpoint divides in two."""
    found = []
    method, group = {**METHODS, **BASES}[name], mesh["peer"].get_group()
    for resumed in (False, True):
        model = sharded(mesh["shard"])
        optimizer = DeMoOptimizer(model, lr=1e-2, process_group=group, **method)
        for step in range(STEPS):
            if resumed and step == STEPS // 2:
                optimizer.zero_grad()
                saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
                checkpoint.save(saved, checkpoint_id=folder / name)
                model = sharded(mesh["shard"])
                optimizer = DeMoOptimizer(model, lr=1e-2, process_group=group, **method)
                there = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
                checkpoint.load(there, checkpoint_id=folder / name)
                model.load_state_dict(there["model"])
                set_optimizer_state_dict(model, optimizer, there["optimizer"])
            optimizer.zero_grad()
            loss(model, batch(rank // SHARDS, step).chunk(SHARDS)[rank % SHARDS]).backward()
            optimizer.step()
        found.append(state_digest(wholes(model)).hex())
    return found


def _bases(mesh: Any, config: DeMoConfig, name: str) -> None:
    """A sharded model and a whole one, given the same votes, hold the same bits, the base's state included."""
    model, twin = sharded(mesh), network()
    demo, other = ShardedDeMo(model, config), DeMo(twin, config)
    core = wholes(model)[2][:128, :192]
    for step in range(STEPS):
        model.zero_grad()
        loss(model, batch(0, step).chunk(SHARDS)[demo.rank]).backward()
        if step < 2:
            demo.parameters[2].grad = None  # no gradient, and whole chunks: silent votes
        votes = demo.propose(LR)
        assert (len(votes.payload) > config.form.body_bytes(demo.layout.chunks, votes.size)) is (
            step < 2 and config.form == PLAIN
        ), name
        before = wholes(model)
        if config.magnitudes:
            with pytest.raises(ValueError, match="no look-ahead"), demo.ahead(LR):
                pass
        else:
            with demo.ahead(LR):
                moved = wholes(model)
            assert not all(map(torch.equal, before, moved)), f"{name}: looking ahead moves nothing"
        assert all(map(torch.equal, before, wholes(model))), f"{name}: looking ahead leaves a trace"
        demo.settle(step != 1)
        entry = [(votes.size, votes.payload)] * (step % 3)  # none, one, and two that agree
        demo.apply(entry, LR)
        other.apply(entry, LR)
        # Muon mixes a matrix with its strips, which share the pool with others
        if step < 2 and not config.weight_decay and name != "muon":
            assert torch.equal(wholes(model)[2][:128, :192], core), name
        for part in (None, step):
            assert state_digest(demo.replicated, part, 2**15) == state_digest(other.replicated, part, 2**15), name
    base = {key: whole(spread) for key, spread in demo.base_spread.items()}
    assert all(torch.equal(base[key], tensor) for key, tensor in other.base_state.items())
    for key, spread in {**demo.base_spread, **demo.private_spread}.items():
        new = torch.randn(spread.shape, generator=torch.Generator().manual_seed(len(key)))
        spread.fill(new if demo.rank == 0 else None)
        assert torch.equal(whole(spread), new), f"{name}: {key} was written and reads otherwise"


def _nobody_waits_for_a_rank_that_cannot_vote(mesh: Any) -> None:
    demo = ShardedDeMo(sharded(mesh), DeMoConfig(clip_norm=None))
    if demo.rank == 0:
        demo.momentum[0, 0, 0] = torch.nan
    with pytest.raises(NotANumber):
        demo.propose(LR)
    model = sharded(mesh)
    local = LocalSteps(list(model.parameters()), LocalConfig(steps=2))
    local.borrow()
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    if demo.rank == 1:
        next(model.parameters()).grad.to_local().fill_(torch.inf)  # type: ignore[union-attr, attr-defined]
    with pytest.raises(NonFiniteGradient):
        local.step()


def _what_differs_is_told(mesh: Any, rank: int) -> None:
    """Every rank raises in the step after one of them alone moved its rows, or has another rate."""
    for step, base in enumerate((BY_CHUNKS, BaseConfig("sgd", momentum=0.9))):
        model = sharded(mesh["shard"])
        optimizer = DeMoOptimizer(model, lr=1e-2, process_group=mesh["peer"].get_group(), base=base)

        def one_step(model: nn.Module = model, optimizer: DeMoOptimizer = optimizer) -> None:
            optimizer.zero_grad()
            loss(model, batch(rank // SHARDS, 0).chunk(SHARDS)[rank % SHARDS]).backward()
            optimizer.step()

        one_step()
        one_step()
        for rate in (5e-3, math.nan):
            if rank == 2:
                optimizer.param_groups[0]["lr"] = rate
            with pytest.raises((RanksDiffer, ValueError), match=r"lr of group 0: rank 0 has|learning rate nan"):
                one_step()
        optimizer.param_groups[0]["lr"] = 1e-2
        one_step()
        if rank == 3:
            with torch.no_grad():
                list(model.parameters())[2 * step].to_local().add_(1e-3)  # type: ignore[attr-defined]
        with pytest.raises(ReplicasDiffer, match="not the same parameters any more"):
            one_step()


def alone(name: str, method: dict[str, Any]) -> list[str]:
    """The same run with a whole model on each peer."""
    defaults = {"beta2": 0.0} if "magnitudes" in method else {"beta2": 0.99, "base": BY_CHUNKS}  # of DeMoOptimizer
    method = {"beta": 0.95, "seed": bytes(8), **defaults, **method}
    local = method.pop("local", LocalConfig())
    models = [network() for _ in range(PEERS)]
    demos = [DeMo(model, DeMoConfig(**method, **({"clip_norm": None} if local.steps > 1 else {}))) for model in models]
    inner = [LocalSteps(demo.parameters, local) for demo in demos]
    lr, digests = float(torch.tensor(1e-2)), []
    for first in range(0, STEPS, local.steps):
        entry = []
        for peer, (model, demo) in enumerate(zip(models, demos, strict=True)):
            if name == "groups" and first == 2 and peer == 1:
                continue
            if local.steps > 1:
                inner[peer].borrow()
            for step in range(first, first + local.steps):
                model.zero_grad()
                for rows in batch(peer, step).chunk(
                    SHARDS
                ):  # as the ranks do: a half each, and the mean of two is exact
                    (loss(model, rows) / SHARDS).backward()
                if local.steps > 1:
                    inner[peer].step()
            if local.steps > 1:
                inner[peer].give_back()
            votes = demo.propose(lr)
            demo.settle(True)
            entry.append((votes.size, votes.payload))
        for demo in demos:
            demo.apply(entry, lr)
        digests.append(state_digest(demos[0].parameters).hex())
    return digests


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("one_thread")
def test_a_peer_of_two_ranks_votes_and_moves_as_one_device_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch on one device, too: momentum is private, and other kernels round it in other ways on some processors."""
    monkeypatch.setenv("SWARMENTUM_OPTIM_BACKEND", "torch")
    ranks(PEERS * SHARDS, _rank, str(tmp_path))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(PEERS * SHARDS)]
    for name, method in METHODS.items():
        digests = [rank[name][:-1] for rank in found]
        assert all(other == digests[0] for other in digests), f"{name}: the ranks hold different models"
        wanted = alone(name, method)
        if name != "local":  # its steps add up rounding, and 8 bits a vote show it
            assert digests[0] == wanted, f"{name}: another model than on one device"
    for name in CHECKPOINTED:
        ends = {digest for rank in found for digest in rank[f"{name} saved"]}
        assert len(ends) == 1, f"{name}: a checkpoint changed the training"
    for name in METHODS:
        assert [rank[name][-1] for rank in found] == (["0", "0", "1", "1"] if name == "groups" else ["0"] * 4)


def test_what_is_not_sharded_as_it_should_be_is_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        ShardedDeMo(network(), DeMoConfig())
