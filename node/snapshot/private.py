"""What a peer keeps for itself between two starts: its momentum and its bookkeeping.

Refuses: a file of another run or of another model, a damaged file, code in the file (tensors and plain values load).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from node.snapshot.atomic import write_atomic
from protos.errors import OperatorError

FORMAT: Final = "swarmentum private state 2"


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


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch closes its archive over the write that failed, and fails once more: what the disk said is what counts
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load_private(path: Path, run_id: bytes, layout_digest: bytes) -> PrivateState | None:
    """The saved state with tensors on the CPU; None without a file. Raises PrivateStateError if it is not ours."""
    hint = "move it away, or give this run another folder"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise PrivateStateError(f"{path} cannot be read as a private state: {error}; {hint}") from error
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
