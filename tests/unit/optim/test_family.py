"""Every method of the family through the same calls: exact whatever the order and the threads, restorable, and it learns."""

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.exact import transforms
from node.optim.step import NonFiniteGradient
from node.optim.votes.groups import VotesError

pytestmark = pytest.mark.usefixtures("one_thread")

LR = float(np.float32(0.01))
ROTATION = transforms.given("rotation", np.linalg.qr(np.random.default_rng(3).normal(size=(64, 64)))[0])

METHODS = {
    "default": DeMoConfig(),
    "top-k, signs": DeMoConfig(selection="topk", top_k=32),
    "2-bit groups": DeMoConfig(values="2bit", group_size=16),
    "8-bit top-k": DeMoConfig(selection="topk", top_k=16, values="8bit"),
    "hadamard": DeMoConfig(transform="hadamard"),
    "second moment": DeMoConfig(beta=0.9, beta2=0.95),
    "identity": DeMoConfig(transform="identity", selection="topk", top_k=64),
    "one's own transform": DeMoConfig(transform=ROTATION),
    "sgd": DeMoConfig(base=BaseConfig("sgd", momentum=0.9, nesterov=True)),
    "sgd with sizes": DeMoConfig(magnitudes=True, values="8bit", base=BaseConfig("sgd")),
    "adamw": DeMoConfig(base=BaseConfig("adamw", beta1=0.5), values="2bit", weight_decay=0.1),
    "muon": DeMoConfig(base=BaseConfig("muon", momentum=0.8)),
    "muon by chunks": DeMoConfig(base=BaseConfig("muon", block=64)),
    "signs of chunks, 2 bits": DeMoConfig(
        base=BaseConfig("muon", block=64, output="sign", iterations=2), values="2bit"
    ),
    "random signs": DeMoConfig(selection="random", seed=b"run"),
    "random signs, cap 7": DeMoConfig(selection="random", one_in=4, seed=b"run", cap=7),
    "groups, cap 3": DeMoConfig(group_size=16, cap=3),
    "random signs, muon": DeMoConfig(selection="random", base=BaseConfig("muon"), seed=b"run"),
    "striding, 2 bits": DeMoConfig(selection="striding", one_in=4, values="2bit", transform="hadamard"),
    "slicing, identity": DeMoConfig(selection="slicing", one_in=8, transform="identity"),
    "full, with sizes": DeMoConfig(selection="full", values="8bit", magnitudes=True, base=BaseConfig("sgd")),
    "Nesterov in the peer": DeMoConfig(
        nesterov=0.9, selection="topk", top_k=640, values="8bit", magnitudes=True, beta=0.95, base=BaseConfig("sgd")
    ),
    "SparseLoCo's votes": DeMoConfig(
        transform="identity", selection="topk", values="2bit", magnitudes=True, beta=0.95, base=BaseConfig("sgd")
    ),
}
every = pytest.mark.parametrize("config", METHODS.values(), ids=METHODS.keys())

RATES = {
    **{"identity": 0.1, "slicing, identity": 0.1, "sgd": 1e-3},
    **{"sgd with sizes": 10.0, "SparseLoCo's votes": 10.0, "full, with sizes": 10.0, "Nesterov in the peer": 1.0},
}
"""Peak learning rates of methods that LR does not suit: sizes are those of gradients, momentum adds up tenfold."""


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))


