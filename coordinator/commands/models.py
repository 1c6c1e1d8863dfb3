"""The model that a new run begins with, as `swarmentum start-from` described it: `run create --from`. ADR 5.

The coordinator has no torch and never sees a weight. Peers check the state by the root that the genesis names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from protos.errors import OperatorError, Refusal
from protos.limits import HASH_BYTES
from protos.start import StartingState, start_from_values

FILE_BYTES_MAX = 1 << 16


@dataclass(frozen=True)
class ModelStart:
    """The starting state, and the layout of its parameters."""

    start: StartingState
    layout_digest: bytes
    parameters: int


def model_start(file: Path, layout_digest: bytes) -> ModelStart:
    """Read start.json. `layout_digest`: of run.toml's model if it is known here, else empty. OperatorError."""
    if not file.is_file():
        raise OperatorError(
            f"--from {file}: no such file. Where the model and swarmentum[node] are, run `swarmentum start-from "
            "RUN_TOML MODEL`; it writes start.json, which this command takes"
        )
    try:
        values = json.loads(file.read_bytes()[:FILE_BYTES_MAX])
        found = ModelStart(start_from_values(values), bytes.fromhex(values["layout_digest"]), int(values["parameters"]))
    except (Refusal, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise OperatorError(f"--from {file}: is no start.json of `swarmentum start-from`: {error}") from error
    if len(found.layout_digest) != HASH_BYTES or found.parameters <= 0:
        raise OperatorError(f"--from {file}: states no parameter layout; run `swarmentum start-from` again")
    if layout_digest and layout_digest != found.layout_digest:
        raise OperatorError(
            f"--from {file}: the model has another parameter layout than run.toml's; run `swarmentum start-from` again"
        )
    return found
