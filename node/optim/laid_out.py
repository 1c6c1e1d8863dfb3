"""The tensors of an optimizer: which kinds it takes, and the check in each step that they still are what a layout was made of.

The constructor of an optimizer looks at parameters once; people change a model later. A model that was cast, moved, frozen or
cut afterwards would be written beyond its memory, or trained wrong in silence. `LaidOut` refuses it with the parameter's name.
New memory of the same kind is no mistake (`p.data = ...`): it is looked at and taken. The check costs some microseconds a
parameter, and never reads a value.

`is_dtensor` tells tensors that PyTorch has spread over the ranks of a peer from others, without the import of their module. A
DTensor cannot exist before its module is imported. The import takes half a second of CPU time, and most peers have one device.

`zeros` take memory only where somebody writes: an anchor, an export and a replay have a momentum that nobody writes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ALIGNED_BYTES = 64
"""As torch's own memory is."""
BYTES_MIN = 1 << 20
"""Less comes from the C library's heap, which writes the zeros."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`, which writes them all. On a CPU, the system gives a page when it is written."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < BYTES_MIN:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = np.zeros(size + ALIGNED_BYTES, dtype=np.uint8)
    skip = -memory.ctypes.data % ALIGNED_BYTES
    return torch.from_numpy(memory[skip : skip + size]).view(dtype).view(tuple(shape))


def zeros_like(tensor: Tensor) -> Tensor:
    """The same, in the shape of a tensor, and on its device."""
    plain = type(tensor) is Tensor and tensor.is_contiguous()
    return zeros(tensor.shape, tensor.dtype, tensor.device) if plain else torch.zeros_like(tensor)


MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether this is a tensor as `fully_shard` makes them."""
    # another thread may be in the middle of the import: a program's own loop has one
    kind = getattr(sys.modules.get(MODULE), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def is_dealt(parameter: DTensor) -> bool:
    """Whether each rank has some of the rows. Otherwise each rank has all of them."""
    return parameter.placements[0].is_shard()


class ParameterChanged(ValueError):  # noqa: N818
    """A parameter, or its gradient, is not what was laid out. Nothing was changed."""


Kind = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...], bool]


def fault_of(tensor: Tensor, device: torch.device | None = None) -> str | None:
    """What keeps a tensor from being trained here, and what to do; None if nothing does. `device`: that of the others."""
    if tensor.layout != torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}, not dense: call .to_dense()"
    if tensor.dtype != torch.float32:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_complex():
            return f"is {name}, and votes are for real numbers: make it two real parameters, or train it with another optimizer"
        return f"is {name}, not fp32: call model.float(), and use torch.autocast to compute in another precision"
    if tensor.device.type == "meta":
        return "has no values yet (device meta): make the optimizer after model.to_empty(...) and the weights"
    if device is not None and tensor.device != device:
        return f"is on {tensor.device}, and others are on {device}: move the whole model to one device first"
    if not tensor.is_contiguous():
        return (
            f"is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): call "
            "model.to(memory_format=torch.contiguous_format), or parameter.data = parameter.data.contiguous()"
        )
    return None


def gradient_fault_of(parameter: Tensor) -> str | None:
    """What keeps the gradient in `.grad` from being taken, and what to do; None if nothing does, or there is none."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        name = str(gradient.layout).removeprefix("torch.")
        return f"has a {name} gradient, and DeMo needs dense ones: make the embedding with sparse=False"
    if not gradient.dtype.is_floating_point:
        return f"has a gradient of {str(gradient.dtype).removeprefix('torch.')}, not of a real floating point type"
    if is_dtensor(gradient) != is_dtensor(parameter) or gradient.shape != parameter.shape:
        return f"has a gradient of another kind: shape {tuple(gradient.shape)}, and the parameter's is {tuple(parameter.shape)}"
    if gradient.device != parameter.device:
        return f"is on {parameter.device}, and its gradient on {gradient.device}"
    return None


class LaidOut:
    """Named parameters as they were when a layout was made of them. Holds no value.

    Of a parameter that `fully_shard` dealt out, this rank's rows are looked at.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raises `ValueError` if two of them share memory."""
        self._names = [name for name, _ in named]
        self._parameters = [tensor for _, tensor in named]
        self._kinds = [_kind(parameter) for parameter in self._parameters]
        self._places = [_local(parameter).data_ptr() for parameter in self._parameters]
        self._check_memory()

    def check_parameters(self) -> None:
        """Raises `ParameterChanged` with the parameter's name if one is no longer what was laid out."""
        for at, (parameter, was) in enumerate(zip(self._parameters, self._kinds, strict=True)):
            if _kind(parameter) != was:
                raise ParameterChanged(f"parameter {self._names[at]} {_change(parameter, was)}")
        places = [_local(parameter).data_ptr() for parameter in self._parameters]
        if places != self._places:
            self._check_memory()
            self._places = places

    def check_gradients(self) -> None:
        """Raises `ParameterChanged` with the parameter's name if a gradient cannot be taken."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is not None and (fault := gradient_fault_of(parameter)):
                raise ParameterChanged(f"parameter {name} {fault}")

    @property
    def places(self) -> list[int]:
        """The addresses at the last check."""
        return list(self._places)

    def _check_memory(self) -> None:
        """Two names for one memory would move it twice."""
        spans = sorted(
            (local.data_ptr(), local.data_ptr() + local.numel() * local.element_size(), name)
            for name, local in zip(self._names, map(_local, self._parameters), strict=True)
            if local.numel()
        )
        for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                raise ValueError(
                    f"parameters {name} and {other} share memory, and would be moved twice: tie them as one parameter, "
                    f"module.weight = other.weight, or give one of them memory of its own"
                )


def _local(parameter: Tensor) -> Tensor:
    """The memory of a parameter: a DTensor's own rows without the call that autograd records."""
    own: Any = parameter
    local: Tensor = own._local_tensor if is_dtensor(parameter) else parameter
    return local


def _kind(parameter: Tensor) -> Kind:
    local = _local(parameter)
    return local.dtype, local.device, local.shape, local.stride(), parameter.requires_grad


def _change(parameter: Tensor, was: Kind) -> str:
    """What happened to a parameter after it was laid out, and what to do."""
    after = "after the optimizer was made"
    local = _local(parameter)
    if local.device != was[1]:
        return f"was moved from {was[1]} to {local.device} {after}: move the model first, then make the optimizer"
    if local.shape != was[2]:
        return f"had shape {tuple(was[2])}, and has {tuple(local.shape)} now: make a new optimizer of the changed model"
    if fault := fault_of(local):
        return f"{fault} (it was changed {after})"
    if not parameter.requires_grad:
        return (
            f"was frozen {after} (requires_grad is False), and its momentum would go on moving it: make a new optimizer of "
            "the parameters that are trained"
        )
    return f"had strides {was[3]}, and has {local.stride()} now: make a new optimizer of the changed model"
