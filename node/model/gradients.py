"""The gradient of a clock step, over as many micro-batches as the time allows; and next-token loss without all its logits.

The result is the mean over all samples, however they were split; on an early stop it is the mean over what was done.
Refuses: clipping, optimizers, judging the loss (a NaN is returned as it is).

Logits of 1,024 tokens and 128,256 words are 0.5 GB, and autograd keeps two to three times that. Here a slice of positions
exists at a time, each turned into its gradient at once. The gradients are those of the plain loss within fp32's rounding.
Liger's fused kernel (arXiv 2410.10989) does the same. A model whose logits are more than its last hidden states times its
output table is not taken (`parts_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.optim.laid_out import is_dtensor
from protos.errors import OperatorError

SLICE_BYTES: Final = 64 << 20
"""Of a slice of fp32 logits. Smaller slices add to the table's gradient more often."""
TYPES: Final = frozenset({
    "gpt2", "gpt_neo", "gpt_neox", "llama", "mistral", "olmo", "olmo2", "opt", "phi3", "qwen2", "qwen3",
    "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Types of transformers whose logits are the table times the hidden states, and nothing more. A test compares each."""


class ModelHalves(NamedTuple):
    """A causal language model in two halves."""

    trunk: nn.Module
    """Tokens to hidden states."""
    table: Tensor
    """[vocabulary, width]: logits are hidden states times it."""


def parts_of(model: nn.Module, positions: int) -> ModelHalves | None:
    """The halves of a model whose logits for so many positions are worth slicing; None: take the plain loss."""
    kind: object = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in TYPES or not _is_plain(model):
        return None
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    trunk: Any = model.base_model
    if (
        type(head) is not nn.Linear
        or getattr(head, "bias", None) is not None
        or not _is_untouched(head)
        or not isinstance(trunk, nn.Module)
        or trunk is model
    ):
        return None
    if is_dtensor(head.weight) or 4 * positions * head.out_features <= SLICE_BYTES:
        return None
    return ModelHalves(trunk, head.weight)


def _is_plain(model: nn.Module) -> bool:
    """Whether the class is that of transformers, and is called as it is: a compiled model is one graph."""
    return (
        type(model).__module__.startswith("transformers.models.")
        and getattr(model, "_compiled_call_impl", None) is None
        and _is_untouched(model)
    )


def _is_untouched(module: nn.Module) -> bool:
    """Whether nobody gave a module another forward pass, or hooks, as a factory may to scale or cap logits."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks)


def mean_loss(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats, a scalar in fp32.

    `hidden` [positions, width], `table` [vocabulary, width], `targets` int64 [positions]. Under autocast the products are made
    in its type, as those of a linear layer are.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else table.dtype
    with torch.autocast(kind, enabled=False):
        found: Tensor = _Sliced.apply(hidden, table, targets, dtype)  # type: ignore[no-untyped-call]
    return found


class _Sliced(torch.autograd.Function):
    """The gradient is made beside the loss: a backward pass of its own would make all logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        wants_hidden, wants_table = ctx.needs_input_grad[:2]
        words, states = table.to(dtype), hidden.to(dtype)
        rows = max(1, SLICE_BYTES // (4 * len(table)))
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_table = torch.zeros_like(table) if wants_table else None
        for first in range(0, len(hidden), rows):
            own, aim = states[first : first + rows], targets[first : first + rows, None]
            logits = (own @ words.T).float()
            logits -= logits.amax(1, keepdim=True)
            total -= logits.gather(1, aim).sum()
            sums = logits.exp_().sum(1, keepdim=True)
            total += sums.log().sum()
            if to_hidden is None and to_table is None:
                continue
            # softmax less the target: what the mean's gradient is
            logits.div_(sums).scatter_add_(1, aim, logits.new_full(aim.shape, -1.0)).div_(len(hidden))
            slopes = logits.to(dtype)
            del logits
            if to_hidden is not None:
                to_hidden[first : first + rows] = slopes @ words
            if to_table is not None:
                _add_product(to_table, slopes, own)
        # not by save_for_backward: the table's gradient is no activation, and nobody has to count it as one
        ctx.gradients = to_hidden, to_table
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        to_hidden, to_table = (None if it is None else it.mul_(outer) for it in ctx.gradients)
        ctx.gradients = None, None
        return to_hidden, to_table, None, None


def _add_product(table: Tensor, slopes: Tensor, states: Tensor) -> None:
    """`table += slopes.T @ states` in place, [vocabulary, width]."""
    if table.dtype == slopes.dtype:
        table.addmm_(slopes.T, states)
    else:
        table += slopes.T @ states


# Next-token loss of any model that gives logits. Refuses answers of another shape; knows no optimizer.


class LogitsError(OperatorError):
    """The operator's model does not answer with logits [batch, context, vocabulary]."""


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats, a scalar in fp32; tokens: int64 [batch, context + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    if parts := parts_of(model, inputs.numel()):
        hidden = answer_of(parts.trunk, inputs)[0]
        return mean_loss(hidden.flatten(0, 1), parts.table, targets)
    return whole_loss(model, inputs, targets)


def whole_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The same from all logits at once; inputs int64 [batch, context], targets int64 [batch * context]."""
    logits = logits_of(model, inputs)
    # fp32 whatever the forward pass ran in: the sum over a vocabulary loses bits in bf16
    return F.cross_entropy(logits.flatten(0, 1).float(), targets)


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Logits [batch, context, vocabulary] for inputs int64 [batch, context]."""
    output = answer_of(model, inputs)
    logits = _find(output)
    if logits is None:
        raise LogitsError(
            f"{type(model).__name__} returned {type(output).__name__}: expected a tensor of logits, a tuple that "
            "begins with it, or an object or dict with `logits`"
        )
    if logits.dim() != 3 or logits.shape[:2] != inputs.shape:
        raise LogitsError(
            f"{type(model).__name__} returned logits of shape {tuple(logits.shape)}: expected [batch, context, "
            f"vocabulary] beginning with {tuple(inputs.shape)}"
        )
    return logits


def answer_of(model: nn.Module, inputs: Tensor, **more: Tensor) -> Any:
    """All that the model answers. The key-value cache is for generation; in training it costs memory."""
    cached = getattr(getattr(model, "config", None), "use_cache", None)
    return model(inputs, use_cache=False, **more) if cached else model(inputs, **more)


def _find(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("logits")
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    return found if isinstance(found, Tensor) else None


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
