"""Changes to a parent run's settings, as the operator of a fork writes them: a TOML file, or KEY=VALUE. Pure but for that file.

Refuses changes that the state of the parent run does not fit: another model, other data, or another base optimizer.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protos import toml_file
from protos.errors import OperatorError
from protos.run_config import RunConfig

SETTING = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(.*)", re.DOTALL)
KEPT: Mapping[str, str] = {
    "model": "the snapshot holds the parameters of this model",
    "data": "the fork goes on in the order of the parent run's samples",
    "clock.digest_steps": "the starting state has a digest by this rule",
    "optimizer.method": "the snapshot holds the state of this method",
    "optimizer.chunk": "the method's chunks belong to the layout of the state",
    "optimizer.base.name": "the snapshot holds the state of this base optimizer",
}
"""Settings that a fork has from its parent run, each with the reason."""
BUFFERS: Mapping[str, str] = {"momentum": "sgd, muon", "beta1": "adamw", "block": "muon"}
"""Settings of `optimizer.base` that change the buffers of the replicated state unless 0, and the bases that have them."""


def changes_of(arguments: Iterable[str]) -> dict[str, Any]:
    """The settings that the arguments name, as nested tables; a later argument takes precedence. OperatorError."""
    found: dict[str, Any] = {}
    for argument in arguments:
        match = SETTING.fullmatch(argument)
        found = merged(found, _file(Path(argument)) if match is None else _nested(match[1], _value(match[2])))
    return found


def _file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding=toml_file.WRITTEN))
    except OSError as error:
        raise OperatorError(
            f"{path}: is neither a file that can be read ({error.strerror}) nor a setting such as optimizer.lr=0.001"
        ) from error
    except ValueError as error:
        raise OperatorError(f"{path}: is not TOML: {error}") from error


def _value(text: str) -> Any:
    """A TOML value; a word without quotes is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; any other value takes the place of the one before."""
    result = dict(settings)
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def forked(parent: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The settings of a fork. OperatorError for a wrong value, and for one that the parent run's state does not fit."""
    values = merged(parent.model_dump(mode="json"), changes)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise OperatorError(toml_file.describe(error)) from error
    for key, why in KEPT.items():
        was, now = _at(parent, key), _at(config, key)
        if was != now:
            raise OperatorError(f"{key}: a fork keeps this setting of its parent run ({_shown(was)}), because {why}")
    for key, bases in BUFFERS.items():
        was, now = _at(parent, f"optimizer.base.{key}"), _at(config, f"optimizer.base.{key}")
        if bool(was) != bool(now) and parent.optimizer.base.name in bases.split(", "):
            raise OperatorError(
                f"optimizer.base.{key}: a fork may change this setting of its parent run ({was}), but not from or to 0, "
                "because the snapshot holds a buffer for it, or holds none"
            )
    return config


def _at(config: RunConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any) -> str:
    return "its own table" if hasattr(value, "model_dump") else str(value)
