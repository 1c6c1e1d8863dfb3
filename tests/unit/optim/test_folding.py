"""Gradients that join the momentum as they are made give the votes, and the momentum, of gradients that join it together."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.optim.backends.choose import BACKEND_VARIABLE
from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.folding import Folding
from node.optim.step import NonFiniteGradient

LR = float(np.float32(2e-3))
SHAPES = [(130, 200), (5,), (64, 64), (), (2, 64, 33), (200, 65), (63, 300), (128, 128)]
"""Cores, right and bottom strips, tensors without a core; the pool crosses chunks inside strips."""
SAMPLES = 4
"""A power of two: a gradient that is multiplied by it, and divided, has the same bits."""
CONFIG = DeMoConfig(beta=0.9, beta2=0.9, second_moment="factored", seed=b"run", author=b"me")
SELECTIONS = [
    {"selection": "groups"},
    {"selection": "groups", "group_size": 16, "cap": 3},
    {"selection": "topk", "top_k": 32},
    {"selection": "random", "one_in": 16},
    {"selection": "striding", "one_in": 16},
    {"selection": "slicing", "one_in": 16},
    {"selection": "independent", "one_in": 16},
    {"selection": "full"},
    {"selection": "topk", "top_k": 32, "values": "8bit"},
]


def made(config: DeMoConfig) -> DeMo:
    torch.manual_seed(0)
    return DeMo([(f"p{index}", nn.Parameter(torch.randn(shape))) for index, shape in enumerate(SHAPES)], config)


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def fold(demo: DeMo, given: list[Tensor], *, left_out: int = 1) -> Folding:
    """One backward pass whose gradients are those given; the tensor `left_out` has none."""
    folding = demo.folding(LR)
    with folding.hooked():
        folding.start()
        folding.last(SAMPLES)
        pairs = enumerate(zip(demo.parameters, given, strict=True))
        sum((SAMPLES * (p * g).sum() for index, (p, g) in pairs if index != left_out), torch.zeros(())).backward()
    return folding


def propose(demo: DeMo, given: list[Tensor], *, left_out: int = 1) -> bytes:
    for index, (parameter, gradient) in enumerate(zip(demo.parameters, given, strict=True)):
        parameter.grad = None if index == left_out else gradient.clone()
    return demo.propose(LR).payload


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("how", SELECTIONS, ids=lambda how: "-".join(str(value) for value in how.values()))
def test_votes_and_momentum_are_those_of_gradients_that_join_together(
    how: dict[str, object], backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    config = replace(CONFIG, momentum_type=kind, **how)  # type: ignore[arg-type]
    whole, folded = made(config), made(config)
    for step in range(4):
        given = gradients(step)
        one = propose(whole, given)
        folding = fold(folded, given)
        assert all(parameter.grad is None for parameter in folded.parameters), "freed in the backward pass"
        folding.finish(SAMPLES)
        votes = folded.propose(LR)
        assert votes.payload == one
        assert votes.gradient_norm == pytest.approx(
            np.sqrt(sum(float(g.square().sum()) for g in given[:1] + given[2:])), rel=1e-4
        )
        for demo in (whole, folded):
            demo.settle(step % 2 == 0)
            demo.apply([(votes.size, one)], LR, authors=[CONFIG.author])
        assert folded.momentum.equal(whole.momentum)
        assert all(map(torch.equal, folded.parameters, whole.parameters))


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_momentum_in_bf16_is_that_in_fp32_but_for_its_rounding(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    short, long = made(replace(CONFIG, momentum_type="bf16")), made(CONFIG)
    assert short.momentum.dtype == torch.bfloat16
    for step in range(3):
        given = gradients(step)
        for demo in (short, long):
            propose(demo, given)
            demo.settle(False)
    close = torch.isclose(short.momentum.float(), long.momentum, rtol=2**-6, atol=2**-7 * float(long.momentum.std()))
    assert close.all()
    propose(short, gradients(3))
    put_back = short.momentum.clone()
    short.settle(True)
    changed = short.momentum != put_back
    assert 0 < int(changed.sum()) <= 32 * short.layout.chunks
    assert not short.momentum[changed].any(), "votes leave zeros"


def test_a_saved_momentum_of_either_type_becomes_the_other() -> None:
    short, long = made(replace(CONFIG, momentum_type="bf16")), made(CONFIG)
    propose(long, gradients(0))
    short.load_state_dict(long.state_dict())
    assert short.momentum.equal(long.momentum.bfloat16())
    assert short.open_votes.payload == long.open_votes.payload  # type: ignore[union-attr]
    long.load_state_dict(short.state_dict())
    assert long.momentum.equal(short.momentum.float())


@pytest.mark.parametrize("bad", range(len(SHAPES)))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_never_joins_and_the_second_moment_is_as_before(bad: int, value: float) -> None:
    demo = made(CONFIG)
    fold(demo, gradients(0)).finish(SAMPLES)
    demo.propose(LR)
    demo.settle(True)
    before, second = demo.momentum.clone(), demo.state_dict()["second"]
    second = {
        "counts": second["counts"],
        "rows": [t.clone() for t in second["rows"]],
        "columns": [t.clone() for t in second["columns"]],
    }
    given = gradients(1)
    given[bad].view(-1)[0] = value
    folding = fold(demo, given, left_out=-1)
    with pytest.raises(NonFiniteGradient):
        folding.finish(SAMPLES)
    assert folding.norm is None
    assert demo.momentum.isfinite().all()
    place = demo.layout.places[bad]
    core = slice(place.first_chunk, place.first_chunk + place.core_chunks)
    assert demo.momentum[core].equal(before[core]), "of the tensor itself"
    after = demo.state_dict()["second"]
    assert after["counts"] == second["counts"]
    for name in ("rows", "columns"):
        assert all(map(torch.equal, after[name], second[name]))
    assert fold(demo, gradients(2)).finish(SAMPLES) is None
    assert demo.propose(LR).payload, "the next step is one like others"


def test_a_pass_that_is_made_again_joins_once() -> None:
    """As after an out-of-memory in the middle of a pass."""
    once, twice = made(CONFIG), made(CONFIG)
    given = gradients(0)
    fold(once, given).finish(SAMPLES)
    folding = twice.folding(LR)
    with folding.hooked():
        for count in (3, len(SHAPES)):
            folding.start()
            folding.last(SAMPLES)
            sum(
                (SAMPLES * (p * g).sum() for p, g in list(zip(twice.parameters, given, strict=True))[:count]),
                torch.zeros(()),
            ).backward()
            for parameter in twice.parameters:
                parameter.grad = None
    folding.finish(SAMPLES)
    changed = once.layout.places[1]  # left out by `fold`, and in the pool
    assert changed.core_chunks == 0
    assert twice.momentum[: once.layout.core_chunks].equal(once.momentum[: once.layout.core_chunks])


@pytest.mark.parametrize("ends", [True, False])
def test_a_sum_over_several_passes_waits_in_bf16(ends: bool) -> None:
    """Also where the last pass makes no gradient, as of an expert that it does not need."""
    whole, folded = made(CONFIG), made(CONFIG)
    one, other = (
        [(g / g.abs()).nan_to_num() for g in gradients(seed)] for seed in (0, 1)
    )  # sums that bf16 has exactly
    folding = folded.folding(LR)
    with folding.hooked():
        folding.start()
        for given, last in ((one, False), (other, ends)):
            if last:
                folding.last(2)
            sum((p * g).sum() for p, g in zip(folded.parameters, given, strict=True)).backward()  # type: ignore[union-attr]
            assert all(parameter.grad is None for parameter in folded.parameters)
    assert folded._folding_room.sum_of(0).dtype == torch.bfloat16
    folding.finish(2)
    both = [(first + second) / 2 for first, second in zip(one, other, strict=True)]
    assert folded.propose(LR).payload == propose(whole, both, left_out=-1)
    assert folded.momentum.equal(whole.momentum)


def test_a_gradient_that_comes_in_parts_is_whole_in_the_momentum() -> None:
    """A parameter that two checkpointed blocks share gets its gradient twice in one pass."""
    demo = made(CONFIG)
    folding = demo.folding(LR)
    with folding.hooked():
        folding.start()
        folding.last(1)
        for _ in range(2):
            demo.parameters[2].sum().backward()
    folding.finish(SAMPLES)
    place = demo.layout.places[2]
    once = made(CONFIG)
    folding = fold(once, [torch.ones(shape) for shape in SHAPES])
    folding.finish(SAMPLES)
    assert demo.momentum[place.first_chunk, 0, 0] > 1.2 * once.momentum[place.first_chunk, 0, 0]


def test_a_dropped_folding_is_no_proposal() -> None:
    plain, other = made(CONFIG), made(CONFIG)
    other.folding(LR)
    assert propose(other, gradients(0)) == propose(plain, gradients(0))


@pytest.mark.parametrize(
    "config",
    [
        DeMoConfig(beta2=0.9),
        DeMoConfig(),
        DeMoConfig(nesterov=0.9, magnitudes=True, base=BaseConfig("sgd"), selection="topk"),
    ],
)
def test_settings_that_need_all_gradients_at_once_are_refused(config: DeMoConfig) -> None:
    with pytest.raises(ValueError, match="only with a factored second moment"):
        made(config).folding(LR)


def test_a_gradient_of_another_kind_is_named() -> None:
    table = nn.Embedding(100, 64, sparse=True)
    demo = DeMo([("table", table.weight)], CONFIG)
    folding = demo.folding(LR)
    with folding.hooked():
        folding.start()
        folding.last(1)
        table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="table has a sparse"):
        folding.finish(SAMPLES)
