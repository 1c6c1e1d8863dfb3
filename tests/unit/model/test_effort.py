"""A peer's own ways to compute its gradients: the same parameters and, to rounding, the same gradients."""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import nn

from node.model.gradients import loss
from node.model.size import Effort
from node.model.spec import ModelSpec, build
from protos.errors import OperatorError

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    ids = torch.arange(48).view(3, 16)
    loss(model, ids).backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_checkpointing_computes_blocks_again_and_gives_the_same_gradients() -> None:
    plain, spare = build(ModelSpec(TINY), 1), build(ModelSpec(TINY), 1)
    assert Effort(activation_checkpointing=True).prepare(spare) is spare
    calls: list[int] = []
    spare.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[union-attr,index]
    assert [name for name, _ in spare.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for mine, other in zip(gradients(spare), gradients(plain), strict=True):
        torch.testing.assert_close(mine, other)
    assert len(calls) == 2, "once forward and once backward"


def test_a_model_without_checkpointing_is_refused() -> None:
    with pytest.raises(OperatorError, match="activation_checkpointing: Linear has none"):
        Effort(activation_checkpointing=True).prepare(nn.Linear(2, 2))


def test_compiling_keeps_names_and_parameters() -> None:
    model = build(ModelSpec(TINY), 1)
    names = [name for name, _ in model.named_parameters()]
    assert Effort(compiled=True).prepare(model) is model
    assert [name for name, _ in model.named_parameters()] == names


def test_compiling_changes_what_is_called() -> None:
    """With torch's `eager` backend: the graph is captured, and no compiler is needed."""
    captured = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        captured.append(graph)
        return graph.forward

    model, tokens = build(ModelSpec(TINY), 1), torch.arange(8).view(1, 8)
    plain = model(tokens).logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=keep))
        Effort(compiled=True).prepare(model)
    assert torch.allclose(model(tokens).logits, plain, atol=1e-5)
    assert captured, "the forward pass was captured"
