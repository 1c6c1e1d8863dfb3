"""The private second moment is Adam's, and is the peer's own."""

import copy
from collections.abc import Sequence

import pytest
import torch

from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.second_moment import FactoredMoment, Moment, SecondMoment, whole_squares
from node.optim.torch_optimizer import DeMoOptimizer


@pytest.mark.parametrize("compiled", [False, True])
def test_divided_gradients_are_adams_without_momentum(compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    parameter = torch.zeros(30, 7, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([parameter], lr=1.0, betas=(0.0, 0.95), eps=1e-8)
    ours, moved = SecondMoment([torch.zeros(30, 7)], 0.95, compiled=compiled), torch.zeros(30, 7)
    for scale in (1.0, 100.0, 1e-4, 3.0):
        gradient = torch.randn(30, 7, generator=generator) * scale
        parameter.grad = gradient.double()
        adam.step()
        ours.divide([gradient])
        moved -= gradient
    assert torch.allclose(moved.double(), parameter.detach(), atol=1e-4)


def test_threads_and_ranges_change_no_bit_of_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = pytest.importorskip("node.optim.backends.numba.moment")
    threads, found = torch.get_num_threads(), []
    try:
        for count, length in ((1, 1 << 18), (3, 7)):
            torch.set_num_threads(count)
            monkeypatch.setattr(moment, "RANGE_ELEMENTS", length)
            generator = torch.Generator().manual_seed(0)
            second = SecondMoment([torch.zeros(11, 9), torch.zeros(0), torch.zeros(5)], 0.9, compiled=True)
            for _ in range(3):
                gradients = [torch.randn(11, 9, generator=generator), torch.zeros(0), None]
                second.divide(gradients)
            found.append([gradients[0], *second.squares])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not found[0][-1].any()


def test_peers_with_and_without_it_train_together() -> None:
    configs = DeMoConfig(beta2=0.0), DeMoConfig(beta2=0.95), DeMoConfig(beta2=0.99, second_moment="factored")
    peers = [DeMo([("a", torch.nn.Parameter(torch.zeros(70, 80)))], config) for config in configs]
    lr = float(torch.tensor(0.01))
    for step in range(3):
        entry = []
        for number, peer in enumerate(peers):
            peer.parameters[0].grad = torch.randn(70, 80, generator=torch.Generator().manual_seed(10 * step + number))
            votes = peer.propose(lr)
            peer.settle(True)
            entry.append((votes.size, votes.payload))
        for peer in peers:
            peer.apply(entry, lr)
        assert len({state_digest(peer.replicated) for peer in peers}) == 1


def test_a_state_with_it_does_not_fit_one_without() -> None:
    with_it, without = (DeMo([("a", torch.zeros(3, requires_grad=True))], DeMoConfig(beta2=b)) for b in (0.9, 0.0))
    for one, other in ((with_it, without), (without, with_it)):
        with pytest.raises(ValueError, match="set beta2 as it was"):
            one.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="other parameters"):
        SecondMoment([torch.zeros(3)], 0.9).load_state_dict(SecondMoment([torch.zeros(4)], 0.9).state_dict())


SHAPES = (30, 7), (4, 3, 2, 5), (11,), ()


@pytest.fixture(params=[False, True], ids=["torch", "numba"])
def compiled(request: pytest.FixtureRequest) -> bool:
    if request.param:
        pytest.importorskip("numba")
    return bool(request.param)


def both(compiled: bool = False) -> tuple[SecondMoment, FactoredMoment]:
    zeros = [torch.zeros(shape) for shape in SHAPES]
    return SecondMoment(zeros, 0.95, compiled=compiled), FactoredMoment(zeros, 0.95, compiled=compiled)


def divided(moment: Moment, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    own = [None if it is None else it.clone() for it in gradients]
    moment.divide(own)
    return own


def test_a_factored_one_is_the_whole_one_where_squares_are_a_product(compiled: bool) -> None:
    """Its approximation is rank one: of such squares, of vectors and of scalars it loses nothing."""
    whole, factored = both(compiled)
    signs = torch.Generator().manual_seed(3)
    for scale in (1.0, 100.0, 1e-12, 3.0):
        gradients = []
        for shape in SHAPES:
            first, rest = (shape[0], shape[1:]) if len(shape) > 1 else (1, shape)
            size = torch.arange(1, first + 1).float().view(-1, *[1] * len(rest)) * torch.ones(rest)
            size = size * torch.linspace(0.5, 2, size[0].numel()).view(rest) if rest else size
            coin = torch.randint(0, 2, shape, generator=signs) * 2.0 - 1
            gradients.append(scale * size.reshape(shape) * coin)
        for one, other in zip(divided(whole, gradients), divided(factored, gradients), strict=True):
            assert torch.allclose(one, other, rtol=2e-4), scale  # type: ignore[arg-type]
    assert whole.counts == factored.counts == [4] * len(SHAPES)


def test_rows_and_tensors_without_a_gradient_stay_zero_and_start_late(compiled: bool) -> None:
    _, factored = both(compiled)
    gradient = torch.randn(30, 7, generator=torch.Generator().manual_seed(1))
    gradient[4:] = 0
    found = divided(factored, [gradient, None, torch.zeros(11), torch.tensor(0.0)])
    assert found[0].isfinite().all()
    assert not found[0][4:].any()
    assert found[0][:4].square().mean().sqrt() == pytest.approx(1, rel=0.3)
    assert factored.counts == [1, 0, 1, 1]
    assert [it.numel() for own in factored.by_tensor() for it in own.values()] == [30, 7, 4, 30, 11, 1, 1, 1]


def test_each_kind_takes_over_the_others_state() -> None:
    """A peer may come back with more memory, or with less."""
    whole, factored = both()
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        divided(whole, gradients)
        divided(factored, gradients)
    smaller, larger = both()[1], both()[0]
    smaller.load_state_dict(whole.state_dict())
    larger.load_state_dict(factored.state_dict())
    for name in ("rows", "columns"):
        for one, other in zip(smaller.state_dict()[name], factored.state_dict()[name], strict=True):
            assert torch.allclose(one, other, rtol=1e-5)
    assert smaller.counts == larger.counts == [5] * len(SHAPES)
    assert [tuple(it.shape) for it in whole_squares(factored.state_dict(), SHAPES)] == list(SHAPES)
    assert torch.allclose(larger.squares[2], whole.squares[2], rtol=1e-5)
    assert torch.allclose(larger.squares[0].mean(1), whole.squares[0].mean(1), rtol=1e-5)
    other = FactoredMoment([torch.zeros(7, 30)] + [torch.zeros(shape) for shape in SHAPES[1:]], 0.95)
    for one, saved in ((other, factored), (other, whole), (SecondMoment([torch.zeros(3)], 0.9), factored)):
        with pytest.raises(ValueError, match="belongs to other parameters"):
            one.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_factored_one_goes_before_every_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes of a factored moment are those of gradients that it divided before, without a moment."""
    monkeypatch.setenv("SWARMENTUM_OPTIM_BACKEND", backend)
    config = DeMoConfig(beta2=0.9, second_moment="factored")
    given, plain = (
        DeMo([("a", torch.nn.Parameter(torch.zeros(70, 80)))], one) for one in (config, DeMoConfig(clip_norm=None))
    )
    moment = FactoredMoment([torch.zeros(70, 80)], 0.9)
    for step in range(3):
        gradient = torch.randn(70, 80, generator=torch.Generator().manual_seed(step))
        given.parameters[0].grad, plain.parameters[0].grad = gradient.clone(), gradient.clone()
        moment.divide([plain.parameters[0].grad])
        lr = float(torch.tensor(0.01))
        assert given.propose(lr).payload == plain.propose(lr).payload
        given.settle(True)
        plain.settle(True)


def test_one_huge_gradient_does_not_end_a_factored_one(compiled: bool) -> None:
    """The sum of its squares is more than fp32 has: kept, it would make every later gradient zero."""
    factored = FactoredMoment([torch.zeros(64, 4096)], 0.5, compiled=compiled)
    normal = torch.ones(64, 4096)
    assert divided(factored, [normal * 1e18])[0].isfinite().all()  # type: ignore[union-attr]
    for _ in range(110):
        found = divided(factored, [normal])[0]
    assert torch.allclose(found, normal, rtol=0.01)  # type: ignore[arg-type]


def test_threads_and_ranges_change_no_bit_of_a_compiled_factored_one(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = pytest.importorskip("node.optim.backends.numba.moment")
    monkeypatch.setattr(moment, "RANGE_ELEMENTS", 50)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            factored = FactoredMoment([torch.zeros(31, 9)], 0.9, compiled=True)
            for seed in range(3):
                last = divided(factored, [torch.randn(31, 9, generator=torch.Generator().manual_seed(seed))])
            found.append([*last, *factored.rows, *factored.columns])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_optimizer_goes_on_bit_for_bit_with_a_factored_one_and_says_what_does_not_fit() -> None:
    model = torch.nn.Linear(70, 80)

    def made(**given: object) -> DeMoOptimizer:
        return DeMoOptimizer(model, lr=0.01, alone=True, **{"second_moment": "factored", **given})  # type: ignore[arg-type]

    def step(optimizer: DeMoOptimizer, seed: int) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        return model.weight.detach().clone()

    first = made()
    step(first, 1)
    kept, weights = copy.deepcopy(first.state_dict()), {name: it.clone() for name, it in model.state_dict().items()}
    assert "second" not in kept["state"][0]
    wanted = step(first, 2)
    model.load_state_dict(weights)
    second = made()
    second.load_state_dict(kept)
    assert torch.equal(step(second, 2), wanted)
    for given, words in (
        ({"second_moment": "whole"}, "moment is factored, and this optimizer's is whole: set second_moment as it was"),
        ({"beta2": 0.0}, "has a second moment, and this optimizer has no second moment: set beta2 as it was"),
    ):
        with pytest.raises(ValueError, match=words):
            made(**given).load_state_dict(kept)
