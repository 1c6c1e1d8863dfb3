"""Kernels of shared places and of caps above 2: the bits of the portable path, at every bound of their 16-bit lanes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from node.optim import aggregate
from node.optim.backends.numba.wide import Wide
from node.optim.backends.numba.wide_kernels import COLUMN_MAX
from node.optim.backends.portable import Family
from node.optim.base import Base, BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.exact import transforms
from node.optim.exact.transforms import CAP_MAX, EXACT_INTEGER_MAX, MIDDLE_SHIFT, VOTE_SUM_MAX, integer_basis
from node.optim.layout import Layout
from node.optim.votes import silence
from node.optim.votes.groups import NotANumber, VotesError
from node.optim.votes.payload import Format
from node.optim.votes.places import DRAWN, SCHEMES, Draw
from node.training.optimizers import demo_config
from protos import optimizer_config
from protos.optimizer_config import OptimizerConfig

CPU = torch.device("cpu")
LR = float(np.float32(0.01))
RUN = b"r" * 32
AUTHORS = tuple(number.to_bytes(2, "big") for number in range(256))
SHAPES = ((64, 128), (70, 130), (3,), (1, 200))
BASIS = np.rint(2.0**transforms.SHIFT * transforms.named("dct").matrix).astype(np.int64)


SIGN = BaseConfig()
BASES = (SIGN, BaseConfig("muon", block=64, iterations=2), BaseConfig("muon", block=64, iterations=3, output="sign"))


def wide(layout: Layout, form: Format, cap: int, base: BaseConfig = SIGN) -> Wide:
    return Wide(layout, form, cap, Base(base, layout, CPU))


def layout_of(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Layout:
    return Layout.of_shapes((f"p{index}", shape) for index, shape in enumerate(shapes))


def both(form: Format, cap: int, step: int, layout: Layout, base: BaseConfig = SIGN) -> tuple[Wide, Family]:
    family = Family(layout, CPU, 3, form, transforms.named("dct"), Base(base, layout, CPU), cap)
    kernels = wide(layout, form, cap, base)
    draw = Draw(RUN, step, AUTHORS if form.independent else ())
    return kernels.at(draw) if form.drawn else kernels, family.at(draw)


def ballot(form: Format, size: int, chunks: int, random: np.random.Generator, part: float) -> bytes:
    """Votes of momentum of which `part` is zero, and the first chunk wholly if any is."""
    momentum = torch.from_numpy(random.standard_normal((chunks, 64, 64), dtype=np.float32))
    momentum[torch.from_numpy(random.random((chunks, 64, 64)) < part)] = 0
    if part:
        momentum[0] = 0
    return form.encode([form.choose(momentum, size, None, Draw(RUN, 5, AUTHORS[: form.independent]))], size)


def applied(backend: Wide | Family, entry: list[tuple[int, bytes]], decay: float, lr: float = LR) -> list[bytes]:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters[0][0, :4] = torch.tensor([0.0, -0.0, torch.inf, 1e-45])
    backend.apply(entry, parameters, lr, decay)
    return [parameter.numpy().tobytes() for parameter in parameters]


@given(
    st.sampled_from(["groups", *DRAWN]),
    st.sampled_from(BASES),
    st.sampled_from([2, 3, 7, 45, 46, CAP_MAX]),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_kernels_give_the_bits_of_the_portable_path(
    selection: str, base: BaseConfig, cap: int, count: int, part: float, mixed: bool, decay: float, seed: int
) -> None:
    form, random, layout = Format(selection), np.random.default_rng(seed), layout_of()  # type: ignore[arg-type]
    sizes = random.choice(form.sizes, count if mixed else 1).tolist() or [form.sizes[0]]
    entry = [(n, ballot(form, n, layout.chunks, random, part)) for n in (sizes[i % len(sizes)] for i in range(count))]
    if count:  # one that agrees with itself, so that sums reach the cap
        entry += [entry[0]] * int(random.choice([0, 50, 150]))
    wide, family = both(form, cap, 5, layout, base)
    assert applied(wide, entry, decay) == applied(family, entry, decay)


@pytest.mark.parametrize("base", BASES)
def test_what_no_16_bits_hold_is_cut_off_and_made_orthogonal_as_elsewhere(base: BaseConfig) -> None:
    """127 votes in one column take the fp64 path. Its totals are zero on the diagonal, where a tiny parameter becomes zero."""
    form, layout = Format("full"), layout_of(((64, 64),))
    said = np.zeros((64, 64), dtype=np.float32)
    said[17, 0], said[0, 17] = 1, -1
    assert not np.diagonal(exactly(torch.from_numpy(said)[None])[0]).any()
    one = form.encode([form.choose(torch.from_numpy(said)[None], 1, None, Draw(RUN, 5))], 1)
    found = []
    for backend in both(form, CAP_MAX, 5, layout, base):
        parameter = torch.eye(64) * 2.0**-110
        backend.apply([(1, one)] * CAP_MAX, [parameter], 1.0, 0.0)
        assert base != SIGN or not bool(parameter.diagonal().any())
        found.append(parameter)
    assert torch.equal(*found)


def exactly(sums: Tensor) -> np.ndarray:
    return -np.sign(np.einsum("kn,ckl,lm->cnm", BASIS, sums.numpy().astype(np.int64), BASIS))


@pytest.mark.parametrize("many", [1, COLUMN_MAX, COLUMN_MAX + 1, CAP_MAX])
@pytest.mark.parametrize("at", [(0, 0), (63, 1), (17, 42)])
def test_sums_at_the_bounds_of_16_and_32_bits(many: int, at: tuple[int, int]) -> None:
    """Votes that all push one element as far as they can, in one column, in a row, in all of a chunk: no lane may overflow."""
    form = Format("full")
    layout = layout_of(((64, 64),))
    push = np.where(np.outer(BASIS[:, at[0]], BASIS[:, at[1]]) >= 0, 1, -1)
    for where in (
        np.s_[:, :1],
        np.s_[:1, :],
        np.s_[:, :],
        np.s_[:, ::64],
        np.s_[::2, 3:5],
        np.s_[1:2, 1:2],
        np.s_[1:2, ::9],
    ):
        said = np.zeros((64, 64), dtype=np.float32)
        said[where] = push[where]
        one = form.encode([form.choose(torch.from_numpy(said)[None], 1, None, Draw(RUN, 5))], 1)
        parameter = torch.zeros(64, 64)
        wide(layout, form, CAP_MAX).at(Draw(RUN, 5)).apply([(1, one)] * many, [parameter], 1.0, 0.0)
        assert np.array_equal(parameter.numpy(), exactly(torch.from_numpy(many * said)[None])[0])


def test_the_bounds_are_those_of_the_basis() -> None:
    largest = int(np.abs(BASIS).max())
    assert COLUMN_MAX * largest < 2**15 <= (COLUMN_MAX + 1) * largest
    assert 64 * 2**15 * largest < 2**31, "what fits 16 bits after the first pass fits 32 after the second"
    column = int(integer_basis(CPU).abs().sum(0).max())

    def second(cap: int) -> int:
        return column * -(-cap * column // 2**MIDDLE_SHIFT)

    assert second(VOTE_SUM_MAX) < EXACT_INTEGER_MAX < second(VOTE_SUM_MAX + 1), (
        "the narrow inverse has cap 2 and no other"
    )
    assert CAP_MAX <= transforms.SUM_MAX
    assert (optimizer_config.CAP_DEFAULT, optimizer_config.CAP_MAX) == (VOTE_SUM_MAX, CAP_MAX)


@pytest.mark.parametrize("selection", SCHEMES)
@pytest.mark.parametrize("beta2", [0.0, 0.9])
def test_votes_and_what_is_left_of_the_momentum_are_those_of_the_portable_path(
    selection: str, beta2: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in Format(selection).sizes:  # type: ignore[arg-type]
        config = DeMoConfig(selection=selection, beta=0.9, beta2=beta2, clip_norm=None, seed=RUN).with_size(size)  # type: ignore[arg-type]
        found = []
        for backend in ("numba", "torch"):
            monkeypatch.setenv("SWARMENTUM_OPTIM_BACKEND", backend)
            generator = torch.Generator().manual_seed(7)
            named = [(f"p{n}", torch.nn.Parameter(torch.zeros(shape))) for n, shape in enumerate(SHAPES)]
            demo = DeMo(named, config)
            assert demo.backend == backend
            payloads = []
            for accepted in (True, False, True):
                for _, parameter in named:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                named[0][1].grad[:, 64:] = 0  # type: ignore[index]
                payloads.append(demo.propose(LR).payload)
                before = demo.momentum.clone()
                demo.settle(accepted)
                assert torch.equal(before, demo.momentum) is not accepted
            demo.form.check(payloads[0], size, demo.layout.chunks)
            assert len(payloads[0]) > demo.form.body_bytes(demo.layout.chunks, size), "the chunk of zeros is silent"
            found.append((payloads, demo.momentum.clone()))
        for one, other in zip(found[0][0], found[1][0], strict=True):
            different = np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)
            # a coefficient that rounding alone keeps from zero: divisions by the second moment differ by processor
            assert np.unpackbits(different).sum() <= (4 if beta2 else 0)
        torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=4e-6)


def test_momentum_that_is_no_number_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMENTUM_OPTIM_BACKEND", "numba")
    demo = DeMo([("p", torch.nn.Parameter(torch.zeros(64, 64)))], DeMoConfig(selection="random", seed=RUN))
    demo.momentum[0, 63, 63] = torch.nan
    before = demo.momentum.clone()
    with pytest.raises(NotANumber):
        demo.propose(LR)
    assert torch.equal(before.isnan(), demo.momentum.isnan())


def test_a_cap_bounds_the_sum_and_nothing_else() -> None:
    form, layout, random = Format("random"), layout_of(), np.random.default_rng(0)
    one = ballot(form, 16, layout.chunks, random, 0.0)
    for cap in (2, 7, CAP_MAX):
        total = aggregate.VoteSum(layout.chunks, CPU, form, draw=Draw(RUN, 5), cap=cap)
        for votes in range(1, 10):
            total.add(16, one)
            assert int(total.sums(0, layout.chunks).abs().max()) == min(votes, cap)
    few = [(16, ballot(form, 16, layout.chunks, random, 0.0)) for _ in range(2)]
    many = [(16, ballot(form, 16, layout.chunks, random, 0.0)) for _ in range(9)]
    two, seven = (both(form, cap, 5, layout)[0] for cap in (2, 7))
    assert applied(two, few, 0.0) == applied(seven, few, 0.0)
    assert applied(two, many, 0.0) != applied(seven, many, 0.0)


def test_kernels_refuse_votes_that_do_not_fit_before_anything_moves() -> None:
    form, layout = Format("random"), layout_of()
    wide, _ = both(form, 2, 5, layout)
    good = ballot(form, 16, layout.chunks, np.random.default_rng(0), 0.0)
    parameters = [torch.zeros(shape) for shape in SHAPES]
    for size, bad in ((16, good + b"\0"), (16, good[:-1]), (8, good), (3, good)):
        with pytest.raises(VotesError):
            wide.apply([(16, good), (size, bad)], parameters, LR, 0.0)
    assert not any(bool(parameter.any()) for parameter in parameters)
    assert silence.encode(torch.zeros(layout.chunks, 32, dtype=torch.uint8)) == b""


def test_a_run_has_the_cap_and_refuses_it_by_name_where_sums_grow() -> None:
    run = OptimizerConfig.model_validate({"cap": 7, "selection": "random"})
    assert demo_config(run, 16, RUN).cap == 7
    assert demo_config(OptimizerConfig(), 128, RUN) == replace(demo_config(OptimizerConfig(), 128, RUN), cap=2)
    for wrong, says in (
        ({"cap": 1}, "cap"),
        ({"cap": 128}, "cap"),
        ({"cap": 7, "values": "8bit"}, '`cap = 7` does not work with `values = "8bit"`'),
        ({"cap": 7, "base": "muon"}, '`cap = 7` does not work with `base = "muon"`'),
    ):
        with pytest.raises(ValidationError, match=says):
            OptimizerConfig.model_validate(wrong)
