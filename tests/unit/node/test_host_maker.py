"""Gradients of bf16 weights on a device, for a state in the main memory: never of old weights, and never kept on the device.

How they join the momentum stands in test_replica.py, for all modes that save memory.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.data.samples import Samples
from node.model.device import autocast, short_copy
from node.model.gradients import loss
from node.model.size import Effort
from node.model.spec import ModelSpec, build
from node.optim.demo import DeMo
from node.optim.step import NonFiniteGradient
from node.training import vote_checks
from node.training.block_stream import HostTransfer
from node.training.host_maker import HostMaker
from node.training.need import kind_of
from node.training.replica import Replica
from protos.assignment import Range
from protos.errors import OperatorError
from protos.optimizer_config import OptimizerConfig
from tests.unit.model.test_spec import TINY
from tests.unit.node.test_replica import LR, RUN, apply, entry

CPU = torch.device("cpu")
TEXT = Samples(np.arange(4000) % 250, 16, seed=1)
PARTS = (Range(0, 8),)
TIED = {**TINY, "tie_word_embeddings": True}


def never() -> bool:
    return False


def short() -> AbstractContextManager[Any]:
    return autocast(CPU, "bf16")


def host(
    model: nn.Module | None = None, optimizer: OptimizerConfig | None = None, *, behind: bool = False, **effort: bool
) -> Replica:
    model = build(ModelSpec(TIED), 1) if model is None else model
    optimizer = optimizer or OptimizerConfig()
    own: dict[str, Any] = {"second": kind_of("host", optimizer)}
    return Replica(
        RUN, model, optimizer, optimizer.vote_size, maker=HostMaker(model, CPU, Effort(**effort), behind=behind), **own
    )


def maker(of: Replica) -> Any:
    assert isinstance(of.maker, HostMaker)
    return of.maker


def momentum(of: Replica) -> Tensor:
    assert isinstance(of.demo, DeMo)
    return of.demo.momentum


def gradients(of: Replica, at_a_time: int = 8, parts: tuple[Range, ...] = PARTS) -> list[Tensor | None]:
    """Whole ones, at the state that is here."""
    assert of.mean_gradient(TEXT, parts, at_a_time, short(), never).samples == sum(map(len, parts))
    return of.whole_gradients()


def of_short_model(model: nn.Module, at_a_time: int = 8, device: torch.device = CPU) -> list[Tensor]:
    """The same, the obvious way."""
    own = short_copy(model, device)
    sums: list[Tensor] = []
    for rows in TEXT.micro_batches(PARTS, at_a_time):
        with autocast(device, "bf16"):
            mean = loss(own, torch.as_tensor(rows).to(device))
        (mean * (1 if at_a_time == 8 else len(rows))).backward()
        found = [parameter.grad.float().cpu() for parameter in own.parameters()]
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        own.zero_grad()
    return sums if at_a_time == 8 else [each / 8 for each in sums]


def equal(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("at_a_time", [8, 3])
def test_the_gradient_is_that_of_a_bf16_model_summed_in_fp32(at_a_time: int, behind: bool) -> None:
    of = host(behind=behind)
    found = gradients(of, at_a_time)
    assert equal(found, of_short_model(of.model, at_a_time))
    assert {each.dtype for each in found} == {torch.float32}


def test_the_device_has_bf16_weights_and_no_gradients() -> None:
    of = host()
    gradients(of)
    own = maker(of)._model
    assert {parameter.dtype for parameter in own.parameters()} == {torch.bfloat16}
    assert all(parameter.grad is None for parameter in own.parameters())
    assert own.lm_head.weight is own.model.embed_tokens.weight, "tied"
    assert {buffer.dtype for buffer in own.buffers()} == {buffer.dtype for buffer in of.model.buffers()}
    assert {parameter.dtype for parameter in of.model.parameters()} == {torch.float32}


def test_weights_and_buffers_lie_on_the_device_and_the_state_in_main_memory() -> None:
    """The placement of a card, on torch's device without numbers."""
    model = build(ModelSpec(TIED), 1)
    made = short_copy(model, torch.device("meta"))
    assert {tensor.device.type for tensor in (*made.parameters(), *made.buffers())} == {"meta"}
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    of = Replica(RUN, model, OptimizerConfig(), 128, second="factored", maker=HostMaker(model, torch.device("meta")))
    assert (of.device.type, of.maker.device.type) == ("cpu", "meta")
    assert {tensor.device.type for tensor in of.state.values()} == {"cpu"}


