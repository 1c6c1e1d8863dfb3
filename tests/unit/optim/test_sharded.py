"""FlexDeMo: two peers of two ranks each, sharded with FSDP2 over gloo, against the same two peers on one device each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.sharded import ShardedDeMo
from node.optim.torch_optimizer import DeMoOptimizer

STEPS, PEERS, SHARDS, BATCH = 4, 2, 2, 8
METHODS: dict[str, dict[str, Any]] = {
    "groups": {"group_size": 16, "weight_decay": 0.1},
    "second moment": {"group_size": 32, "beta2": 0.95},
    "top-k": {"selection": "topk", "top_k": 64, "values": "2bit", "transform": "hadamard"},
}


def network() -> nn.Sequential:
    """Odd sizes: strips on both sides, a bias that one rank holds nothing of, chunks that two ranks touch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 200), nn.Tanh(), nn.Linear(200, 130), nn.Tanh(), nn.Linear(130, 1))


def batch(peer: int, step: int) -> Tensor:
    return torch.randn(BATCH, 70, generator=torch.Generator().manual_seed(100 * step + peer))


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PEERS * SHARDS)
    mesh = init_device_mesh("cpu", (PEERS, SHARDS), mesh_dim_names=("peer", "shard"))
    peer, shard = rank // SHARDS, rank % SHARDS
    digests: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        model = network()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        group = mesh["peer"].get_group()
        optimizer = DeMoOptimizer(model.named_parameters(), lr=1e-2, process_group=group, **method)
        for step in range(STEPS):
            # each rank of a peer has half of its batch; FSDP averages
            rows = batch(peer, step).chunk(SHARDS)[shard]
            if name == "groups" and step == 2 and rank == 3:
                rows = rows * torch.nan  # the whole peer abstains
            optimizer.zero_grad()
            loss(model, rows).backward()
            optimizer.step()
            whole = [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
            digests.setdefault(name, []).append(state_digest(whole).hex())
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        digests[name].append(str(optimizer.abstentions))
    torch.save(digests, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def alone(name: str, method: dict[str, Any]) -> list[str]:
    """The same run with a whole model on each peer."""
    models = [network() for _ in range(PEERS)]
    demos = [DeMo(model, DeMoConfig(**method)) for model in models]
    lr, digests = float(torch.tensor(1e-2)), []
    for step in range(STEPS):
        entry = []
        for peer, (model, demo) in enumerate(zip(models, demos, strict=True)):
            if name == "groups" and step == 2 and peer == 1:
                continue
            model.zero_grad()
            loss(model, batch(peer, step)).backward()
            votes = demo.propose(lr)
            demo.settle(True)
            entry.append((votes.size, votes.payload))
        for demo in demos:
            demo.apply(entry, lr)
        digests.append(state_digest(demos[0].parameters).hex())
    return digests


@pytest.mark.timeout(200)
def test_a_peer_of_two_ranks_votes_and_moves_as_one_device_does(tmp_path: Path) -> None:
    multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=PEERS * SHARDS)  # type: ignore[no-untyped-call]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(PEERS * SHARDS)]
    for name, method in METHODS.items():
        digests = [rank[name][:-1] for rank in ranks]
        assert all(other == digests[0] for other in digests), f"{name}: the ranks hold different models"
        # gradients are averaged in another order there: votes may differ where two coefficients are almost equal
        wanted = alone(name, method)
        assert digests[0][0] == wanted[0], f"{name}: another first step than on one device"
        assert [rank[name][-1] for rank in ranks] == (["0", "0", "1", "1"] if name == "groups" else ["0"] * 4)


def test_what_is_not_sharded_as_it_should_be_is_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        ShardedDeMo(network(), DeMoConfig())
