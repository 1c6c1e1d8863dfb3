"""The repeated blocks of a model (layers), whose weights may be there only while the block computes.

Blocks are the elements of a model's outermost `nn.ModuleList`s. Refuses weights that another part of the model uses, too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakMethod

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The elements of the outermost lists, by name. Inner lists stay whole, because not every token calls the same experts."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{prefix}{name}.{index}", block) for index, block in enumerate(child))
        else:
            yield from blocks_of(child, f"{prefix}{name}.")


def blocks_with_weights(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that have parameters."""
    return [(name, block) for name, block in blocks_of(model) if next(block.parameters(), None) is not None]


def no_stream(model: nn.Module) -> str:
    """Why the weights of the model's blocks cannot come and go one block at a time; empty if they can."""
    blocks = blocks_with_weights(model)
    if not blocks:
        return "the model has no repeated blocks (modules of an nn.ModuleList)"
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, block in blocks:
        within = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
        for own, parameter in block.named_parameters():
            if uses[id(parameter)] != within[id(parameter)]:
                return f"parameter {name}.{own} is tied to one outside of its block"
    return ""


Lending = Callable[[int, int], AbstractContextManager[None]]
"""Of the number of a block, and the direction in which the next one lies: 1 or -1."""


def checkpoint_blocks(blocks: Mapping[int, nn.Module], lending: Lending) -> None:
    """Let each block compute within `lending`, keep no activations, and compute them again in the backward pass, with the same
    random numbers."""
    for index, block in blocks.items():
        own: Any = block.forward
        found = WeakMethod(own) if isinstance(own, MethodType) else lambda own=own: own  # else each block holds itself
        block.forward = partial(_checkpointed, found, partial(lending, index))


def _checkpointed(found: Callable[[], Any], lending: Callable[[int], Any], *inputs: Any, **named: Any) -> Any:
    forward = found()
    directions = itertools.chain((1,), itertools.repeat(-1))  # the backward pass computes it a second time

    def run(named: dict[str, Any], *inputs: Any) -> Any:
        with lending(next(directions)):
            return forward(*inputs, **named)

    # all as inputs: `checkpoint` keeps the random state of the devices of these alone
    return checkpoint(run, named, *inputs, use_reentrant=False)
