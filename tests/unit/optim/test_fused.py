"""The fused step against the portable one: the same votes of the same momentum, the same bits in the parameters."""

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from node.optim.backends import choose
from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.backends.portable import Portable
from node.optim.base import Base, BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.digest import state_digest
from node.optim.exact import orthogonal, transforms
from node.optim.layout import Layout
from node.optim.second_moment import SecondMoment
from node.optim.step import NonFiniteGradient
from node.optim.votes import groups as votes
from node.optim.votes.payload import Format

pytest.importorskip("numba")

from node.optim.backends.numba import backend, emit, forward, inverse, kernels, momentum_kernels, newton
from node.optim.backends.numba.backend import BLOCK_ELEMENTS, Fused, Plan

CPU = torch.device("cpu")
LR = float(np.float32(2e-3))
SHAPES = [(130, 200), (5,), (64, 64), (), (0, 4), (2, 64, 33), (200, 65), (63, 300), (64, 1)]
"""Cores, right and bottom strips, tensors of a few and of no elements; the pool crosses chunks inside strips."""

# one dimension, or two or three that now and then hold a whole chunk
SHAPE = st.one_of(
    st.tuples(),
    st.tuples(st.integers(0, 5000)),
    st.tuples(st.integers(0, 150), st.integers(1, 150)),
    st.tuples(st.integers(1, 70), st.integers(1, 3), st.integers(1, 70)),
)
LAYOUTS = st.lists(SHAPE, min_size=1, max_size=6).filter(lambda shapes: any(np.prod(shape) for shape in shapes))
RATES = st.floats(2**-20, 1, width=32).flatmap(lambda lr: st.sampled_from([lr, -lr, 0.0]))


def layout_of(shapes):
    return Layout.of_shapes((f"p{index}", shape) for index, shape in enumerate(shapes))


