"""Muon by chunks: exact, near the iteration in fp64, the same bits on every backend; and parameters too small to keep."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.backends.portable import Portable
from node.optim.base import Base, BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.exact import orthogonal
from node.optim.exact.orthogonal import orthogonal_chunks
from node.optim.layout import CONVOLUTION, Layout
from node.optim.torch_optimizer import DeMoOptimizer
from node.optim.votes import groups as votes
from node.training.optimizers import demo_config
from protos.optimizer_config import OptimizerConfig
from protos.run_config import RunConfig, config_from_json

CPU = torch.device("cpu")
LR = float(np.float32(2e-3))
KINDS = [(output, iterations) for output in ("real", "sign") for iterations in (2, 3, 5)]
SHAPES = {
    "embed.weight": (130, 70), "up.weight": (200, 130), "experts": (64, 8, 72), "conv.weight": (70, 8, 3, 3), "bias": (70,),
    "still.weight": (64, 128), "scale": (),
}  # fmt: skip
"""A table, a map with strips, a stack of experts with cores, a convolution, a vector and a map that never has a gradient."""


def muon(output: str = "real", iterations: int = 5) -> BaseConfig:
    return BaseConfig("muon", block=64, output=output, iterations=iterations)  # type: ignore[arg-type]


def iterated(chunks: Tensor, iterations: int) -> Tensor:
    """The iteration in fp64."""
    x = chunks.double()
    x = x / (x.mT @ x).flatten(1).norm(dim=1).sqrt()[:, None, None]
    for _ in range(iterations):
        gram = x.mT @ x
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x * 8


RANDOM = torch.Generator().manual_seed(4)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM)


def with_one(matrix: Tensor, entry: float) -> Tensor:
    matrix[3, 5] = entry
    return matrix


HARD = {
    "random": (drawn(64, 64), 0.003, 0.006, 0.012),
    "whole numbers": (drawn(64, 64).mul(2).round().clamp(-2, 2), 0.003, 0.006, 0.012),
    "one large entry": (with_one(drawn(64, 64), 60.0), 0.01, 0.02, 0.03),
    "one entry": (with_one(torch.zeros(64, 64), -1.0), 0.002, 0.003, 0.003),
    "all the same": (torch.ones(64, 64), 0.002, 0.03, 0.01),
    "all the same but one": (with_one(torch.ones(64, 64), 20.0), 0.01, 0.03, 0.04),
    "mostly zeros": (drawn(64, 64) * (torch.rand(64, 64, generator=RANDOM) < 0.02), 0.003, 0.006, 0.02),
    "orthogonal": (torch.linalg.qr(drawn(64, 64))[0], 0.006, 0.006, 0.02),
    "one on the diagonal": (torch.eye(64) - 0.0021, 0.005, 0.006, 0.01),
    "rank two": (drawn(64, 2) @ drawn(2, 64), 0.01, 0.03, 0.3),
    "a column 256 times larger": (drawn(64, 64) * torch.where(torch.arange(64) == 3, 256.0, 1.0), 0.03, 0.1, 0.15),
}


@pytest.mark.parametrize(("matrix", "two", "three", "five"), HARD.values(), ids=HARD.keys())
def test_a_chunk_is_near_the_iteration_in_fp64(matrix: Tensor, two: float, three: float, five: float) -> None:
    for iterations, error in ((2, two), (3, three), (5, five)):
        found, wanted = orthogonal_chunks(matrix[None], iterations), iterated(matrix[None], iterations)
        assert float((found - wanted).norm()) <= error * float(wanted.norm()), iterations


@pytest.mark.parametrize("iterations", [2, 3, 4, 5])
def test_no_chunk_leaves_the_region_in_which_the_iteration_converges(iterations: int) -> None:
    """Equal numbers are rounded alike, which adds up: with 64 of them it stays within the iteration's room."""
    flat = torch.linspace(-1.8, 1.8, 100)[:, None, None] / 64
    signs, blocks = drawn(64, 64).sign(), torch.block_diag(*[torch.ones(8, 8) / 8] * 8)
    diagonal = torch.diag(drawn(64).sign())
    hard = [start + flat * also for start, also in (
        (torch.eye(64), torch.ones(64, 64)), (torch.eye(64), signs), (diagonal, torch.ones(64, 64)),
        (blocks, torch.ones(64, 64)),
    )]  # fmt: skip
    sparse = drawn(100, 64, 64) * (torch.rand(100, 64, 64, generator=RANDOM) < 0.03)
    others = torch.stack([matrix for matrix, *_ in HARD.values()])
    for chunks in (*hard, sparse, others):
        assert float(torch.linalg.svdvals(orthogonal_chunks(chunks, iterations).double() / 8).max()) < 1.23


