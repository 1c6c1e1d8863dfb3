"""Copies between the main memory and a device, by way of pinned memory and on a stream of their own where that is CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from node.model.device import SHORT


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
