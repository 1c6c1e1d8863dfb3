"""A run as bytes, and back: the journal keeps such checkpoints, so that a restart need not fold all records.

A checkpoint has every field of `Run` but those that the genesis gives. Refuses a run with an open step, bytes of another
version, and bytes that are not a run. The coordinator skips a refused checkpoint, and reads the records instead. ADR 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from coordinator.clock.state import Phase, Run, changed_settings
from protos.changes import with_settings
from protos.errors import Refusal

CHECKPOINT_EVERY = 250
"""Entries between two checkpoints: at most so many steps are folded after a restart. With 64 peers a step takes 0.85 ms to
fold and a checkpoint 3.3 ms to make (`python -m tests.bench restart`). This is 0.2 s a restart, and 1.5 % of a step's own
cost."""
VERSION = 3
"""The version grows when the fold of the same records gives another `Run`; tests/unit/coordinator/test_checkpoint.py checks."""
_OF_GENESIS = ("run_id", "config", "defined")
_COMPUTED = ("electors",)
"""Fields that follow from others."""
_NAMES_IN_FILE = {"checks": "audits"}
"""Fields of `Run` that have another name in a checkpoint, from before they were renamed."""


class UnfitError(ValueError):
    """A run cannot continue from this checkpoint."""


def is_due(run: Run, kept_step: int) -> bool:
    """Whether the run is to be kept now; `kept_step`: of the last checkpoint.

    Not while it is paused: a version that does not know pauses must meet the record of it, and leave the run out.
    """
    return run.phase is Phase.WAITING and not run.is_paused and run.head_step >= kept_step + CHECKPOINT_EVERY


def dump(run: Run) -> bytes:
    """A run between two steps, as canonical JSON. Two runs that are equal give the same bytes."""
    assert run.step is None, "a checkpoint is made between two steps"
    values = _runs().dump_python(run, exclude={*_OF_GENESIS, *_COMPUTED})
    fields = {_NAMES_IN_FILE.get(name, name): value for name, value in values.items()}
    return json.dumps({"version": VERSION, "run": _tagged(fields)}, sort_keys=True, separators=(",", ":")).encode()


def load(fresh: Run, body: bytes) -> Run:
    """The run that `dump` wrote; `fresh`: the same run before anything happened. UnfitError."""
    try:
        found = json.loads(body)
        version = found["version"]
        if version != VERSION:
            raise UnfitError(f"it has version {version}, and this program writes {VERSION}")
        fields = _plain(found["run"])
        fields |= {name: fields.pop(in_file) for name, in_file in _NAMES_IN_FILE.items()}
        run = _runs().validate_python({**fields, "run_id": fresh.run_id, "config": fresh.config})
        settings = changed_settings(run.changes)
        config = with_settings(fresh.config, settings) if settings else fresh.config
    except (Refusal, ValidationError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UnfitError(str(error) or repr(error)) from error
    return replace(run, config=config, defined=fresh.config)


@cache
def _runs() -> TypeAdapter[Run]:
    return TypeAdapter(Run)


def _tagged(value: Any) -> Any:
    """JSON has neither bytes nor mappings with other keys than text; a mapping's order is a part of it."""
    match value:
        case bytes():
            return {"bytes": value.hex()}
        case Enum():
            return value.value
        case Mapping():
            return {"map": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
        case frozenset() | set():
            return sorted((_tagged(item) for item in value), key=repr)
        case tuple() | list():
            return [_tagged(item) for item in value]
        case _:
            return value


def _plain(value: Any) -> Any:
    match value:
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"map": pairs}:
            return {_plain(key): _plain(item) for key, item in pairs}
        case list():
            return tuple(_plain(item) for item in value)
        case _:
            return value
