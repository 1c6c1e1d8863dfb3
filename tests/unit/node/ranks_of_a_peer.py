"""Two ranks of a peer against one device; started by torchrun (`test_ranks`). Asserts on rank 0, which leads."""

import math
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.config import load_settings
from node.model.spec import ModelSpec
from node.optim.step import NonFiniteGradient
from node.ranks import channel, launched
from node.ranks import lead as leading
from node.ranks.channel import RankLost
from node.ranks.lead import Lead, RanksReplica
from node.ranks.shard import Order, follow
from node.snapshot.private import load_private
from node.training.optimizers import demo_config, local_config
from node.training.replica import Replica
from protos.assignment import Range
from protos.errors import OperatorError
from protos.optimizer_config import OptimizerConfig

RUN, SIZE, LR, CONTEXT = b"r" * 32, 64, 2.0**-8, 9
VOCABULARY = 70
PATIENCE_SECONDS = 8
HERE = "tests.unit.node.ranks_of_a_peer"


class Model(nn.Module):
    """Odd sizes, blocks, a tied table, a frozen parameter, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 66)
        self.blocks = nn.ModuleList(nn.Linear(66, 66) for _ in range(3))
        self.blocks[2].weight = self.blocks[1].weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(5, 2), requires_grad=False)
        self.factor = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.frozen.sum() * self.factor
        for block in self.blocks:
            x = x + block(x).tanh()
        return x @ self.table.weight.T


class Scalar(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Samples:
    """As `node.data.Samples`; a sample is a function of its index."""

    def micro_batches(self, ranges: Iterable[Range], micro_batch: int) -> Any:
        samples = [index for part in ranges for index in range(part.start, part.stop)]
        for first in range(0, len(samples), micro_batch):
            some = samples[first : first + micro_batch]
            yield np.array([np.random.default_rng(i).integers(0, VOCABULARY, CONTEXT + 1) for i in some])


def never() -> bool:
    return False


def gradient(replica: Replica, ranges: list[Range], micro_batch: int, stop: Any = never) -> tuple[Any, list[Tensor]]:
    result = replica.gradients(Samples(), ranges, micro_batch, torch.autocast("cpu", enabled=False), stop)  # type: ignore[arg-type]
    return result, [p.grad for p in replica.model.parameters() if p.grad is not None]


def same(one: Any, other: Any) -> bool:
    """Equal, tensors bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def replicas(lead: Lead, optimizer: OptimizerConfig) -> tuple[RanksReplica, Replica]:
    spec = ModelSpec(None, f"{HERE}:Model", {})
    order = Order(
        spec, 3, VOCABULARY, CONTEXT, demo_config(optimizer, SIZE, RUN), local_config(optimizer), "fp32"
    )  # fmt: skip
    return RanksReplica(RUN, lead, order, optimizer, SIZE), Replica(RUN, order.build(), optimizer, SIZE)


def gradients_are_those_of_one_device(lead: Lead) -> None:
    many, one = replicas(lead, OptimizerConfig())
    assert many.digest() == one.digest()
    assert many.whole_digest() == one.whole_digest()
    assert many.packed()[0].root == one.packed()[0].root
    # 7 samples in rounds of 2 * 2, 2 * 2 and 3: the last has 2 rows for one rank; one sample has none for the other
    for ranges in ([Range(0, 4), Range(9, 12)], [Range(5, 6)]):
        found, mine = gradient(many, ranges, 2)
        wanted, theirs = gradient(one, ranges, 2)
        assert (found.samples, found.tokens) == (wanted.samples, wanted.tokens)
        assert math.isclose(found.loss_mean, wanted.loss_mean, rel_tol=1e-5)
        # rank 0's rows are the first of each parameter
        for shard, whole in zip(mine, theirs, strict=True):
            local = shard.to_local()  # type: ignore[attr-defined]
            torch.testing.assert_close(local, whole[: len(local)], rtol=1e-4, atol=1e-6)
        gathered = many.whole_gradients()
        for parts, whole in zip(gathered, one.whole_gradients(), strict=True):
            assert parts.device.type == "cpu"
            torch.testing.assert_close(parts, torch.zeros_like(parts) if whole is None else whole, rtol=1e-4, atol=1e-6)
    asked = iter([False, False, True])
    assert gradient(many, [Range(0, 40)], 2, lambda: next(asked))[0].samples == 8, "it did not stop between rounds"
    empty = gradient(many, [], 2)[0]
    assert empty.samples == 0
    assert math.isnan(empty.loss_mean)


def saved(path: Path, replica: Replica) -> dict[str, Any]:
    """What the optimizer saved."""
    state = load_private(path, replica.run_id, replica.layout_digest)
    return state.optimizer