def tensors_of(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def both(shapes, base=BaseConfig()):  # noqa: B008 - frozen
    layout = layout_of(shapes)
    made = Base(base, layout, CPU)
    return layout, Fused(layout, made), Portable(layout, CPU, 3, made)


def fused_of(layout):
    return Fused(layout, Base(BaseConfig(), layout, CPU))


def entry_of(layout, sizes, seed=0):
    random = np.random.default_rng(seed)
    return [(size, random.bytes(votes.vote_bytes(layout.chunks, size))) for size in sizes]


def assert_same_bits(tensors, others):
    for one, other in zip(tensors, others, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def apply_both(shapes, entry, parameters, lr=LR, weight_decay=0.0, base=BaseConfig()):  # noqa: B008 - frozen
    _, fused, portable = both(shapes, base)
    copies = [tensor.clone() for tensor in parameters]
    fused.apply(entry, parameters, lr, weight_decay)
    portable.apply(entry, copies, lr, weight_decay)
    assert_same_bits(parameters, copies)


@settings(max_examples=60, deadline=None)
@given(
    LAYOUTS,
    st.sampled_from([0, 1, 4, 40]).flatmap(
        lambda count: st.lists(st.sampled_from(votes.GROUP_SIZES), min_size=count, max_size=count)
    ),
    RATES,
    st.sampled_from([0.0, 0.1, 3.0]),
    st.integers(0, 2**32 - 1),
)
def test_apply_gives_the_bits_of_the_portable_path(shapes, sizes, lr, weight_decay, seed):
    entry = entry_of(layout_of(shapes), sizes, seed)
    apply_both(shapes, entry, tensors_of(shapes, seed), lr, weight_decay)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("lr", [LR, -LR, 0.0, -0.0])
def test_zeros_infinities_and_denormals_are_updated_alike(zero, lr):
    values = torch.tensor([zero, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-40, 3.4e38, zero])
    parameters = [values.repeat(512).view(64, 64).clone(), values.clone()]
    shapes = [tuple(tensor.shape) for tensor in parameters]
    for sizes in ([], [128], [8] * 3):
        apply_both(shapes, entry_of(layout_of(shapes), sizes), [tensor.clone() for tensor in parameters], lr, 0.5)


def ballot_of(chunk):
    """Group size 8 ballots whose capped sum is `chunk` (int64 [64, 64] of +-2): each coefficient twice, its position."""
    where = votes.coefficients(8, CPU).view(8, 512)
    signs = (torch.as_tensor(chunk).view(-1)[where] < 0).to(torch.uint8)
    positions = torch.arange(8, dtype=torch.uint8)[:, None].expand(8, 512)
    codes = [votes.encode(positions[p][None].contiguous(), signs[p][None].contiguous(), 8) for p in range(8)]
    return [(8, code) for code in codes for _ in range(2)]


def test_votes_that_reach_the_bound_of_the_proof():
    basis = transforms.integer_basis(CPU).numpy().astype(np.int64)
    for row, column in ((0, 0), (63, 0), (17, 42), (31, 32)):
        for sign in (1, -1):
            chunk = sign * 2 * np.where(np.outer(basis[:, row], basis[:, column]) >= 0, 1, -1)
            apply_both([(64, 64)], ballot_of(chunk), tensors_of([(64, 64)]))
    column = np.abs(basis).sum(0).argmax()
    chunk = 2 * np.where(np.outer(basis[:, column], basis[:, column]) >= 0, 1, -1)
    first = basis.T @ chunk
    assert np.abs(np.rint(first / 2) @ basis).max() == 13_741_849


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, st.sampled_from(votes.GROUP_SIZES), st.integers(0, 2**32 - 1), st.booleans())
def test_votes_are_those_of_the_momentum(shapes, group_size, seed, coarse):
    layout, fused, _ = both(shapes)
    gradients = tensors_of(shapes, seed)
    momentum = torch.randn(layout.chunks, 64, 64, generator=torch.Generator().manual_seed(seed))
    if coarse:  # many equal magnitudes and zeros of both signs
        momentum = (2 * momentum).round()
        gradients = [None for _ in gradients]
    before = momentum.clone()
    packed = fused.vote(gradients, momentum, 0.5, LR, group_size)
    expected = 0.5 * before + LR * transforms.forward(layout.gather(gradients, layout.empty(CPU)))
    torch.testing.assert_close(momentum, expected, rtol=0, atol=1e-6)
    assert torch.equal(packed, votes.pack(*votes.select(momentum, group_size)[:2], group_size))
    spent = momentum.clone()
    fused.spend(momentum, packed, group_size)
    where, _ = votes.indices(packed, group_size)
    assert torch.equal(momentum, spent.view(-1, 4096).scatter(1, where, 0.0).view_as(momentum))


def test_more_ballots_than_16_bits_count_are_refused_and_change_nothing():
    layout, fused, _ = both([(64, 64)])
    [parameter] = tensors_of([(64, 64)])
    before = parameter.clone()
    with pytest.raises(votes.VotesError, match="at most 32767"):
        fused.apply(entry_of(layout, [128]) * (backend.BALLOTS_MAX + 1), [parameter], LR, 0.5)
    assert torch.equal(parameter, before)


def test_a_missing_gradient_counts_as_zeros():
    layout, fused, portable = both(SHAPES)
    gradients = [None if index % 2 else tensor for index, tensor in enumerate(tensors_of(SHAPES))]
    momenta = [torch.zeros(layout.chunks, 64, 64) for _ in range(2)]
    norms = [one.norm(gradients) for one in (fused, portable)]
    packed = [one.vote(gradients, own, 0.9, 1.0, 64) for one, own in zip((fused, portable), momenta, strict=True)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    torch.testing.assert_close(momenta[0], momenta[1], rtol=0, atol=1e-5)
    assert torch.equal(*packed)


@settings(max_examples=30, deadline=None)
@given(LAYOUTS, st.sampled_from(votes.GROUP_SIZES), st.integers(0, 2**32 - 1), st.integers(0, 2))
def test_gradients_are_divided_on_the_way_as_the_portable_path_divides_them(shapes, group_size, seed, absent):
    layout, fused, portable = both(shapes)
    seconds = [SecondMoment([torch.zeros(shape) for shape in shapes], 0.9) for _ in range(2)]
    momenta = [torch.zeros(layout.chunks, 64, 64) for _ in range(2)]
    for step in range(3):
        gradients = [g * 10.0**step for g in tensors_of(shapes, seed // 3 + step)]
        given = [None if step and index % 3 == absent else g for index, g in enumerate(gradients)]
        copies = [None if g is None else g.clone() for g in given]
        packed, taken = fused.take(given, momenta[0], 0.5, 1.0, group_size, seconds[0])
        fused.put_back(momenta[0], packed, group_size, taken)
        for own, before in zip(given, copies, strict=True):
            assert own is None or torch.equal(own, before)
        portable.vote(copies, momenta[1], 0.5, 1.0, group_size, seconds[1])
        torch.testing.assert_close(*momenta, rtol=0, atol=2e-3)
        assert torch.equal(packed, votes.pack(*votes.select(momenta[0], group_size)[:2], group_size))
        torch.testing.assert_close(*(second.squares for second in seconds), rtol=1e-5, atol=0)
        assert seconds[0].counts == seconds[1].counts


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 1e-9, 1e18])
def test_a_gradient_as_small_or_as_large_as_may_be_is_divided_without_nan(value):
    layout, fused, portable = both([(64, 64), (7,)])
    momenta = [torch.zeros(layout.chunks, 64, 64) for _ in range(2)]
    for one, own in zip((fused, portable), momenta, strict=True):
        gradients = [torch.full((64, 64), value), torch.full((7,), value)]
        one.vote(gradients, own, 0.5, 1.0, 128, SecondMoment([torch.zeros(64, 64), torch.zeros(7)], 0.9))
    torch.testing.assert_close(*momenta, rtol=1e-3, atol=1e-4)


def test_gradients_of_other_strides_and_types_are_read_right():
    torch.manual_seed(0)
    parameters = [("a", nn.Parameter(torch.zeros(70, 130))), ("b", nn.Parameter(torch.zeros(70, 130)))]
    whole = torch.randn(70, 130)
    demo = DeMo(parameters, DeMoConfig(beta=0.0, clip_norm=None))
    strided, plain = (parameter for _, parameter in parameters)
    strided.grad, plain.grad = whole.T.contiguous().T, whole
    demo.propose(1.0)
    core = demo.momentum[: 2 * 1 * 2]
    assert torch.equal(core[:2], core[2:])


@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("group_size", votes.GROUP_SIZES)
def test_nan_in_the_momentum_is_no_vote_but_infinity_is(where, group_size):
    layout, fused, _ = both(SHAPES)
    momentum = torch.randn(layout.chunks, 64, 64)
    momentum.view(-1)[where] = -torch.inf
    packed = fused.vote([None] * len(SHAPES), momentum, 0.5, LR, group_size)
    assert torch.equal(packed, votes.pack(*votes.select(momentum, group_size)[:2], group_size))
    momentum.view(-1)[where] = torch.nan
    with pytest.raises(votes.NotANumber):
        fused.vote([None] * len(SHAPES), momentum, 0.5, LR, group_size)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_a_norm_that_is_not_finite_is_found_wherever_it_is(value):
    shapes = [(BLOCK_ELEMENTS + 131,), (70, 3)]
    fused = fused_of(layout_of(shapes))
    for tensor, place in ((0, 0), (0, BLOCK_ELEMENTS - 1), (0, BLOCK_ELEMENTS + 130), (1, 209)):
        gradients = tensors_of(shapes)
        gradients[tensor].view(-1)[place] = value
        assert not np.isfinite(fused.norm(gradients))
    gradients = tensors_of(shapes)
    assert fused.norm(gradients) == pytest.approx(float(torch.cat([g.view(-1) for g in gradients]).norm()), rel=1e-6)
    demo = DeMo([("p", nn.Parameter(torch.zeros(3)))], DeMoConfig())
    demo.parameters[0].grad = torch.tensor([1.0, value, 1.0])
    with pytest.raises(NonFiniteGradient):
        demo.propose(LR)
    assert not demo.momentum.any()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_nothing(threads, monkeypatch):
    monkeypatch.setattr(backend, "RANGE_CHUNKS", 2)
    shapes = [(640, 320), (200, 65), (70_000,)]
    layout, fused, _ = both(shapes)
    results = []
    for count in (1, 2, 5):
        threads(count)
        second = SecondMoment(tensors_of(shapes, 3), 0.9)
        momentum, parameters = torch.zeros(layout.chunks, 64, 64), tensors_of(shapes, 1)
        gradients = tensors_of(shapes, 2)
        norm = fused.norm(gradients)
        packed = fused.vote(gradients, momentum, 0.9, LR / norm, 32, second)
        fused.apply([(32, votes.to_bytes(packed)), *entry_of(layout, [8, 128])], parameters, LR, 0.1)
        private = packed.numpy().tobytes(), momentum.numpy().tobytes(), state_digest(second.squares)
        results.append((norm, *private, state_digest(parameters)))
    assert len(set(results)) == 1


def test_two_threads_may_step_at_once(threads):
    threads(2)
    layout = layout_of([(640, 640)])

    def digest(seed):
        parameters, fused = tensors_of([(640, 640)], seed), fused_of(layout)
        for step in range(5):
            fused.apply(entry_of(layout, [64, 128], seed + step), parameters, LR, 0.1)
        return state_digest(parameters)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(digest, range(8))) == [digest(seed) for seed in range(8)]


def trained(monkeypatch, choices, base, sizes=(128, 16), steps=12):
    """One replica for each choice of backend, trained together; the digests of their parameters."""
    demos = []
    for choice in choices:
        monkeypatch.setenv(BACKEND_VARIABLE, choice)
        named = [(f"p{index}", nn.Parameter(tensor)) for index, tensor in enumerate(tensors_of(SHAPES))]
        demos.append(DeMo(named, DeMoConfig(group_size=sizes[len(demos)], weight_decay=0.1, base=base)))
    assert [demo.backend for demo in demos] == list(choices)
    for step in range(steps):
        entry = []
        for rank, demo in enumerate(demos):
            for parameter, gradient in zip(demo.parameters, tensors_of(SHAPES, 10 * step + rank), strict=True):
                parameter.grad = gradient + 0.1 * parameter.detach()
            proposal = demo.propose(LR)
            accepted = (step + rank) % 4 > 0
            demo.settle(accepted)
            entry += [(proposal.size, proposal.payload)] * accepted
        for demo in demos:
            demo.apply(entry, LR)
    return [state_digest(demo.parameters) for demo in demos]


@pytest.mark.parametrize(
    "base",
    [BaseConfig(), BaseConfig("muon"), BaseConfig("muon", block=64), BaseConfig("adamw")],
    ids=lambda base: base.kind,
)
def test_replicas_on_either_backend_stay_equal(monkeypatch, base):
    one, other = trained(monkeypatch, ("numba", "torch"), base)
    assert one == other


def test_saved_state_passes_from_one_backend_to_the_other(monkeypatch):
    demos = []
    for choice in ("numba", "torch"):
        monkeypatch.setenv(BACKEND_VARIABLE, choice)
        demos.append(DeMo([("p", nn.Parameter(torch.zeros(200, 130)))], DeMoConfig()))
    demos[0].parameters[0].grad = torch.randn(200, 130)
    demos[0].propose(LR)
    demos[1].load_state_dict(demos[0].state_dict())
    for demo in demos:
        demo.settle(accepted=True)
    assert torch.equal(demos[0].momentum, demos[1].momentum)


@pytest.mark.parametrize(
    ("config", "choice", "backend"),
    [
        (DeMoConfig(), "auto", "numba"),
        (DeMoConfig(base=BaseConfig("muon")), "auto", "numba"),
        (DeMoConfig(base=BaseConfig("muon")), "torch", "torch"),
        (DeMoConfig(base=BaseConfig("muon", block=64)), "auto", "numba"),
        (DeMoConfig(base=BaseConfig("muon")), "triton", "torch"),  # its kernels are for bases that are chunkwise
        (DeMoConfig(values="2bit"), "numba", "torch"),
        (DeMoConfig(transform="hadamard"), "numba", "torch"),
    ],
)
def test_kernels_take_the_votes_that_they_know(monkeypatch, config, choice, backend):
    monkeypatch.setenv(BACKEND_VARIABLE, choice)
    assert DeMo([("p", nn.Parameter(torch.zeros(3)))], config).backend == backend


def test_a_backend_that_does_not_exist_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="auto, torch, numba"):
        DeMo([("p", nn.Parameter(torch.zeros(3)))], DeMoConfig())


