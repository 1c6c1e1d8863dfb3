"""The gradient of a clock step, over as many micro-batches as the time allows.

The result is the mean over all samples, however they were split; on an early stop it is the mean over what was done.
Refuses: clipping, optimizers, judging the loss (a NaN is returned as it is).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from node.model.sliced_loss import loss

Batch = Tensor | npt.NDArray[np.int64]
Loss = Callable[[nn.Module, Tensor], Tensor]
"""Mean nats a predicted token, a scalar: of a model and samples, int64 [n, context + 1]."""


class GradientTaker(Protocol):
    """It takes gradients out of `.grad` where autograd makes them."""

    def start(self) -> None:
        """The next backward pass is the first one, perhaps again."""

    def last(self, samples: int) -> None:
        """The next backward pass completes the gradients: sums over so many samples, or a mean (1)."""

    def hooked(self) -> AbstractContextManager[None]:
        """`take` what the backward passes within make."""

    def take(self, index: int, parameter: Tensor) -> None:
        """Take the gradient in `.grad` of the parameter with this index among those trained, and free it."""


@dataclass(frozen=True)
class GradResult:
    """The samples and tokens of a gradient, and their loss."""

    loss_mean: float
    """Nats a token; NaN when no sample was done."""
    tokens: int
    """Predicted tokens."""
    samples: int


def accumulate_gradients(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    autocast: AbstractContextManager[Any] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    loss: Loss = loss,
    taker: GradientTaker | None = None,
) -> GradResult:
    """Replace every parameter's `.grad` by the mean gradient over the samples of `batches`.

    Each batch is int64 [n, context + 1]; `autocast` is entered for each forward pass. `should_stop` is asked before
    each micro-batch. When no sample was done all gradients are None. What a `taker` takes
    is not divided here.
    """
    forward = nullcontext() if autocast is None else autocast
    model.zero_grad(set_to_none=True)
    if taker is not None:
        taker.start()
    total, tokens, samples = torch.zeros((), device=device), 0, 0
    pace = Pace(device)
    for batch, ends in with_end(batches) if taker is not None else ((batch, False) for batch in batches):
        if should_stop():
            break
        rows = to_device(batch, device)
        with forward:
            mean = loss(model, rows)
            summed = mean * len(rows)
        alone = taker is not None and ends and not samples  # a mean at once, which nobody has to divide
        if taker is not None and ends:
            taker.last(1 if alone else samples + len(rows))
        (mean if alone else summed).backward()  # type: ignore[no-untyped-call]
        total += summed.detach()  # stays on the device: reading it here would stall the queue
        samples += len(rows)
        tokens += rows[:, 1:].numel()
        pace.tick()
    if samples:
        _divide_gradients(model, samples)
    return GradResult(loss_mean=total.item() / samples if samples else math.nan, tokens=tokens, samples=samples)


def with_end(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the last one."""
    kept: Batch | None = None
    for batch in batches:
        if kept is not None:
            yield kept, False
        kept = batch
    if kept is not None:
        yield kept, True


def no_room(error: RuntimeError) -> bool:
    """Whether torch failed for want of memory, on whatever device."""
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def free_cache(device: torch.device) -> None:
    """Give back what torch keeps for later: after a failure it lies in pieces of the wrong sizes."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).empty_cache()


class Pace:
    """Keeps the host at most one micro-batch ahead of a CUDA device, so that `should_stop` is asked in time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._previous: torch.cuda.Event | None = None

    def tick(self) -> None:
        if self._device.type != "cuda":
            return
        if self._previous is not None:
            self._previous.synchronize()
        self._previous = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._previous.record(torch.cuda.current_stream(self._device))


def to_device(batch: Batch, device: torch.device) -> Tensor:
    rows = torch.as_tensor(batch)
    if device.type == "cuda" and rows.device.type == "cpu":
        rows = rows.pin_memory()  # a pinned source lets the copy overlap with the previous backward pass
    return rows.to(device, non_blocking=device.type == "cuda")


def _divide_gradients(model: nn.Module, samples: int) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, float(samples))
