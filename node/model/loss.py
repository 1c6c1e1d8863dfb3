"""Next-token loss of any model that gives logits. Refuses answers of another shape; knows no optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from node.model import sliced_loss
from protos.errors import OperatorError


class LogitsError(OperatorError):
    """The operator's model does not answer with logits [batch, context, vocabulary]."""


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats, a scalar in fp32; tokens: int64 [batch, context + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    if parts := sliced_loss.parts_of(model, inputs.numel()):
        hidden = answer_of(parts.trunk, inputs)[0]
        return sliced_loss.mean_loss(hidden.flatten(0, 1), parts.table, targets)
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
