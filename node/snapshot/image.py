"""The safetensors file of tensors as they are now. A thread reads it while the tensors change: they are copied on write.

One thread reads the file from its first byte to its last. The thread that owns the tensors calls `detach` before it changes
them. `detach` copies the bytes that are not read yet. A peer that computes for longer than its disk writes makes no copy.
Refuses a second reading, and tensors of types that DTYPES does not name.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.sharded.spread import Pieces, whole

DTYPES: Final = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""The names of the file format: https://huggingface.co/docs/safetensors, "Format"."""
LENGTH_BYTES: Final = 8
TILE_BYTES: Final = 8 << 20
Bytes = npt.NDArray[np.uint8]


def unique(state: Mapping[str, Tensor | Pieces]) -> dict[str, Tensor | Pieces]:
    """The state with tied tensors once, under their first name."""
    seen: set[tuple[Any, ...]] = set()
    found: dict[str, Tensor | Pieces] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            if place in seen:
                continue
            seen.add(place)
        found[name] = tensor
    return found


def header(state: Mapping[str, Tensor | Pieces], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[str]]:
    """The first bytes of the file, and the names in the order of their tensors, as `safetensors.save` writes them."""
    order = sorted(state, key=lambda name: (-state[name].dtype.itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = state[name]
        size = tensor.numel() * tensor.dtype.itemsize
        shape = list(tensor.shape)
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, order


class Spare:
    """The memory of the last copy, for the next one: at most one copy's. New memory costs a page fault for each page, and on
    a virtual machine ten times the copy itself (ADR 30)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Bytes = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> Bytes:
        """`size` bytes of memory with any content. It is the caller's until `give`."""
        with self._lock:
            kept, self._kept = self._kept, np.empty(0, dtype=np.uint8)
        return kept if len(kept) >= size else np.empty(size, dtype=np.uint8)  # in huge pages, if the system has some

    def give(self, memory: Bytes) -> None:
        """The caller needs the memory no more."""
        with self._lock:
            if len(memory) > len(self._kept):
                self._kept = memory


class Image:
    """See the module. `live`: whether the tensors will change. The parts of a peer's other ranks are copied at once."""

    def __init__(
        self,
        state: Mapping[str, Tensor | Pieces],
        metadata: Mapping[str, str] | None = None,
        *,
        live: bool = True,
        spare: Spare | None = None,
    ) -> None:
        once = unique(state)
        head, order = header(once, metadata)
        self._lock = threading.Lock()
        self._starts: list[int] = [0]
        self._parts: list[Tensor] = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
        self._live = live
        at = len(head)
        for name in order:
            flat = _flat(whole(once[name]))
            if flat.numel():
                self._starts.append(at)
                self._parts.append(flat)
                at += flat.numel()
        self.total_bytes = at
        self._read = 0
        self._copied = 0
        self._rest: tuple[int, Bytes] | None = None
        self._spare = spare or Spare()

    @property
    def detached(self) -> bool:
        """Whether the image needs the tensors no more."""
        return not self._live or not self._parts or self._read == self.total_bytes

    @property
    def waiting_bytes(self) -> int:
        """The bytes that the reader has not read yet."""
        return self.total_bytes - self._read

    def detach(self) -> None:
        """The tensors may change when this returns. The thread that changes them calls it, and one that copies ahead of that
        thread: the two share the work, a tile at a time."""
        while not self.detached:
            with self._lock:
                self._copy_tile()

    def _copy_tile(self) -> None:
        if not self._parts:
            return
        if self._rest is None:
            self._rest = self._read, self._spare.take(self.total_bytes - self._read)
            self._copied = self._read
        first, rest = self._rest
        tile = rest[self._copied - first : self.total_bytes - first][:TILE_BYTES]
        self._copy(tile, self._copied)
        self._copied += len(tile)
        if self._copied == self.total_bytes:
            self._parts, self._starts = [], []

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        """The file, once, in pieces of `piece_bytes`; the last may be shorter."""
        assert piece_bytes > 0
        assert self._read == 0, "an image is read once"
        while self._read < self.total_bytes:
            piece = np.empty(min(piece_bytes, self.total_bytes - self._read), dtype=np.uint8)
            with self._lock:
                last = self._read + len(piece)
                if self._rest is None:
                    self._copy(piece, self._read)
                else:
                    while self._copied < last:
                        self._copy_tile()
                    first, rest = self._rest
                    piece[:] = rest[self._read - first : last - first]
                self._read = last
            yield piece.data  # type: ignore[misc]
        with self._lock:
            copied, self._rest = self._rest, None
            self._parts = []
        if copied is not None:
            self._spare.give(copied[1])

    def _copy(self, out: Bytes, first: int) -> None:
        """The bytes of the file from `first` on, as many as `out` has."""
        done, part = 0, bisect_right(self._starts, first) - 1
        while done < len(out):
            source, skip = self._parts[part], first + done - self._starts[part]
            some = source[skip : skip + len(out) - done]
            out[done : done + len(some)] = some.cpu().numpy()
            done += len(some)
            part += 1


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's bytes; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
