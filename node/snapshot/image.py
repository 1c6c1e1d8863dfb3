"""The safetensors file of tensors as they are now. A thread reads it while the tensors change: they are copied on write.

One thread reads the file from its first byte to its last. The thread that owns the tensors calls `detach` before it changes
them. `detach` copies the bytes that are not read yet. A peer that computes for longer than its disk writes makes no copy.
Refuses a second reading, and tensors of types that DTYPES does not name.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.optim.spread import Pieces, whole
from protos.disk import PLAIN_MODE, remove_left, writing

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
DISK_TILE_BYTES: Final = 1 << 20
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


class Room(Protocol):
    """Where an image keeps its copy."""

    tile_bytes: int
    """As many at a time."""

    def tile(self, at: int, size: int) -> Bytes:
        """Memory for the copy's bytes from `at` on: the caller fills it, and gives it to `keep`."""

    def keep(self, at: int, tile: Bytes) -> None:
        """Keep a tile that was filled. Raises DiskError."""

    def read(self, at: int, out: Bytes) -> None:
        """The copy's bytes from `at` on. Raises DiskError."""

    def become(self, path: Path) -> bool:
        """Make the copy the file `path`, which the caller then keeps. False if the copy is no file, or on another disk."""


class Spare(Protocol):
    """Gives images rooms, and takes them back."""

    def take(self, size: int) -> Room:
        """Room for `size` bytes, with any content. It is the caller's until `give`. Raises DiskError."""

    def give(self, room: Room) -> None:
        """The caller needs the room no more."""


class MemoryRoom:
    """A copy in memory."""

    tile_bytes = TILE_BYTES

    def __init__(self, size: int) -> None:
        self.memory: Bytes = np.empty(size, dtype=np.uint8)  # in huge pages, if the system has some

    def tile(self, at: int, size: int) -> Bytes:
        return self.memory[at : at + size]

    def keep(self, at: int, tile: Bytes) -> None:
        """See `Room`: it is there already."""

    def read(self, at: int, out: Bytes) -> None:
        out[:] = self.memory[at : at + len(out)]

    def become(self, _path: Path) -> bool:
        return False


class SpareMemory:
    """The memory of the last copy, for the next one: at most one copy's. New memory costs a page fault for each page, and on
    a virtual machine ten times the copy itself (ADR 30)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = MemoryRoom(0)

    def take(self, size: int) -> MemoryRoom:
        with self._lock:
            kept, self._kept = self._kept, MemoryRoom(0)
        return kept if len(kept.memory) >= size else MemoryRoom(size)

    def give(self, room: Room) -> None:
        assert isinstance(room, MemoryRoom)
        with self._lock:
            if len(room.memory) > len(self._kept.memory):
                self._kept = room


class DiskRoom:
    """A copy in a file. One that a kill leaves goes when the store opens its folder."""

    tile_bytes = DISK_TILE_BYTES

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / f".copy-{secrets.token_hex()}"
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PLAIN_MODE)
        self.close = weakref.finalize(self, _remove, self._file, self._path)
        """The disk has the room again: now, or when nobody holds this any more."""
        self._tile: Bytes = np.empty(DISK_TILE_BYTES, dtype=np.uint8)

    def tile(self, _at: int, size: int) -> Bytes:
        return self._tile[:size]

    def keep(self, at: int, tile: Bytes) -> None:
        with writing(self._folder):
            done = 0
            while done < len(tile):
                done += os.pwrite(self._file, tile[done:].data, at + done)

    def read(self, at: int, out: Bytes) -> None:
        with writing(self._folder):
            done = 0
            while done < len(out):
                some = os.preadv(self._file, [out[done:].data], at + done)
                assert some, "what is read was kept"
                done += some

    def become(self, path: Path) -> bool:
        with suppress(OSError):
            self._path.replace(path)
            return True
        return False


def _remove(file: int, path: Path) -> None:
    os.close(file)
    remove_left(path)


class SpareDisk:
    """Copies in files of a store's folder: no memory but a tile, and the system's cache, which it takes back when it has to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, _size: int) -> DiskRoom:
        return DiskRoom(self._folder)

    def give(self, room: Room) -> None:
        assert isinstance(room, DiskRoom)
        room.close()


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
        self._rest: tuple[int, Room] | None = None
        self._spare = spare or SpareMemory()

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
        thread: the two share the work, a tile at a time. Raises DiskError."""
        while not self.detached:
            with self._lock:
                self._copy_tile()

    def _copy_tile(self) -> None:
        if not self._parts:
            return
        if self._rest is None:
            self._rest = self._read, self._spare.take(self.total_bytes - self._read)
            self._copied = self._read
        first, room = self._rest
        tile = room.tile(self._copied - first, min(self.total_bytes - self._copied, room.tile_bytes))
        self._copy(tile, self._copied)
        room.keep(self._copied - first, tile)
        self._copied += len(tile)
        if self._copied == self.total_bytes:
            self._parts, self._starts = [], []

    def become(self, path: Path) -> bool:
        """Copy all of it, and make the copy the file `path` if it is a file; `pieces` gives its bytes. Raises DiskError."""
        self.detach()
        return self._rest is not None and self._rest[0] == 0 and self._rest[1].become(path)

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        """The file, once, in pieces of `piece_bytes`; the last may be shorter. Raises DiskError."""
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
                    first, room = self._rest
                    room.read(self._read - first, piece)
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