class Swarm:
    """Peers with a replica each, on the same task with data of their own."""

    def __init__(self, config: DeMoConfig, peers: int = 3) -> None:
        self.models = [network() for _ in range(peers)]
        self.demos = [DeMo(model, config) for model in self.models]
        torch.manual_seed(99)
        self.matrix = torch.randn(64, 64) / 8
        self.random = torch.Generator().manual_seed(1)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(batch), batch @ self.matrix)

    def step(self, lr: float = LR, lost: tuple[int, ...] = ()) -> list[tuple[int, bytes]]:
        """One clock step; the votes of `lost` peers are not accepted. Returns the entry."""
        entry = []
        for peer, (model, demo) in enumerate(zip(self.models, self.demos, strict=True)):
            model.zero_grad()
            self.loss(model, torch.randn(16, 64, generator=self.random)).backward()
            votes = demo.propose(lr)
            if peer not in lost:
                entry.append((votes.size, votes.payload))
            demo.settle(peer not in lost)
        for demo in self.demos:
            demo.apply(entry, lr)
        return entry

    def held_out(self) -> float:
        batch = torch.randn(256, 64, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            return float(self.loss(self.models[0], batch))

    def digests(self) -> set[bytes]:
        return {state_digest(demo.replicated) for demo in self.demos}


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_and_replicas_stay_equal(name: str) -> None:
    swarm, lr = Swarm(METHODS[name]), RATES.get(name, LR)
    before = swarm.held_out()
    for step in range(26):
        swarm.step(float(np.float32(lr * (1 - step / 26))))
    assert len(swarm.digests()) == 1
    assert swarm.held_out() < 0.75 * before


@every
def test_bits_depend_on_neither_order_nor_threads(config: DeMoConfig) -> None:
    swarm = Swarm(config)
    entries = [swarm.step() for _ in range(2)]
    [wanted] = swarm.digests()
    for order, threads in (((2, 1, 0), 1), ((1, 2, 0), 3)):
        torch.set_num_threads(threads)
        follower = DeMo(network(), config)
        for entry in entries:
            follower.apply([entry[index] for index in order], LR)
        assert state_digest(follower.replicated) == wanted


@every
def test_a_restored_peer_goes_on_as_if_nothing_had_happened(config: DeMoConfig) -> None:
    swarm, twin = Swarm(config, 1), Swarm(config, 1)
    for _ in range(2):
        swarm.step()
        twin.step()
    again = DeMo(network(), config)
    for mine, theirs in zip(again.replicated, swarm.demos[0].replicated, strict=True):
        mine.data.copy_(theirs)
    again.load_state_dict(swarm.demos[0].state_dict())
    swarm.demos, swarm.models = [again], [nn.Module()]
    for name, parameter in zip(("a", "b", "c", "d"), again.parameters, strict=True):
        swarm.models[0].register_parameter(name, parameter)  # type: ignore[arg-type]
    gradients = [torch.randn_like(parameter) for parameter in again.parameters]
    for demo in (again, twin.demos[0]):
        for parameter, gradient in zip(demo.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
    ours, wanted = again.propose(LR), twin.demos[0].propose(LR)
    assert ours.payload == wanted.payload
    for demo in (again, twin.demos[0]):
        demo.settle(True)
        demo.apply([(ours.size, ours.payload)], LR)
    assert state_digest(again.replicated) == state_digest(twin.demos[0].replicated)


@every
def test_an_empty_entry_and_peers_of_different_sizes(config: DeMoConfig) -> None:
    swarm = Swarm(config)
    swarm.step()
    for demo in swarm.demos:
        demo.apply([], LR)
    assert len(swarm.digests()) == 1
    sizes = config.form.sizes
    chosen = sizes[:2] + sizes[-1:] if len(sizes) > 1 else sizes * 3  # `full` has one
    for demo, size in zip(swarm.demos, chosen, strict=True):
        demo.config = config.with_size(size)
    entry = swarm.step()
    assert {size for size, _ in entry} == set(chosen)
    assert len(swarm.digests()) == 1


@every
def test_bad_votes_and_gradients_change_nothing(config: DeMoConfig) -> None:
    swarm = Swarm(config)
    [good, *_] = swarm.step()
    before = swarm.digests()
    demo = swarm.demos[0]
    with pytest.raises(VotesError):
        demo.apply([good, (good[0], good[1] + b"\0")], LR)
    with pytest.raises(VotesError):
        demo.apply([good, (7, good[1])], LR)
    for parameter in demo.parameters:
        parameter.grad = torch.full_like(parameter, math.inf)
    momentum = demo.momentum.clone()
    with pytest.raises(NonFiniteGradient):
        demo.propose(LR)
    assert torch.equal(demo.momentum, momentum)
    assert swarm.digests() == before


def test_no_peer_can_shout() -> None:
    """One peer whose gradients are a million times larger moves the model no further than another."""
    for config in (METHODS["8-bit top-k"], METHODS["sgd with sizes"]):
        moved = []
        for loud in (1.0, 1e6):
            swarm = Swarm(config)
            entry = []
            for peer, (model, demo) in enumerate(zip(swarm.models, swarm.demos, strict=True)):
                swarm.loss(model, torch.randn(16, 64, generator=swarm.random)).backward()
                demo.config = type(config)(**{**vars(config), "clip_norm": None})
                if peer == 2:
                    for parameter in demo.parameters:
                        parameter.grad = parameter.grad * loud  # type: ignore[operator]
                votes = demo.propose(LR)
                entry.append((votes.size, votes.payload))
            start = [parameter.detach().clone() for parameter in swarm.demos[0].parameters]
            swarm.demos[0].apply(entry, LR)
            moved.append(
                math.sqrt(
                    sum(
                        float((now.detach() - was).square().sum())
                        for now, was in zip(swarm.demos[0].parameters, start, strict=True)
                    )
                )
            )
        assert moved[1] < 1.5 * moved[0]


def test_refused_votes_are_restored_or_dropped_as_the_setting_says() -> None:
    for refused, kept in (("restore", True), ("drop", False)):
        swarm = Swarm(DeMoConfig(refused=refused), 1)  # type: ignore[arg-type]
        swarm.step()
        demo = swarm.demos[0]
        swarm.loss(swarm.models[0], torch.randn(16, 64)).backward()
        votes = demo.propose(LR)
        ballot = demo.config.form.decode(votes.payload, votes.size, demo.layout.chunks, torch.device("cpu"))
        demo.settle(False)
        assert bool(demo.momentum.view(-1, 4096).gather(1, ballot.where).any()) is kept


@pytest.mark.parametrize("name", ["default", "identity", "one's own transform"])
def test_looking_ahead_follows_the_own_momentum_and_is_undone(name: str) -> None:
    swarm = Swarm(METHODS[name], 1)
    swarm.step()
    demo = swarm.demos[0]
    swarm.loss(swarm.models[0], torch.randn(16, 64)).backward()
    votes = demo.propose(LR)
    before, momentum = [p.detach().clone() for p in demo.parameters], demo.momentum.clone()
    with suppress(KeyError), demo.ahead(LR):
        steps = torch.cat([(now.detach() - was).flatten() for now, was in zip(demo.parameters, before, strict=True)])
        assert float((steps.abs() - LR).abs().median()) < 1e-6
        ballot = demo.config.form.decode(votes.payload, votes.size, demo.layout.chunks, torch.device("cpu"))
        rest = momentum.view(-1, 4096).scatter(1, ballot.where, 0.0).view_as(momentum).double()
        matrix = torch.from_numpy(transforms.named("dct").matrix if name == "default" else ROTATION.matrix)
        if name != "identity":
            rest = matrix.T @ rest @ matrix
        wanted = [torch.empty_like(p) for p in demo.parameters]
        demo.layout.scatter(rest.float(), wanted)
        agree = torch.cat([direction.flatten() for direction in wanted]).sign() == -steps.sign()
        assert float(agree.float().mean()) > 0.999
        raise KeyError  # also when the gradient fails
    assert all(torch.equal(now, was) for now, was in zip(demo.parameters, before, strict=True))
    assert torch.equal(demo.momentum, momentum)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"selection": "chance"}, "selection"),
        ({"selection": "random", "one_in": 33}, "one in 33"),
        ({"nesterov": 1.0}, "nesterov"),
        ({"nesterov": 0.9, "beta2": 0.9}, "beta2 = 0"),
        ({"values": "3bit"}, "values"),
        ({"transform": "wavelet"}, "transform"),
        ({"selection": "topk", "top_k": 33}, "k 33"),
        ({"magnitudes": True}, "magnitudes"),
        ({"magnitudes": True, "beta2": 0.9, "base": BaseConfig("sgd")}, "exclude"),
        ({"beta2": 1.0}, "beta2"),
        ({"refused": "keep"}, "refused"),
        ({"cap": 1}, "cap = 1: expected is a whole number from 2 to 127"),
        ({"cap": 128}, "cap = 128: expected is a whole number from 2 to 127"),
        ({"cap": 7.0}, "cap = 7.0: expected is a whole number from 2 to 127"),
        ({"cap": True}, "cap = True: expected is a whole number from 2 to 127"),
        ({"cap": 7, "values": "2bit"}, "cap 7 has no effect with values 2bit"),
        ({"cap": 7, "base": "adamw"}, "base 'adamw'"),
    ],
)
def test_settings_that_do_not_exist_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DeMoConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sgd with sizes", "Nesterov in the peer", "SparseLoCo's votes", "signs with sizes"])
@pytest.mark.parametrize("peers", [3, 16])
def test_a_lone_hostile_voter_moves_its_chunk_no_further_than_the_others_move_theirs(
    name: str, peers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One peer of several shouts into a chunk where nobody else has a vote, as an unused expert is; all backends agree."""
    config = METHODS.get(name, DeMoConfig(magnitudes=True, base=BaseConfig("sgd")))
    entry, digests = [], set()
    drawn = torch.Generator().manual_seed(0)
    used, unused = (torch.randn(64, 64, generator=drawn) for _ in range(2))
    for backend in ("torch", "numba"):
        monkeypatch.setenv("SWARMENTUM_OPTIM_BACKEND", backend)
        everyone = []
        for peer in range(peers):
            named = [("used", nn.Parameter(torch.zeros(64, 64))), ("unused", nn.Parameter(torch.zeros(64, 64)))]
            hostile = peer == peers - 1
            everyone.append(DeMo(named, replace(config, clip_norm=None if hostile else 1.0)))
            named[0][1].grad, named[1][1].grad = used.clone(), unused * 1e9 if hostile else None
        votes = [demo.propose(1.0) for demo in everyone]
        entry = entry or [(vote.size, vote.payload) for vote in votes]
        everyone[0].apply(entry, 1.0)
        digests.add(state_digest(everyone[0].replicated))
        moved, shouted = (float(parameter.detach().square().mean().sqrt()) for parameter in everyone[0].parameters)
        assert 0 < shouted < 2 * 2 * moved / peers, (
            "twice the loudest, of one vote among all, and no two chunks are alike"
        )
    assert len(digests) == 1