@pytest.mark.skipif(torch.cuda.is_available(), reason="here Triton's kernels run")
def test_kernels_that_do_not_run_here_are_told_and_torch_serves(caplog):
    choose.triton_serves.cache_clear()
    assert not choose.triton_serves(torch.device("cpu"), Format(), BaseConfig(), 2)
    assert "Triton's kernels do not run" in caplog.text


def test_kernels_that_give_other_bits_are_told_and_torch_serves(monkeypatch, caplog):
    """As a compiler or a card could: a parameter in its last bit, or the momentum."""

    class Other(Portable):
        def apply(self, ballots, parameters, lr, weight_decay):
            super().apply(ballots, parameters, lr, weight_decay)
            parameters[1][7] = parameters[1][7].nextafter(torch.tensor(9.0))

    class Less(Portable):
        def vote(self, gradients, momentum, *rest):
            found = super().vote(gradients, momentum, *rest)
            momentum[0, 0, 0] += 0.1
            return found

    for wrong in (Other, Less, Portable):
        choose.triton_serves.cache_clear()
        monkeypatch.setattr(
            choose, "made_of_triton", lambda layout, device, _, base, __, it=wrong: it(layout, device, 256, base)
        )
        served = choose.triton_serves(torch.device("cpu"), Format(), BaseConfig(), 2)
        assert served == (wrong is Portable)
    choose.triton_serves.cache_clear()
    assert caplog.text.count("give other numbers than torch") == 2