def private_state_moves_between_any_numbers_of_devices(lead: Lead, folder: Path) -> None:
    local = {"steps": 2}
    sgd = {"name": "sgd", "momentum": 0.5}
    for name, optimizer in {
        "moment": OptimizerConfig(beta2=0.9, base={"name": "adamw"}),  # type: ignore[arg-type]
        "local": OptimizerConfig(magnitudes=True, beta2=0, base=sgd, local=local, values="8bit"),  # type: ignore[arg-type]
        "nesterov": OptimizerConfig.model_validate(
            {"magnitudes": True, "beta2": 0, "nesterov": 0.9, "base": sgd, "values": "8bit", "selection": "random"}
        ),
    }.items():
        many, one = replicas(lead, optimizer)
        many.gradients(Samples(), [Range(0, 8)], 2, None, never)  # type: ignore[arg-type]
        data = many.vote(1, LR)
        many.save_private(folder / f"{name}.pt")
        assert one.load_private(folder / f"{name}.pt")
        assert one.open_payload() == data
        one.save_private(folder / f"{name}-2.pt")
        again, _ = replicas(lead, optimizer)
        assert again.load_private(folder / f"{name}-2.pt")
        assert again.open_payload() == data
        again.save_private(folder / f"{name}-3.pt")
        states = [saved(folder / f"{name}{part}.pt", one) for part in ("", "-2", "-3")]
        assert all(same(other, states[0]) for other in states[1:])
        # the snapshot too, base state included
        for replica in (again, one):
            replica.demo.settle(True)
            replica.demo.apply([(SIZE, data[-many.payload_bytes[SIZE] :])], LR)
        assert again.whole_digest() == one.whole_digest()
        manifest, packed = again.packed()
        assert manifest.root == one.packed()[0].root
        assert b"".join(map(bytes, again.image().pieces(1 << 20))) == packed
        many.load(manifest, packed)
        assert many.whole_digest() == one.whole_digest()
        exported = dict(many.whole_model().named_parameters())
        assert all(torch.equal(exported[name], tensor) for name, tensor in one.model.named_parameters())


def a_gradient_that_is_not_finite_abstains_on_every_rank(lead: Lead) -> None:
    many, one = replicas(lead, OptimizerConfig())
    spoilt = {name: t.clone() for name, t in one.state.items()}
    spoilt["blocks.0.weight"][-1, -1] = torch.inf  # of the last rank's rows
    for name, tensor in spoilt.items():
        many.state[name].copy_(tensor)
    gradient(many, [Range(0, 4)], 2)
    with pytest.raises(NonFiniteGradient):
        many.vote(1, LR)
    for name, tensor in one.state.items():
        many.state[name].copy_(tensor)  # type: ignore[arg-type]
    gradient(many, [Range(0, 4)], 2)
    assert many.vote(1, LR)


def a_model_that_cannot_be_sharded_is_refused(lead: Lead) -> None:
    optimizer = OptimizerConfig()
    spec = ModelSpec(None, f"{HERE}:Scalar", {})
    order = Order(spec, 3, VOCABULARY, CONTEXT, demo_config(optimizer, SIZE, RUN), local_config(optimizer), "fp32")
    with pytest.raises(OperatorError, match="several ranks cannot train this model"):
        RanksReplica(RUN, lead, order, optimizer, SIZE)


def signs_of_life_end_with_the_one_who_gives_them(lead: Lead, folder: Path) -> None:
    """Rank 0 says nothing for longer than the others wait, signs of life apart; then not even these."""
    threading.Event().wait(2 * PATIENCE_SECONDS)
    many, _ = replicas(lead, OptimizerConfig())
    assert many.digest()
    lead._closed.set()
    until = time.monotonic() + 10 * PATIENCE_SECONDS
    while not (folder / "lost").exists():
        assert time.monotonic() < until, "a rank waits for a silent rank 0 without end"
        threading.Event().wait(0.1)


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    launch = launched(os.environ)
    if what == "patience":
        channel.RANK_SECONDS_MAX, leading.ALIVE_SECONDS = PATIENCE_SECONDS, 0.5
    if launch.rank:
        try:
            follow(launch, load_settings(device="cpu", threads=1))
        except (OperatorError, RankLost) as error:
            (folder / ("lost" if isinstance(error, RankLost) else "refused")).write_text(str(error))
        return
    lead = Lead(launch, "cpu")
    try:
        if what == "patience":
            signs_of_life_end_with_the_one_who_gives_them(lead, folder)
            return
        gradients_are_those_of_one_device(lead)
        private_state_moves_between_any_numbers_of_devices(lead, folder)
        a_gradient_that_is_not_finite_abstains_on_every_rank(lead)
        a_model_that_cannot_be_sharded_is_refused(lead)
    finally:
        lead.close()


def rank(number: int, port: int, folder: str, what: str) -> None:
    """As torchrun starts a rank, whose agent has the store at `port`."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main(Path(folder), what)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