def test_entries_are_bounded_whatever_the_iteration_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonal, "COEFFICIENTS", (100.0, 100.0, 100.0))
    found = orthogonal_chunks(torch.stack([torch.ones(64, 64), torch.eye(64)]), 5)
    assert float(found.abs().max()) == orthogonal.ENTRY_MAX * orthogonal.SCALE


def test_scale_changes_no_bit_and_nothing_stays_nothing() -> None:
    chunks = drawn(3, 64, 64)
    wanted = orthogonal_chunks(chunks, 3)
    for power in (-90, -20, 20, 100):
        assert torch.equal(orthogonal_chunks(chunks * 2.0**power, 3), wanted)
    for nothing in (0.0, -0.0, 2.0**-101, 1e-42):
        found = orthogonal_chunks(torch.full((2, 64, 64), nothing), 3)
        assert found.view(torch.int32).eq(0).all()


def test_digits_in_fp32_and_fp64_give_the_same_products() -> None:
    for most in (4096, 8191):
        one = torch.randint(-most, most + 1, (5, 64, 64), generator=RANDOM).float()
        other = torch.randint(-4096, 4097, (5, 64, 64), generator=RANDOM).float()
        one[0], other[0] = most, -4096.0
        wanted = one.double() @ other.double()
        assert torch.equal(orthogonal._products(one, other), wanted)
        assert torch.equal(orthogonal._by_digits(one, other).double(), wanted)


def test_the_bits_are_those_of_every_other_machine() -> None:
    """Of entries that need no library to draw: whoever changes this, changes what recorded runs of Muon by chunks replay to."""
    chunks = (torch.arange(3 * 4096) * 40503 % 65537 - 32768).to(torch.float32).view(3, 64, 64)
    found = [orthogonal_chunks(chunks, iterations) for iterations in (2, 3, 4, 5)]
    assert state_digest(found).hex() == "2d77ff10fed4f531db1d3a061ae28404485d2ca4bd5dcbaa0d9824850d3c6a75"


