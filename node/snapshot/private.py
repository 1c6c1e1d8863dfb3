"""The private state that a peer keeps between two starts: its momentum and its bookkeeping.

The file is a safetensors file behind a line that names the format and the sha256 of the rest. Values that are no tensors are
JSON in its metadata. Refuses: a file of another run or of another model, a damaged file, a file of another version. There is
no code in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from torch import Tensor

from node.snapshot.image import DTYPES, LENGTH_BYTES, Image, Spare
from protos.disk import write_atomic, write_synced
from protos.errors import OperatorError

FORMAT: Final = "swarmentum private state 4"
MAGIC: Final = f"{FORMAT}\n".encode()
ALIGNED_BYTES: Final = 64
"""The tensors begin at a multiple of this, so fp64 may lie there: before them are 27 bytes of name, 32 of sha256, and zeros."""
HEAD_BYTES: Final = ALIGNED_BYTES
BLOCK_BYTES: Final = 1 << 20
METADATA: Final = "state"
TYPES: Final = {name: dtype for dtype, name in DTYPES.items()}
# The errors of a file that has a right hash but holds no private state.
UNREADABLE: Final = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


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


def image_of(state: PrivateState, *, live: bool = True, spare: Spare | None = None) -> Image:
    """The file's content, without its head; the tensors may change after `Image.detach`."""
    tensors: dict[str, Tensor] = {}
    content = {
        "run_id": state.run_id.hex(),
        "layout_digest": state.layout_digest.hex(),
        "step": state.step,
        "optimizer": _plain(state.optimizer, tensors),
        "bookkeeping": state.bookkeeping,
    }
    return Image(tensors, {METADATA: json.dumps(content)}, live=live, spare=spare)


def write_private(pieces: Callable[[int], Iterator[bytes]], path: Path) -> None:
    """Replace the file by the content of an `image_of`: `pieces(bytes of one)` gives it. A kill at any point leaves the old or
    the new file. Raises DiskError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, path.with_name(f".{path.name}.new"), lambda file: _write(pieces, file))


def save_private(state: PrivateState, path: Path) -> None:
    """`write_private` at once."""
    write_private(image_of(state).pieces, path)


def _write(pieces: Callable[[int], Iterator[bytes]], file: BinaryIO) -> None:
    file.write(bytes(HEAD_BYTES))
    sha256 = hashlib.sha256()
    for block in write_synced(file, pieces(BLOCK_BYTES)):
        sha256.update(block)
    file.seek(0)
    file.write(_head(sha256.digest()))


def _head(sha256: bytes) -> bytes:
    return (MAGIC + sha256).ljust(HEAD_BYTES, b"\0")


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON. A tensor goes into `tensors`, and the JSON has its name. Keys may be numbers, and tuples stay tuples."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"map": [[key, _plain(inner, tensors)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(inner, tensors) for inner in value]}
    if isinstance(value, list):
        return [_plain(inner, tensors) for inner in value]
    assert value is None or isinstance(value, bool | int | float | str), f"{type(value)} is no plain value"
    return value


def _rich(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Inverse of `_plain`."""
    if isinstance(value, list):
        return [_rich(inner, tensor) for inner in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor(value["tensor"])
    if "tuple" in value:
        return tuple(_rich(inner, tensor) for inner in value["tuple"])
    return {key: _rich(inner, tensor) for key, inner in value["map"]}


def _check(path: Path) -> None:
    """Check that the file has every byte as written. Raises FileNotFoundError, OSError or PrivateStateError."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        if not head.startswith(MAGIC):
            raise PrivateStateError(
                f"{path} is damaged, or of another version: the file does not begin with {FORMAT!r}"
            )
        sha256 = hashlib.sha256()
        while block := file.read(BLOCK_BYTES):
            sha256.update(block)
    if head != _head(sha256.digest()):
        raise PrivateStateError(f"{path} is damaged: its content does not have the sha256 that it was written with")


def _read(path: Path) -> tuple[dict[str, Any], Callable[[str], Tensor]]:
    """The metadata, and the tensors by name. The tensors are parts of the file, which is mapped and not read."""
    _check(path)
    data = np.memmap(path, dtype=np.uint8, mode="c", offset=0)
    start = HEAD_BYTES + LENGTH_BYTES
    length = int.from_bytes(data[HEAD_BYTES:start].tobytes(), "little")
    entries = json.loads(data[start : start + length].tobytes())
    first = start + length

    def tensor(name: str) -> Tensor:
        entry = entries[name]
        low, high = entry["data_offsets"]
        flat = torch.from_numpy(data[first + low : first + high])
        return flat.view(TYPES[entry["dtype"]]).view(entry["shape"])

    return json.loads(entries["__metadata__"][METADATA]), tensor


def load_private(path: Path, run_id: bytes, layout_digest: bytes) -> PrivateState | None:
    """The saved state with tensors on the CPU, mapped from the file; None without a file.

    Raises PrivateStateError if the file is damaged, or of another run or model.
    """
    hint = "move it away, or give this run another folder"
    try:
        content, tensor = _read(path)
        state = PrivateState(
            bytes.fromhex(content["run_id"]),
            bytes.fromhex(content["layout_digest"]),
            int(content["step"]),
            _rich(content["optimizer"], tensor),
            dict(content["bookkeeping"]),
        )
    except FileNotFoundError:
        return None
    except PrivateStateError:
        raise
    except UNREADABLE as error:
        raise PrivateStateError(f"{path} cannot be read as a private state: {error!r}; {hint}") from error
    if state.run_id != run_id:
        raise PrivateStateError(f"{path} belongs to run {state.run_id.hex()[:16]}, not {run_id.hex()[:16]}; {hint}")
    if state.layout_digest != layout_digest:
        raise PrivateStateError(
            f"{path} belongs to layout {state.layout_digest.hex()[:16]}, and the model has {layout_digest.hex()[:16]}: "
            f"its parameters have other names or shapes; {hint}"
        )
    return state
