"""Weights and gradients between main memory and a device: `HostTransfer`, and `BlockStream` (`memory = "stream"`), which has
the weights of a model's blocks on a device, one block or two at a time.

A block's weights are there while it computes, in its forward pass and again in the backward pass, which computes the block
again. Autograd keeps them until it needs them no more. Those of the block that comes next are on their way meanwhile: on a CUDA
device by a thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from node.model.device import SHORT
from node.model.size import blocks_with_weights, checkpoint_blocks


class HostTransfer:
    """Numbers between the main memory and a device. A CUDA device copies from and to one pinned buffer, on its own stream."""

    def __init__(self, device: torch.device, numbers: int) -> None:
        """`numbers`: the most at a time."""
        self._buffer, self._stream = None, None
        if device.type == "cuda":
            self._buffer = torch.empty(numbers, dtype=SHORT, pin_memory=True)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def up(self, numbers: Tensor, to: Tensor, made: Any) -> None:
        """Fp32 of the main memory into bf16 on the device, where nothing reads `to` behind the mark `made`."""
        if self._stream is None or self._buffer is None:
            to.copy_(numbers)
            return
        self._stream.wait_event(made)
        with torch.cuda.stream(self._stream):
            part = self._buffer[: to.numel()].view(to.shape)
            to.copy_(part.copy_(numbers), non_blocking=True)
        self._stream.synchronize()  # the buffer is free again, and any stream may read the weights

    def made(self) -> Any:
        """A mark: what the device has been asked for by now is done behind it. None where nothing runs behind."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def down(self, gradient: Tensor, to: Tensor, made: Any) -> Tensor:
        """A gradient on the device, `made` behind its mark, into fp32 of the main memory, which is returned."""
        if self._stream is None or self._buffer is None or gradient.dtype != SHORT:
            return to.copy_(gradient)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            part = self._buffer[: gradient.numel()].view(gradient.shape)
            part.copy_(gradient, non_blocking=True)
        self._stream.synchronize()
        return to.copy_(part)


ALIGNED: Final = 64
"""Numbers: kernels are faster with weights that begin at whole lines of memory."""
Read = Callable[[str], Tensor]
"""A parameter in the main memory, by its name."""


class Fetched(NamedTuple):
    """Weights of a block on the device, once `copying` is done."""

    block: int
    weights: list[Tensor]
    copying: Future[None] | None


class BlockStream:
    """Lends the blocks of one model their weights. Between passes it keeps those of one block (`drop`)."""

    def __init__(self, model: nn.Module, device: torch.device, read: Read, *, behind: bool) -> None:
        """`model`: with parameters on the device, and those of its blocks `absent`. `behind`: a thread copies."""
        blocks = blocks_with_weights(model)
        self._named = [{f"{at}.{name}": own for name, own in block.named_parameters()} for at, block in blocks]
        self._frozen = [
            [(part, name, own) for part in block.modules() for name, own in part._parameters.items() if _is_frozen(own)]
            for _, block in blocks
        ]
        self.names = frozenset(name for named in self._named for name in named)
        self._device, self.read = device, read
        self._transfer = HostTransfer(device, max(own.numel() for named in self._named for own in named.values()))
        self._pool = ThreadPoolExecutor(1, "weights") if behind else None
        self._next: Fetched | None = None
        checkpoint_blocks({index: block for index, (_, block) in enumerate(blocks)}, self.lent)

    def drop(self) -> None:
        """Forget what is on the device: it is old, or another block's."""
        found, self._next = self._next, None
        if found is not None and found.copying is not None and not found.copying.cancel():
            found.copying.exception()  # nothing writes to memory that is free

    @contextmanager
    def lent(self, block: int, direction: int) -> Iterator[None]:
        """The block has its weights within. The next one that computes lies in this direction, or is the same at both ends."""
        found = self._arrived(block)
        following = min(max(block + direction, 0), len(self._named) - 1)
        self._next = found if following == block else self._fetch(following)
        parameters = list(self._named[block].values())
        absent = [own.data for own in parameters]
        try:
            for own, weights in zip(parameters, found.weights, strict=True):
                own.data = weights
            for part, name, own in self._frozen[block]:
                # `checkpoint` keeps what needs no gradient as the object that it is, which is empty in the backward pass
                part._parameters[name] = nn.Parameter(own.data, requires_grad=False)
            yield
        finally:
            for part, name, own in self._frozen[block]:
                part._parameters[name] = own
            for own, nothing in zip(parameters, absent, strict=True):
                own.data = nothing

    def _arrived(self, block: int) -> Fetched:
        if self._next is None or self._next.block != block:
            self.drop()
            self._next = self._fetch(block)
        found, self._next = self._next, None
        if found.copying is not None:
            found.copying.result()
        return found

    def _fetch(self, block: int) -> Fetched:
        named = self._named[block]
        sizes = [-(-own.numel() // ALIGNED) * ALIGNED for own in named.values()]
        parts = zip(torch.split(self._room(sum(sizes)), sizes), named.values(), strict=True)
        weights = [part[: own.numel()].view(own.shape) for part, own in parts]
        made = self._transfer.made()
        if self._pool is None:
            self._copy(list(named), weights, made)
            return Fetched(block, weights, None)
        return Fetched(block, weights, self._pool.submit(self._copy, list(named), weights, made))

    def _room(self, numbers: int) -> Tensor:
        if self._device.type == "cpu":  # the C library's heap would keep holes: 1.3 bytes a parameter of the model
            return torch.frombuffer(mmap.mmap(-1, SHORT.itemsize * numbers), dtype=SHORT)
        return torch.empty(numbers, dtype=SHORT, device=self._device)

    @torch.no_grad()
    def _copy(self, names: list[str], weights: list[Tensor], made: Any) -> None:
        for name, own in zip(names, weights, strict=True):
            self._transfer.up(self.read(name), own, made)


def _is_frozen(own: Tensor | None) -> TypeGuard[nn.Parameter]:
    return own is not None and not own.requires_grad
