"""The loss of any model, and gradients that do not depend on the split."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from node.model.device import DeviceError, autocast, devices, pick_device
from node.model.gradients import LogitsError, accumulate_gradients, loss
from node.model.spec import ModelSpec, build
from tests.unit.model.test_spec import TINY, Plain

CPU = torch.device("cpu")


def tokens(samples: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (samples, 17), generator=torch.Generator().manual_seed(seed))


class Wrapped(nn.Module):
    """Answers in another form than a tensor."""

    def __init__(self, wrap: object) -> None:
        super().__init__()
        self.inner, self.wrap = build(ModelSpec(factory="tests.unit.model.test_spec:Plain"), 1), wrap

    def forward(self, inputs: torch.Tensor) -> object:
        return self.wrap(self.inner(inputs))


def test_loss_is_the_cross_entropy_of_the_next_token() -> None:
    model, rows = build(ModelSpec(TINY), 1), tokens(3)
    expected = F.cross_entropy(model(rows[:, :-1]).logits.reshape(-1, 256), rows[:, 1:].reshape(-1))
    assert torch.equal(loss(model, rows), expected)
    assert abs(loss(model, rows).item() - math.log(256)) < 0.2, "an untrained model knows nothing"


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: (x, None), lambda x: {"logits": x}, lambda x: SimpleNamespace(logits=x)]
)
def test_loss_takes_every_common_answer(wrap: object) -> None:
    wrapped = Wrapped(wrap)
    assert torch.equal(loss(wrapped, tokens(2)), loss(wrapped.inner, tokens(2)))


@pytest.mark.parametrize(
    ("wrap", "words"), [(lambda x: "text", "returned str"), (lambda x: x[:, :, 0], r"shape \(2, 16\)")]
)
def test_other_answers_are_refused(wrap: object, words: str) -> None:
    with pytest.raises(LogitsError, match=words):
        loss(Wrapped(wrap), tokens(2))


def gradient_of(split: list[int], stop_after: int | None = None) -> tuple[list[torch.Tensor], object]:
    model, asked = build(ModelSpec(TINY), 1), iter(range(100))
    result = accumulate_gradients(
        model, tokens(12).split(split), CPU, autocast(CPU), lambda: stop_after is not None and next(asked) >= stop_after
    )
    return [p.grad for p in model.parameters() if p.grad is not None], result


@pytest.mark.parametrize("split", [[6, 6], [5, 4, 3], [1] * 12])
def test_split_does_not_matter(split: list[int]) -> None:
    (whole, first), (parts, second) = gradient_of([12]), gradient_of(split)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-7)
    assert (first.tokens, first.samples) == (second.tokens, second.samples) == (12 * 16, 12)
    assert first.loss_mean == pytest.approx(second.loss_mean)


def test_early_stop_is_the_mean_over_what_was_done() -> None:
    model = build(ModelSpec(TINY), 1)
    accumulate_gradients(model, [tokens(12)[:5]], CPU)
    stopped, result = gradient_of([3, 2, 7], stop_after=2)
    torch.testing.assert_close(stopped, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-7)
    assert (result.samples, result.tokens) == (5, 80)


def test_nothing_done_leaves_no_gradient() -> None:
    model = build(ModelSpec(factory="tests.unit.model.test_spec:Plain"), 1)
    loss(model, tokens(1)).backward()
    result = accumulate_gradients(model, [tokens(2)], CPU, should_stop=lambda: True)
    assert result.samples == 0
    assert math.isnan(result.loss_mean)
    assert all(p.grad is None for p in model.parameters())


def test_numpy_batches_and_bf16() -> None:
    model = build(ModelSpec(TINY), 1)
    exact = accumulate_gradients(model, [tokens(4)], CPU).loss_mean
    rounded = accumulate_gradients(model, iter([tokens(4).numpy().astype(np.int64)]), CPU, autocast(CPU, "bf16"))
    assert rounded.loss_mean == pytest.approx(exact, rel=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_devices() -> None:
    assert pick_device("cpu") == CPU
    assert str(pick_device("auto")) == devices()[0]
    with pytest.raises(DeviceError, match=r"'cuda:99': this machine has .*cpu"):
        pick_device("cuda:99")
    with pytest.raises(DeviceError, match="'fp8': expected one of auto, bf16, fp32"):
        autocast(CPU, "fp8")


def test_plain_modules_work_too() -> None:
    model = Plain()
    assert accumulate_gradients(model, [tokens(2)], CPU).samples == 2
