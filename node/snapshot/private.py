"""What a peer keeps for itself between two starts: its momentum and its bookkeeping.

Refuses: a file of another run or of another model, a damaged file, a file of an older version, code in the file (tensors and
plain values load). torch itself loads most damaged files as other numbers, so the file begins with a sha256 of the rest.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from node.snapshot.atomic import write_atomic
from protos.errors import OperatorError

FORMAT: Final = "swarmentum private state 3"
MAGIC: Final = f"{FORMAT}\n".encode()
HEAD_BYTES: Final = len(MAGIC) + hashlib.sha256().digest_size
BLOCK_BYTES: Final = 1 << 20
# What torch raises for bytes that it did not write: a zip without its parts, a pickle of something else.
UNREADABLE: Final = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    struct.error,
    pickle.UnpicklingError,
)


class PrivateStateError(OperatorError):
    """The saved private state cannot be used here."""


@dataclass(frozen=True)
class PrivateState:
    """A peer's own state after a step."""

    run_id: bytes
    layout_digest: bytes
    step: int
    optimizer: dict[str, Any]
    """`state_dict` of the optimizer: tensors and plain values."""
    bookkeeping: dict[str, Any] = field(default_factory=dict)
    """Plain values: counters and the like."""


def save_private(state: PrivateState, path: Path) -> None:
    """Replace the file; a kill at any point leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, **vars(state)}
    write_atomic(path, path.with_name(f".{path.name}.new"), lambda file: _save(content, file))


class _Hashing:
    """A file to write to, and the sha256 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


class _After(io.RawIOBase):
    """A file without its first `offset` bytes."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._file, self._offset = file, offset
        file.seek(offset)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._file.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(place + (self._offset if whence == os.SEEK_SET else 0), whence) - self._offset

    def tell(self) -> int:
        return self._file.tell() - self._offset


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    file.write(bytes(HEAD_BYTES))
    hashing = _Hashing(file)
    try:
        torch.save(content, hashing)  # type: ignore[arg-type]
    except RuntimeError as error:
        # torch closes its archive over the write that failed, and fails once more: what the disk said is what counts
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    file.seek(0)
    file.write(MAGIC + hashing.sha256.digest())


def _read(path: Path) -> Any:
    """What was saved. Raises FileNotFoundError, PrivateStateError or one of `UNREADABLE`."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        if not head.startswith(MAGIC):
            raise PrivateStateError(f"{path} is damaged, or of an older version: it does not begin with {FORMAT!r}")
        sha256 = hashlib.sha256()
        while block := file.read(BLOCK_BYTES):
            sha256.update(block)
        if sha256.digest() != head[len(MAGIC) :]:
            raise PrivateStateError(f"{path} is damaged: its content does not have the sha256 that it was written with")
        return torch.load(io.BufferedReader(_After(file, HEAD_BYTES)), map_location="cpu", weights_only=True)


def load_private(path: Path, run_id: bytes, layout_digest: bytes) -> PrivateState | None:
    """The saved state with tensors on the CPU; None without a file. Raises PrivateStateError if it is not ours."""
    hint = "move it away, or give this run another folder"
    try:
        content = _read(path)
    except FileNotFoundError:
        return None
    except PrivateStateError:
        raise
    except UNREADABLE as error:
        raise PrivateStateError(f"{path} cannot be read as a private state: {error!r}; {hint}") from error
    known = {"format", *(entry.name for entry in fields(PrivateState))}
    if not isinstance(content, dict) or set(content) != known or content.pop("format") != FORMAT:
        raise PrivateStateError(f"{path} is not a {FORMAT!r}; {hint}")
    state = PrivateState(**content)
    if state.run_id != run_id:
        raise PrivateStateError(f"{path} belongs to run {state.run_id.hex()[:16]}, not {run_id.hex()[:16]}; {hint}")
    if state.layout_digest != layout_digest:
        raise PrivateStateError(
            f"{path} belongs to layout {state.layout_digest.hex()[:16]}, and the model has {layout_digest.hex()[:16]}: "
            f"its parameters have other names or shapes; {hint}"
        )
    return state