class Stream:
    """CUDA's, without a device: it remembers what it was asked for, in order."""

    def __init__(self) -> None:
        self.device, self.asked = torch.device("cuda"), list[str]()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.asked.append(name)


def test_a_card_copies_by_way_of_one_buffer_that_is_free_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of torch.cuda here is a stand-in: no GPU was there."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "Event", Stream)
    transfer = HostTransfer(CPU, 12)
    transfer._buffer, transfer._stream = torch.empty(12, dtype=torch.bfloat16), stream  # type: ignore[assignment]
    weights, own = torch.randn(3, 4), torch.empty(3, 4, dtype=torch.bfloat16)
    transfer.up(weights, own, transfer.made())
    assert own.equal(weights.bfloat16())
    assert stream.asked == ["wait_event", "synchronize"], "the last pass has read the weights before they change"
    for shape in ((3, 2), (), (12,)):
        gradient = torch.randn(shape).bfloat16()
        mark = transfer.made()
        assert mark.asked == ["record"]
        stream.asked.clear()
        assert transfer.down(gradient, torch.empty(shape), mark).equal(gradient.float())
        assert stream.asked == ["wait_event", "synchronize"], "made before it is read, here before it is used"


# ---- the weights are never old ---------------------------------------------------------------------------------------


def applied(of: Replica) -> Iterator[None]:
    of.mean_gradient(TEXT, (Range(8, 16),), 8, short(), never)
    apply(of, entry(of), of.vote(1, LR))
    yield


def loaded(of: Replica) -> Iterator[None]:
    other = host(copy.deepcopy(of.model))
    for _ in applied(other):
        manifest, data = other.packed()
        of.load(manifest, data)
        yield


def look_ahead(of: Replica) -> Iterator[None]:
    of.gradients(TEXT, PARTS, 8, short(), never, 1.0, LR)
    of.vote(1, LR)
    of.demo.settle(False)
    with of.ahead(LR):
        yield


def borrowed(of: Replica) -> Iterator[None]:
    of.local.borrow()
    of.mean_gradient(TEXT, (Range(8, 16),), 8, short(), never)
    of.local.step(1.0)
    yield
    of.local.give_back()


def given_back(of: Replica) -> Iterator[None]:
    for _ in borrowed(of):
        gradients(of)  # at the state that is left
    yield


def rested(of: Replica) -> Iterator[None]:
    of.rest()
    yield


def by_anybody(of: Replica) -> Iterator[None]:
    with torch.no_grad():
        for parameter in of.model.parameters():
            parameter.mul_(1.5)
    yield


CHANGES = [applied, loaded, look_ahead, borrowed, given_back, rested, by_anybody]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_after_each_kind_of_change_the_gradient_is_that_of_the_new_weights(
    change: Callable[[Replica], Iterator[None]], behind: bool
) -> None:
    local = change in (borrowed, given_back)
    of = host(optimizer=OptimizerConfig(recipe="diloco-demo") if local else None, behind=behind)
    before = [None if each is None else each.clone() for each in gradients(of)]
    of.model.zero_grad()
    for _ in change(of):
        found = gradients(of)
        assert equal(found, of_short_model(of.model))
        assert equal(found, before) is (change in (rested, given_back)), "the change is one, or is undone"


def test_frozen_weights_are_refreshed_too() -> None:
    """A fork begins at another run's state, in which they may differ."""
    model = build(ModelSpec(TINY), 1)
    frozen = next(model.parameters()).requires_grad_(requires_grad=False)
    of = host(model)
    gradients(of)
    with torch.no_grad():
        frozen.mul_(2)
    gradients(of)
    assert next(maker(of)._model.parameters()).equal(frozen.bfloat16())
    assert next(maker(of)._model.parameters()).requires_grad is False


def test_a_peer_that_rests_leaves_the_device_empty() -> None:
    of = host()
    gradients(of)
    own = maker(of)._model
    assert sum(parameter.untyped_storage().nbytes() for parameter in own.parameters()) > 0
    of.rest()
    assert sum(parameter.untyped_storage().nbytes() for parameter in own.parameters()) == 0


