"""The settings of a running peer as they are now, and the file in the home that keeps what `swarmentum set` changed. ADR 35.

One rule: a value that `set` changed wins over flags, environment and swarmentum.toml, also after a restart, until
`swarmentum set KEY default` forgets it. Refuses a value that the machine does not take, before it is kept.
"""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel

from node.donor.owner_settings import DEFAULT, GONE, KEYS, LiveSettings, expected, live_part, meaning, with_value
from protos import toml_file
from protos.disk import write_bytes
from protos.errors import OperatorError
from protos.toml_file import OFF

KEPT_FILE = "set.toml"
HEADING = """\
# `swarmentum set` writes this file. Its values win over flags, environment and swarmentum.toml.
# `swarmentum set KEY default` takes a line away again.
"""

Applies = Callable[[Any], str]
"""Applies a new value at once. Returns what the owner should know, or nothing. ValueError: the machine does not take it."""


class Live:
    """Of the peer with this home. The values are one frozen object, swapped whole: a reader needs no lock.

    `start`: the settings without the file. `applies`: what a new value needs at once. `fixed`: why a setting of this peer
    cannot change while it runs.
    """

    def __init__(
        self,
        home: Path,
        start: BaseModel,
        applies: Mapping[str, Applies] | None = None,
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self._path, self._start = home / KEPT_FILE, live_part(start)
        self._applies, self._fixed = dict(applies or {}), dict(fixed or {})
        self._lock = threading.Lock()
        self.changed = threading.Event()
        self._kept = _read(self._path)
        self.values = _over(self._start, self._kept, self._path)

    def apply(self) -> list[str]:
        """Apply the values of the start. Returns what the owner should know. OperatorError: the machine does not take one."""
        notes = []
        for key, apply in self._applies.items():
            value = getattr(self.values, key)
            if value is not None:
                try:
                    notes.append(apply(value))
                except ValueError as error:
                    raise OperatorError(f"{key} = {shown(value)}: {error}") from error
        return [note for note in notes if note]

    def overruled(self) -> list[str]:
        """For the log of the start: what the file says otherwise than flags, environment and swarmentum.toml."""
        return [
            f"{key} is {shown(getattr(self.values, key))}, as `swarmentum set` kept it in {self._path}"
            for key in self._kept
            if getattr(self.values, key) != getattr(self._start, key)
        ]

    def change(self, key: str, text: str) -> tuple[dict[str, Any], str]:
        """Change a setting, and keep it. Returns its row, and what the owner should know. ValueError: a wrong value."""
        if key in self._fixed:
            raise ValueError(f"{key}: {self._fixed[key]}")
        with self._lock:
            kept = {name: value for name, value in self._kept.items() if name != key}
            given = getattr(self._start, key, None) if text.strip().lower() == DEFAULT else text
            values = with_value(self.values, key, given)
            value = getattr(values, key)
            if given is text:
                kept[key] = OFF if value is None else value
            try:
                note = self._applies[key](value) if key in self._applies else ""
            except ValueError as error:
                raise ValueError(f"{key} = {shown(value)}: {error}") from error
            write_bytes(self._path, _written(kept))
            self._kept, self.values = kept, values
        self.changed.set()
        return self.row(key), note

    def row(self, key: str) -> dict[str, Any]:
        """A setting for people and programs."""
        value = getattr(self.values, key)
        return {
            "key": key,
            "value": value,
            "shown": shown(value),
            "kept": key in self._kept,
            "expected": expected(key),
            "meaning": meaning(key),
        }

    def rows(self) -> list[dict[str, Any]]:
        """All of them."""
        return [self.row(key) for key in KEYS]


def shown(value: object) -> str:
    """A value as `set` takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return OFF if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _read(path: Path) -> dict[str, Any]:
    """OperatorError if the file cannot be read."""
    try:
        kept = tomllib.loads(path.read_text(encoding=toml_file.WRITTEN))
        for key in sorted(GONE.keys() & kept.keys()):
            del kept[key]
            structlog.get_logger("peer").info(
                f"{path}: {key} is no setting any more, and is left out: {GONE[key]}", step="-"
            )
        return kept
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise OperatorError(f"{path}: cannot be read: {error}; correct the file, or remove it") from error


def _over(start: LiveSettings, kept: Mapping[str, Any], path: Path) -> LiveSettings:
    """OperatorError with the line of a wrong value."""
    values = start
    for key, given in kept.items():
        try:
            values = with_value(values, key, given)
        except ValueError as error:
            line = toml_file.line_of(path.read_text(encoding=toml_file.WRITTEN), (key,))
            raise OperatorError(f"{path}:{line}: {error}; correct the line, or remove it") from error
    return values


def _written(kept: Mapping[str, Any]) -> bytes:
    """TOML: text as JSON writes it, other values as they are."""
    return (
        HEADING + "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in sorted(kept.items()))
    ).encode()
