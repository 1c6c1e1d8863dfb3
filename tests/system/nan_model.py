"""A small Llama whose gradients are NaN from some forward pass on, as those of a run that has diverged."""

from typing import Any

import torch
from torch import Tensor, nn

from node.model.spec import ModelSpec, build


def make(config: dict[str, Any], forwards: int) -> nn.Module:
    """For `model.factory`. `forwards`: so many forward passes of a process give good gradients."""
    model = build(ModelSpec(config), seed=0)
    done = [0]

    def count(module: nn.Module, given: object) -> None:
        done[0] += torch.is_grad_enabled()

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * torch.nan if done[0] > forwards else gradient

    model.register_forward_pre_hook(count)
    next(model.parameters()).register_hook(spoil)
    return model