def test_kernels_cached_from_other_instructions_are_not_used():
    parts = (emit, forward, inverse, newton, orthogonal)
    sources = [Path(part.__file__).read_bytes() for part in (*parts, kernels, momentum_kernels)]
    own = hashlib.sha256(b"".join(sources)).hexdigest()[:16]
    fused_of(layout_of([(3,)]))
    folder = Path(kernels.apply.stats.cache_path)
    assert {path.suffix for path in folder.glob(f"*apply_{own}*")} == {".nbi", ".nbc"}


def test_a_step_compiles_without_a_folder_to_cache_in():
    program = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from node.optim.backends.numba import kernels\n"
        "print(kernels.apply.stats.cache_path)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=270, check=True)
    assert done.stdout.strip() == "None"


def test_the_plan_covers_every_element_once():
    layout = layout_of(SHAPES)
    plan = Plan.of(layout)
    assert len(plan.core) == layout.core_chunks
    assert plan.strips[0, 4] == 0
    assert plan.strips[-1, 5] == layout.pool_elements
    assert np.array_equal(plan.strips[1:, 4], plan.strips[:-1, 5])
    assert plan.blocks[:, 2].sum() == layout.parameters


@settings(max_examples=30, deadline=None)
@given(LAYOUTS, st.sampled_from(votes.GROUP_SIZES), st.integers(0, 2**32 - 1))
def test_taking_votes_is_voting_and_spending_and_can_be_undone(shapes, group_size, seed):
    layout, fused, _ = both(shapes)
    start = torch.randn(layout.chunks, 64, 64, generator=torch.Generator().manual_seed(seed))
    voted, taken = start.clone(), start.clone()
    packed = fused.vote(tensors_of(shapes, seed), voted, 0.9, LR, group_size)
    same, values = fused.take(tensors_of(shapes, seed), taken, 0.9, LR, group_size)
    assert torch.equal(same, packed)
    restored = taken.clone()
    fused.put_back(restored, packed, group_size, values)
    assert_same_bits([restored], [voted])
    fused.spend(voted, packed, group_size)
    assert_same_bits([taken], [voted])


