"""How much memory a model takes: counted before anything is built, and less where the weights of a block (a layer) are there
only while it computes.

Numbers are on the meta device, activations on fake tensors. Both have shapes and no numbers, so a model of any size is counted
in the memory of its names. Refuses what `build` refuses.

Blocks are the elements of a model's outermost `nn.ModuleList`s. Refuses weights that another part of the model uses, too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Final
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from node.model.device import short_copy
from node.model.gradients import loss, whole_loss
from node.model.spec import REFUSALS, ModelError, ModelSpec, build_in_mode, build_meta, parameter_count
from protos.errors import OperatorError


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


# How a peer computes its gradients: with less memory, or compiled. The peer chooses this itself; the gradient is the same.
#
# Refuses a setting that the model cannot follow, before the peer joins, instead of doing without it in silence.


@dataclass(frozen=True)
class Effort:
    """`activation_checkpointing`: activations of a block are computed again in the backward pass instead of kept
    (arXiv 1604.06174): about a third more time. `compiled`: through `torch.compile`."""

    activation_checkpointing: bool = False
    compiled: bool = False

    def prepare(self, model: nn.Module) -> nn.Module:
        """The same module, set up in place: its parameters, their names and their bits stay. Raises OperatorError."""
        if self.activation_checkpointing:
            newer = getattr(model, "activation_checkpointing_enable", None)
            enable = newer or getattr(model, "gradient_checkpointing_enable", None)
            if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
                raise OperatorError(
                    f"activation_checkpointing: {type(model).__name__} has none (no activation_checkpointing_enable); "
                    "join without it, and with a smaller micro_batch"
                )
            # as transformers 5 calls it, and as those before do
            name = "activation_checkpointing_kwargs" if newer else "gradient_checkpointing_kwargs"
            enable(**{name: {"use_reentrant": False}})
            model.train()  # transformers checkpoints only a model that is being trained
        if self.compiled:
            model.compile()
        return model


BYTES_A_NUMBER: Final = 4
"""Master weights, gradients and momentum are fp32."""


@dataclass(frozen=True)
class ModelSize:
    """What the model's shapes say."""

    parameters: int
    """Trained numbers; tied ones once."""
    model_bytes: int
    """Parameters and buffers in fp32."""
    largest: int = 0
    """Numbers of the largest trained parameter."""
    block: int = 0
    """Numbers of the largest repeated block."""
    outside: int = 0
    """Numbers of the parameters that are in no such block."""
    no_stream: str = ""
    """Why the weights of its blocks cannot come and go; empty if they can."""
    frozen: int = 0
    """Numbers of parameters that are not trained."""


def size_of(spec: ModelSpec) -> ModelSize | None:
    """The size of a run's model. None for a factory that does not work without numbers. Raises ModelError, as `build` would."""
    try:
        model = build_meta(spec)
    except ModelError:
        raise
    except REFUSALS:
        if spec.factory is None:
            raise
        return None
    return measured(model)


def measured(model: nn.Module) -> ModelSize:
    """The size of a model on any device."""
    numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    largest = max((it.numel() for it in model.parameters() if it.requires_grad), default=0)
    blocks = [sum(own.numel() for own in block.parameters()) for _, block in blocks_with_weights(model)]
    parameters, trained = sum(parameter.numel() for parameter in model.parameters()), parameter_count(model)
    outside, block, whole = parameters - sum(blocks), max(blocks, default=0), BYTES_A_NUMBER * numbers
    return ModelSize(trained, whole, largest, block, outside, no_stream(model), parameters - trained)


def activation_bytes(
    spec: ModelSpec,
    context: int,
    *,
    checkpointing: bool = False,
    compiled: bool = False,
    short: bool = False,
    stream: bool = False,
) -> int | None:
    """What the backward pass of one sample keeps, in fp32, or with bf16 weights (`short`).

    None for a factory, and for a model that needs numbers to run. It counts the storages that autograd saves in a
    forward pass of one sample, parameters left out. A forward pass of fp32 weights in bf16 keeps less, so this is the upper
    bound of both. `compiled`: the model is one graph, and makes all logits at once. `stream`: each block is computed again,
    and the activations of the largest one are counted.
    """
    if spec.factory is not None:
        return None  # its code may look at numbers, and need not come back
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device("cpu"):
        try:
            model = build_in_mode(spec.config)
            Effort(activation_checkpointing=checkpointing).prepare(model).train()
            model = short_copy(model, torch.device("cpu")) if short else model
            if stream:
                blocks = [block for _, block in blocks_with_weights(model)]
                blocks.remove(max(blocks, key=lambda block: sum(own.numel() for own in block.parameters())))
                checkpoint_blocks(dict(enumerate(blocks)), lambda *_: nullcontext())
            with torch.autocast("cpu", torch.bfloat16, enabled=short):
                return _saved_bytes(model, torch.zeros(1, context + 1, dtype=torch.int64), compiled=compiled)
        except (*REFUSALS, UnsupportedFakeTensorException):
            return None


def _saved_bytes(model: nn.Module, tokens: Tensor, *, compiled: bool) -> int:
    """Bytes of the distinct storages that the loss of `tokens` keeps for its backward pass, without the parameters."""
    kept: dict[int, tuple[int, Any]] = {}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes(), tensor  # the tensor too: a storage that is gone gives its name away
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        summed = whole_loss(model, tokens[:, :-1], tokens[:, 1:].flatten()) if compiled else loss(model, tokens)
    del summed
    return sum(size for name, (size, _) in kept.items() if name not in own)