# ---- what goes wrong -------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Logits of tokens; `cast` is what a model does with its own parameters in a forward pass."""

    def __init__(self, cast: Callable[[nn.Module], object] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.cast = nn.Embedding(256, 64), nn.Linear(64, 256), cast

    def forward(self, tokens: Tensor) -> Tensor:
        self.cast(self)
        logits: Tensor = self.head(self.table(tokens))
        return logits


def only_fp32(model: nn.Module) -> None:
    if next(model.parameters()).dtype != torch.float32:
        raise TypeError("this model computes in fp32 alone")


def test_a_model_that_does_not_compute_with_bf16_weights_is_refused_before_others_wait() -> None:
    maker(host(Plain())).ready(16)
    with pytest.raises(
        OperatorError, match=r"memory = host: .*bf16 weights \(this model computes.*set memory to small"
    ):
        maker(host(Plain(only_fp32))).ready(16)


@pytest.mark.parametrize(
    ("cast", "words"),
    [
        (lambda model: model.float(), "was bfloat16 .* trained, and is float32"),
        (lambda model: model.requires_grad_(requires_grad=False), "does not require grad|is bfloat16 .* frozen"),
    ],
)
def test_a_model_that_changes_its_parameters_ends_the_peer_with_a_sentence(cast: Any, words: str) -> None:
    of = host(Plain())
    gradients(of)
    cast(maker(of)._model)
    with pytest.raises(OperatorError, match=f"the model changes while it trains: parameter .*({words})"):
        of.gradients(TEXT, PARTS, 8, short(), never, 1.0, LR)
    with pytest.raises(OperatorError, match=r"parameter table\.weight"):
        of.gradients(TEXT, PARTS, 8, short(), never)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("lr", [LR, None])
def test_what_is_not_finite_makes_no_votes(lr: float | None, behind: bool) -> None:
    of = host(behind=behind)
    with torch.no_grad():
        next(of.model.parameters())[0, 0] = float("inf")

    def step() -> None:
        of.gradients(TEXT, PARTS, 8, short(), never, 1.0, lr)
        of.vote(1, LR)

    with pytest.raises(NonFiniteGradient):
        step()
    assert momentum(of).isfinite().all()


@pytest.mark.parametrize("optimizer", [{"method": "paper"}, {"beta2": 0.0}], ids=str)
def test_runs_without_a_second_moment_train_with_whole_gradients(optimizer: dict[str, Any]) -> None:
    of = host(optimizer=OptimizerConfig.model_validate(optimizer))
    assert of.gradients(TEXT, PARTS, 8, short(), never, 1.0, LR).samples == 8
    assert equal(of.whole_gradients(), of_short_model(of.model))
    assert of.vote(1, LR)


def test_checks_of_votes_pass_those_of_a_peer_that_keeps_fp32_weights() -> None:
    of = host()
    full = Replica(RUN, build(ModelSpec(TIED), 1), OptimizerConfig(), 128)
    checker = of.maker.checker
    assert checker is not None
    of.mean_gradient(TEXT, PARTS, 8, short(), never, checker)
    full.mean_gradient(TEXT, PARTS, 8, None, never)
    mine, theirs = (vote_checks.transformed(it.demo.layout, it.whole_gradients(), "dct") for it in (of, full))
    assert float((mine - theirs).norm() / theirs.norm()) < 0.02
    assert not momentum(of).any()


def test_checkpointing_is_the_copys_and_gives_its_gradient() -> None:
    plain, sparing = host(), host(activation_checkpointing=True)
    assert equal(gradients(plain), gradients(sparing))
    assert maker(sparing)._model.model.layers[0].gradient_checkpointing
    whole: Any = sparing.model
    assert not whole.model.layers[0].gradient_checkpointing
    with pytest.raises(OperatorError, match="activation_checkpointing: Plain has none"):
        maker(host(Plain(), activation_checkpointing=True)).ready(16)


# ---- on a card -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("at_a_time", [8, 3])
def test_on_a_card_gradients_are_those_of_the_weights_at_hand(at_a_time: int, behind: bool, stream: bool) -> None:
    card = torch.device("cuda", 0)
    model = build(ModelSpec({**TIED, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}), 1)
    made = HostMaker(model, card, behind=behind, stream=stream)
    of = Replica(RUN, model, OptimizerConfig(), 128, second="factored", maker=made)
    for step in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9 if step % 2 else 1.1)
        of.mean_gradient(TEXT, PARTS, at_a_time, autocast(card, "bf16"), never)
        for found, wanted in zip(of.whole_gradients(), of_short_model(model, at_a_time, card), strict=True):
            assert found is not None
            assert found.device.type == "cpu"
            assert (found - wanted).norm() < 0.03 * wanted.norm() + 1e-9