def entry_of(layout: Layout, sizes: list[int], seed: int = 0) -> list[tuple[int, bytes]]:
    random = np.random.default_rng(seed)
    return [(size, random.bytes(votes.vote_bytes(layout.chunks, size))) for size in sizes]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(), (128,), (8,) * 40, (16, 128, 64, 32)]),
    st.sampled_from(KINDS),
    st.sampled_from([LR, -LR, 0.0, 1.0]),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.integers(0, 2**32 - 1),
)
def test_numba_moves_parameters_to_the_bits_of_torch(
    sizes: tuple[int, ...], kind: tuple[str, int], lr: float, decay: float, seed: int
) -> None:
    backend = pytest.importorskip("node.optim.backends.numba.backend")
    layout = Layout.of_shapes(SHAPES.items(), {"conv.weight": CONVOLUTION})
    base, generator = Base(muon(*kind), layout, CPU), torch.Generator().manual_seed(seed)
    ours = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
    theirs, entry = [tensor.clone() for tensor in ours], entry_of(layout, list(sizes), seed)
    backend.Fused(layout, base).apply(entry, ours, lr, decay)
    Portable(layout, CPU, 3, base).apply(entry, theirs, lr, decay)
    for name, one, other in zip(SHAPES, ours, theirs, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes(), name


def named(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in SHAPES.items()]


def swarm(backends: list[str], config: DeMoConfig, monkeypatch: pytest.MonkeyPatch, steps: int = 3) -> list[DeMo]:
    peers = []
    for backend in backends:
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        peers.append(DeMo(named(), config))
    for step in range(steps):
        entry = []
        for number, peer in enumerate(peers):
            for index, (name, parameter) in enumerate(zip(SHAPES, peer.parameters, strict=True)):
                generator = torch.Generator().manual_seed(100 * step + 10 * number + index)
                parameter.grad = None if name == "still.weight" else torch.randn(parameter.shape, generator=generator)
            proposal = peer.propose(LR)
            peer.settle(True)
            entry.append((proposal.size, proposal.payload))
        for peer in peers:
            peer.apply(entry, LR)
    return peers


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_replicas_of_all_backends_stay_equal_and_hold_no_state(
    kind: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = swarm(["torch", "auto", "torch"], DeMoConfig(base=muon(*kind), group_size=32), monkeypatch)
    assert len({state_digest(peer.replicated) for peer in peers}) == 1
    assert [peer.base_state for peer in peers] == [{}, {}, {}]
    start = dict(named())["still.weight"]
    moved = peers[0].parameters[list(SHAPES).index("still.weight")]
    assert torch.equal(moved, start), "a map without votes stays"


@pytest.mark.parametrize(
    "form", [{"values": "2bit"}, {"transform": "hadamard"}, {"selection": "random", "values": "8bit"}]
)
def test_other_votes_and_transforms_have_it_too(form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    peers = swarm(["auto", "torch"], DeMoConfig(base=muon(iterations=2), **form), monkeypatch)
    assert len({state_digest(peer.replicated) for peer in peers}) == 1


def test_chunks_of_maps_are_orthogonal_and_the_rest_are_signs() -> None:
    layout = Layout.of_shapes(SHAPES.items(), {"conv.weight": CONVOLUTION})
    places = {place.name: place for place in layout.places}
    maps = {
        name
        for name, place in places.items()
        if base_maps(layout)[place.first_chunk : place.first_chunk + place.core_chunks].any()
    }
    assert maps == {"up.weight", "conv.weight", "still.weight"}
    assert places["experts"].core_chunks and places["embed.weight"].core_chunks, "they have cores, and none is a map's"  # noqa: PT018
    update = torch.randn(layout.chunks, 64, 64, generator=torch.Generator().manual_seed(1))
    found = Base(muon(), layout, CPU).direct(update.clone())
    signs = Base(muon("sign"), layout, CPU).direct(update.clone())
    chosen = base_maps(layout)
    assert torch.equal(found[~chosen], update[~chosen].sign())
    assert torch.equal(signs, found.sign())
    assert 0.9 < float(found[chosen].square().mean().sqrt()) < 1.1


def base_maps(layout: Layout) -> Tensor:
    return Base(muon(), layout, CPU).maps


def test_a_step_needs_no_other_chunk() -> None:
    """What sharded peers and kernels rely on: a chunk's update is the same with all others as alone."""
    layout = Layout.of_shapes(SHAPES.items())
    base, update = Base(muon(), layout, CPU), drawn(layout.chunks, 64, 64)
    whole = base.direct(update.clone())
    for first in range(layout.chunks):
        assert torch.equal(base.direct_chunks(update[first : first + 1].clone(), first), whole[first : first + 1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "sign", "block": 64}, "block 64 has no effect with base 'sign'"),
        ({"name": "sgd", "iterations": 3}, "iterations 3 has no effect"),
        ({"name": "adamw", "output": "sign"}, "output 'sign' has no effect"),
        ({"name": "muon", "block": 32}, "block = 32: expected is 0 or 64"),
        ({"name": "muon", "iterations": 1}, "iterations = 1: expected is a whole number from 2 to 5"),
        ({"name": "muon", "iterations": 6}, "iterations = 6: expected is a whole number from 2 to 5"),
        ({"name": "muon", "output": "sign"}, "needs block 64"),
        ({"name": "muon", "block": 64, "output": "half"}, '"real" or "sign"'),
        ({"name": "muon", "block": 64, "momentum": 0.9}, "no momentum of the aggregate"),
        ({"name": "muon", "block": 64, "nesterov": True}, "no momentum of the aggregate"),
    ],
)
def test_settings_that_do_not_fit_are_refused_everywhere(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BaseConfig(**settings)
    with pytest.raises(ValidationError) as refused:
        OptimizerConfig.model_validate({"base": settings})
    key = next(key for key in ("iterations", "output", "block") if key in settings)
    assert key in str(refused.value)


def test_run_toml_and_the_torch_optimizer_have_the_same_settings() -> None:
    settings = {"name": "muon", "block": 64, "iterations": 2, "output": "sign"}
    config = demo_config(OptimizerConfig.model_validate({"base": settings}), 128, b"")
    assert config.base == BaseConfig("muon", block=64, iterations=2, output="sign")
    for base, kind in ((BaseConfig("muon", block=64), "muon by chunks"), (BaseConfig("muon"), "muon")):
        optimizer = DeMoOptimizer(nn.Linear(64, 64), lr=1e-3, base=base)
        assert optimizer.param_groups[0]["method"].endswith(kind)


def test_a_run_of_before_means_what_it_meant() -> None:
    """A genesis without the new settings: whole matrices, and 5 iterations."""
    old = '{"optimizer":{"base":{"name":"muon","momentum":0.5}}}'
    base = demo_config(config_from_json(old).optimizer, 128, b"").base
    assert (base.block, base.iterations, base.output) == (0, 5, "real")
    assert base == BaseConfig("muon", momentum=0.5)


def test_a_base_without_state_counts_no_steps() -> None:
    long = {"clock": {"steps": 2**24 + 1}, "optimizer": {"base": {"name": "muon", "block": 64}}}
    assert RunConfig.model_validate(long).clock.steps == 2**24 + 1
    with pytest.raises(ValidationError, match="counts at most"):
        RunConfig.model_validate({**long, "optimizer": {"base": "muon"}})


SMALL = torch.tensor([2e-38, -2e-38, 1.2e-38, 1e-40, -1e-45, 2.0**-100, -(2.0**-100), 2.0**-101, 0.0, -0.0, 1.0, 1e-30])


@pytest.mark.parametrize("config", [
    DeMoConfig(), DeMoConfig(base=muon()), DeMoConfig(base=muon("sign")), DeMoConfig(base=BaseConfig("muon")),
    DeMoConfig(base=BaseConfig("adamw")), DeMoConfig(values="2bit"),
], ids=["sign", "real chunks", "signs of chunks", "muon", "adamw", "2bit"])  # fmt: skip
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_small_parameters_are_the_same_with_and_without_flush_to_zero(
    config: DeMoConfig, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    digests = set()
    for flushes in (False, True):
        start = [SMALL.repeat(4096)[: 64 * 192].view(64, 192).clone(), SMALL.clone()]
        demo = DeMo([(f"{n}.weight", nn.Parameter(it)) for n, it in enumerate(start)], with_decay(config))
        torch.set_flush_denormal(flushes)
        try:
            for _ in range(8):
                demo.apply([], 0.0625)
        finally:
            torch.set_flush_denormal(False)
        digests.add(state_digest(demo.parameters))
        [_, small] = (parameter.detach() for parameter in demo.parameters)
        assert bool((small[[0, 1, 2, 3, 4, 7]] == 0).all()), "below 2^-100 there are zeros"
        assert torch.equal(small.signbit(), SMALL.signbit()), "and their signs stay"
        assert float(small[11]) > 0
    assert len(digests) == 1


def with_decay(config: DeMoConfig) -> DeMoConfig:
    return DeMoConfig(base=config.base, values=config.values, weight_decay=0.1)
