"""The step: against the oracle over 20 steps, bit for bit in every order and thread count, and what it refuses."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.step import NonFiniteGradient, apply_update
from node.optim.votes import groups as votes
from tests.unit.optim.reference import Reference

SHAPES = [(70, 66), (64, 64), (5,), (), (65, 2, 40)]
LR = float(np.float32(2e-3))


def parameters(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [(f"p{index}", nn.Parameter(torch.randn(shape, generator=generator))) for index, shape in enumerate(shapes)]


def set_gradients(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def peer(seed=0, **options):
    named = parameters(seed)
    return named, DeMo(named, DeMoConfig(**options))


def test_same_votes_and_same_bits_as_the_reference_over_20_steps():
    sizes = (128, 16)
    peers = [peer(group_size=size, weight_decay=0.1, beta=0.95) for size in sizes]
    starts = [[parameter.detach().numpy() for _, parameter in named] for named, _ in peers]
    oracles = [Reference(start, beta=0.95, weight_decay=0.1, clip_norm=1.0) for start in starts]
    for step in range(20):
        lr = float(np.float32(LR / (1 + step)))
        entry = []
        for rank, ((named, demo), oracle) in enumerate(zip(peers, oracles, strict=True)):
            set_gradients(named, 100 * step + rank)
            proposal = demo.propose(lr)
            expected = oracle.propose([p.grad.numpy() for _, p in named], lr, sizes[rank])
            assert proposal.payload == expected
            accepted = (step + rank) % 4 > 0
            demo.settle(accepted)
            oracle.settle(accepted)
            if accepted:
                entry.append((proposal.size, proposal.payload))
        for (named, demo), oracle in zip(peers, oracles, strict=True):
            demo.apply(entry, lr)
            oracle.apply(entry, lr)
            for (_, parameter), tensor in zip(named, oracle.tensors, strict=True):
                assert parameter.detach().numpy().tobytes() == tensor.tobytes()
            np.testing.assert_allclose(demo.momentum.numpy(), np.stack(oracle.momentum), atol=1e-7)


def random_entry(demo, sizes, seed=0):
    random = np.random.default_rng(seed)
    return [(size, random.bytes(votes.vote_bytes(demo.layout.chunks, size))) for size in sizes]


def test_thread_count_and_order_change_no_bit(monkeypatch):
    monkeypatch.setattr("node.optim.layout.TILE_CHUNKS_CPU", 7)
    digests = set()
    before = torch.get_num_threads()
    try:
        for threads, turn in ((1, 1), (2, -1), (2, 1)):
            torch.set_num_threads(threads)
            named = parameters(shapes=[(1000, 600), (33,)])
            demo = DeMo(named, DeMoConfig(weight_decay=0.1))
            for step in range(3):
                demo.apply(random_entry(demo, [8, 128, 64, 16], step)[::turn], LR)
            digests.add(state_digest(demo.parameters))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_learning_rate_weighs_the_gradient_inside_the_momentum_and_the_norm_is_clipped():
    named, demo = peer(beta=0.0, clip_norm=0.5)
    set_gradients(named, 1)
    norm = torch.nn.utils.get_total_norm([parameter.grad for _, parameter in named])
    assert demo.propose(LR).gradient_norm == pytest.approx(float(norm))
    assert float(demo.momentum.norm()) == pytest.approx(LR * 0.5, rel=1e-4)
    _, unclipped = peer(beta=0.0, clip_norm=None)
    for (_, source), target in zip(named, unclipped.parameters, strict=True):
        target.grad = source.grad
    unclipped.propose(LR)
    assert float(unclipped.momentum.norm()) == pytest.approx(LR * float(norm), rel=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    named, demo = peer()
    set_gradients(named, 1)
    demo.propose(LR)
    demo.settle(accepted=False)
    momentum, digest = demo.momentum.clone(), state_digest(demo.parameters)
    named[2][1].grad[3] = value
    with pytest.raises(NonFiniteGradient):
        demo.propose(LR)
    assert torch.equal(demo.momentum, momentum)
    assert state_digest(demo.parameters) == digest
    assert not demo.pending
    set_gradients(named, 2)
    demo.propose(LR)


def test_votes_that_do_not_fit_change_nothing():
    _, demo = peer(weight_decay=0.5)
    digest = state_digest(demo.parameters)
    for entry in ([(128, b"short")], [(12, b"")], [*random_entry(demo, [8]), (8, bytes(3))]):
        with pytest.raises(votes.VotesError):
            demo.apply(entry, LR)
    for lr in (2e-3, 1e300, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="fp32"):
            demo.apply([], lr)
    assert state_digest(demo.parameters) == digest


def test_an_empty_entry_only_decays():
    _, demo = peer(weight_decay=0.5)
    expected = [p.detach() * float(np.float32(1) - np.float32(LR) * np.float32(0.5)) for p in demo.parameters]
    demo.apply([], LR)
    assert all(torch.equal(p.detach(), e) for p, e in zip(demo.parameters, expected, strict=True))


def test_the_update_rounds_twice_and_never_fuses():
    random = np.random.default_rng(0)
    values = random.standard_normal(10_000).astype(np.float32)
    signs = random.integers(-1, 2, 10_000).astype(np.float32)
    factor = np.float32(1) - np.float32(LR) * np.float32(0.1)
    expected = values * factor - np.float32(LR) * signs
    result = apply_update(torch.tensor(values), torch.tensor(signs), LR, 0.1)
    assert result.numpy().tobytes() == expected.tobytes()


def test_state_goes_through_state_dict_with_votes_still_out(tmp_path):
    named, demo = peer(group_size=32)
    set_gradients(named, 1)
    demo.propose(LR)
    torch.save(demo.state_dict(), tmp_path / "state.pt")
    other_named, other = peer(group_size=128)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.pending
    for optimizer in (demo, other):
        optimizer.settle(accepted=True)
    assert torch.equal(demo.momentum, other.momentum)
    demo.config = other.config
    set_gradients(named, 2)
    set_gradients(other_named, 2)
    assert demo.propose(LR) == other.propose(LR)


def test_state_of_another_model_is_refused():
    _, demo = peer()
    other = DeMo(parameters(shapes=[(70, 66)]), DeMoConfig())
    with pytest.raises(ValueError, match="layouts differ"):
        other.load_state_dict(demo.state_dict())
    state = copy.deepcopy(demo.state_dict())
    state["pending"], state["pending_size"] = torch.zeros(3, dtype=torch.uint8), 8
    with pytest.raises(ValueError, match="3 bytes of votes"):
        demo.load_state_dict(state)


@pytest.mark.parametrize(
    "options",
    [{"beta": 1.0}, {"weight_decay": -1}, {"clip_norm": 0.0}, {"group_size": 7}, {"weight_decay": float("inf")}],
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=r"expected is a number|is none of"):
        DeMoConfig(**options)


def test_parameters_that_cannot_be_replicated_are_refused():
    """Each fault has its own words: which it is, and what to do."""
    cases = {
        r"parameter p is bfloat16, not fp32: call model\.float\(\)": torch.zeros(4, 4, dtype=torch.bfloat16),
        r"is not contiguous \(shape \(8, 4\), strides \(1, 8\)\): call model\.to\(memory_format": torch.zeros(4, 8).T,
        r"is not contiguous": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        r"has no values yet \(device meta\)": torch.zeros(4, 4, device="meta"),
    }
    for words, tensor in cases.items():
        with pytest.raises(ValueError, match=words):
            DeMo([("p", nn.Parameter(tensor))], DeMoConfig())
    apart = [("a", nn.Parameter(torch.zeros(4))), ("b", nn.Parameter(torch.zeros(4, device="meta")))]
    with pytest.raises(ValueError, match="parameter b has no values yet"):
        DeMo(apart, DeMoConfig())
    whole = torch.zeros(8, 4)
    shared = [("a", nn.Parameter(whole[:6])), ("b", nn.Parameter(whole[5:]))]
    with pytest.raises(ValueError, match="parameters a and b share memory"):
        DeMo(shared, DeMoConfig())
    DeMo([("a", nn.Parameter(whole[:4])), ("b", nn.Parameter(whole[4:]))], DeMoConfig())
    with pytest.raises(ValueError, match="no parameter"):
        DeMo([("p", nn.Parameter(torch.zeros(0, 5)))], DeMoConfig())
