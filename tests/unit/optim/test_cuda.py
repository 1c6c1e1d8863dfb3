"""The step on a GPU: the parameters' bits are those of a CPU, whatever computes them. Skips where there is no CUDA device."""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.base import BaseConfig, given
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.step import NonFiniteGradient
from tests.unit.optim.test_family import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

SHAPES = [(130, 70), (64, 64), (3,), (128, 192), (), (320, 64)]
WAYS = (("cpu", "auto"), ("cpu", "torch"), ("cuda", "torch"), ("cuda", "triton"), ("cuda", "auto"))
DEFAULT = DeMoConfig(beta=0.95, beta2=0.99, base=BaseConfig("muon", block=64, iterations=2))


def halved(aggregate: Tensor, state: Mapping[str, Tensor], count: int) -> Tensor:
    """A base with all that may round: `given`."""
    state["square"].mul_(0.5).add_(aggregate.mul(aggregate))
    return aggregate.div(state["square"].sqrt().add_(1e-8))


CONFIGS = METHODS | {
    "a run's default": DEFAULT,
    "a run's default, signs": replace(DEFAULT, base=replace(DEFAULT.base, output="sign"), weight_decay=0.1),
    "shared places by chunks": replace(DEFAULT, selection="random", one_in=4, cap=7, seed=b"run"),
    "shared places, largest sums": replace(DEFAULT, selection="random", one_in=4, cap=127, seed=b"run"),
    "a base of one's own": DeMoConfig(base=given("own", halved, ("square",))),
    "own places": replace(DEFAULT, selection="independent", seed=b"run"),
    "factored, bf16": replace(DEFAULT, second_moment="factored", momentum_type="bf16"),
}


def peer(device: str, backend: str, config: DeMoConfig, shapes: list[Any], monkeypatch: pytest.MonkeyPatch) -> DeMo:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number, shape in enumerate(shapes)]
    return DeMo([(f"p{number}", nn.Parameter(it.to(device))) for number, it in enumerate(start)], config)


def give_gradients(demo: DeMo, seed: int) -> None:
    for number, parameter in enumerate(demo.parameters):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == 1 and seed % 2 else gradient.to(parameter.device)


def rate(step: int) -> float:
    return float(np.float32(0.01 / (1 + step)))


def digests(demos: list[DeMo]) -> set[bytes]:
    return {state_digest(demo.replicated) for demo in demos}


@pytest.mark.parametrize("name", CONFIGS)
def test_peers_on_cards_and_processors_have_the_same_bits_after_every_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = CONFIGS[name].selection == "independent"
    authors = [bytes([number]) * 32 for number in range(len(WAYS))] if own else None
    demos = [
        peer(device, backend, replace(CONFIGS[name], author=authors[number] if authors else b""), SHAPES, monkeypatch)
        for number, (device, backend) in enumerate(WAYS)
    ]
    for step in range(4):
        entry = []
        for number, demo in enumerate(demos):
            give_gradients(demo, 10 * step + number)
            votes = demo.propose(rate(step), step)
            entry.append((votes.size, votes.payload))
            demo.settle(number != step)
        for demo in demos:
            demo.apply(entry, rate(step), step, authors)
        assert len(digests(demos)) == 1, step


def test_tensor_cores_and_autocast_of_the_process_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        _check_products(monkeypatch)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _check_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (DEFAULT, CONFIGS["muon"], CONFIGS["shared places by chunks"], CONFIGS["adamw"]):
        demos = [peer(device, backend, config, SHAPES, monkeypatch) for device, backend in WAYS]
        give_gradients(demos[0], 0)
        votes = demos[0].propose(0.5, 0)
        for demo in demos:
            with torch.autocast("cuda", torch.bfloat16):
                demo.apply([(votes.size, votes.payload)] * 3, 0.5, 0)
        assert len(digests(demos)) == 1


@pytest.mark.parametrize("config", [DEFAULT, CONFIGS["shared places by chunks"]], ids=["groups", "shared places"])
def test_a_model_of_several_tiles(config: DeMoConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(4096, 2048), (5000, 4100), (2048, 4096), (100,), (64, 8192)]
    demos = [peer(device, backend, config, shapes, monkeypatch) for device, backend in WAYS]
    random = np.random.default_rng(0)
    size = demos[0].form.body_bytes(demos[0].layout.chunks, config.size)
    entry = [(config.size, random.bytes(size)) for _ in range(9)]
    for demo in demos:
        demo.apply(entry, 0.25, 1)
    assert len(digests(demos)) == 1
    for demo in demos[1:]:
        give_gradients(demo, 0)
        votes = demo.propose(0.5, 2)
        demo.settle(accepted=True)
        for other in demos:
            other.apply([(votes.size, votes.payload)], 0.5, 2)
        assert len(digests(demos)) == 1


def test_private_state_moves_between_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (DEFAULT, CONFIGS["factored, bf16"]):
        card, cpu = (peer(device, "auto", config, SHAPES, monkeypatch) for device in ("cuda", "cpu"))
        for one, other in ((card, cpu), (cpu, card)):
            give_gradients(one, 0)
            one.propose(0.5)
            one.settle(accepted=True)
            file = io.BytesIO()
            torch.save(one.state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file, weights_only=True))
            assert torch.equal(one.momentum.cpu(), other.momentum.cpu())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradients_that_join_one_by_one_give_the_votes_of_whole_ones(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS["factored, bf16"]
    whole, folded = (peer("cuda", backend, config, SHAPES, monkeypatch) for _ in range(2))
    for step in range(3):
        give_gradients(whole, 2 * step)
        gradients: list[Tensor] = [
            parameter.grad.clone() for parameter in whole.parameters if parameter.grad is not None
        ]
        folding = folded.folding(0.5)
        with folding.hooked():
            folding.start()
            folding.last(1)
            sum((p * g).sum() for p, g in zip(folded.parameters, gradients, strict=True)).backward()  # type: ignore[union-attr]
        folding.finish(1)
        one, other = folded.propose(0.5), whole.propose(0.5)
        assert len(one.payload) == len(other.payload)
        if backend == "triton":  # cuBLAS rounds as the number of chunks is
            assert one.payload == other.payload
        difference = (whole.momentum.float() - folded.momentum.float()).norm()
        assert difference < 0.01 * whole.momentum.float().norm()
        for demo in (whole, folded):
            demo.settle(accepted=False)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_gradient_that_is_not_finite_changes_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = peer("cuda", backend, DEFAULT, SHAPES, monkeypatch)
    give_gradients(demo, 0)
    demo.propose(0.5)
    demo.settle(accepted=True)
    before = demo.momentum.clone()
    give_gradients(demo, 2)
    demo.parameters[3].grad[5, 5] = torch.inf  # type: ignore[index]
    with pytest.raises(NonFiniteGradient):
        demo.propose(0.5)
    assert torch.equal(demo.momentum, before)