def test_taking_votes_of_a_broken_momentum_leaves_them_in_it():
    layout, fused, _ = both(SHAPES)
    momentum = torch.randn(layout.chunks, 64, 64)
    momentum[-1, 5, 5] = torch.nan
    expected = momentum.clone()
    for call, own in ((fused.vote, expected), (fused.take, momentum)):
        with pytest.raises(votes.NotANumber):
            call([None] * len(SHAPES), own, 0.5, LR, 128)
    assert_same_bits([momentum], [expected])


@pytest.mark.parametrize("refused", ["restore", "drop"])
@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("looked", [True, False])
def test_the_momentum_is_the_same_whether_or_not_somebody_looks(monkeypatch, refused, accepted, looked):
    demos = []
    for choice in ("numba", "torch"):
        monkeypatch.setenv(BACKEND_VARIABLE, choice)
        demo = DeMo([("p", nn.Parameter(torch.zeros(200, 130)))], DeMoConfig(refused=refused))
        demo.parameters[0].grad = torch.randn(200, 130, generator=torch.Generator().manual_seed(1))
        demos.append(demo)
    for step in range(3):
        for demo in demos:
            demo.propose(LR)
            if looked:
                assert demo.momentum.count_nonzero() >= demo.momentum.numel() - 3 * 64  # only padding is zero
        if looked and step == 1:
            torch.testing.assert_close(demos[0].state_dict()["momentum"], demos[1].state_dict()["momentum"])
            for demo in demos:
                with demo.ahead(LR):
                    pass
        for demo in demos:
            demo.settle(accepted)
        torch.testing.assert_close(demos[0].momentum, demos[1].momentum, rtol=0, atol=1e-6)
