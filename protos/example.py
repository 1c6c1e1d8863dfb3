"""A commented example of a TOML file, made from the pydantic model that reads it: so the example cannot lag behind the code.

Refuses models whose fields have no docstring: a setting that nobody explains is a defect.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

COLUMNS = 100
COMMON = frozenset({
    "name", "model.config", "data.source", "data.tokenizer", "data.context", "optimizer.lr", "optimizer.group_size",
    "clock.steps", "clock.batch_samples", "clock.deadline_ms_max", "admission.mode", "overlay.bootstrap",
})  # fmt: skip
"""The keys of run.toml that people set. The rest has defaults that fit, or follows from these."""


@dataclass(frozen=True)
class Setting:
    """One key of a file: `default` as TOML, empty if there is none; `allowed` in words."""

    table: str
    key: str
    default: str
    allowed: str
    text: str


def settings_of(model: type[BaseModel], table: str = "", made: BaseModel | None = None) -> Iterator[Setting]:
    """Every key of a model and of the tables in it, in the order of the code; a table's own keys come first.

    `made`: what an empty file, or table, makes. Its values are the defaults, because some follow from others.
    """
    nested = []
    made = model() if made is None and not any(field.is_required() for field in model.model_fields.values()) else made
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            nested.append((f"{table}.{name}".lstrip("."), inner, getattr(made, name, None)))
            continue
        if not field.description:
            raise ValueError(f"{model.__name__}.{name} has no docstring")
        yield Setting(
            table,
            name,
            _default(field, getattr(made, name, None)),
            _allowed(field),
            " ".join(field.description.split()),
        )
    for inner_table, inner, value in nested:
        yield from settings_of(inner, inner_table, value)


def example(model: type[BaseModel], only: Container[str] | None = None) -> str:
    """The file: each key (of `only`, such as "clock.steps") is commented out and has its default, below what it does."""
    lines, table = [], ""
    for setting in settings_of(model):
        if only is not None and f"{setting.table}.{setting.key}".lstrip(".") not in only:
            continue
        if setting.table != table:
            table = setting.table
            lines += [f"[{table}]"]
        lines += textwrap.wrap(setting.text, COLUMNS, initial_indent="# ", subsequent_indent="# ")
        lines += [f"# {setting.key} = {setting.default or '...'}", ""]
    return "\n".join(lines)


def _default(field: FieldInfo, made: Any) -> str:
    value = field.get_default(call_default_factory=True) if made is None else made
    if value is None or value is PydanticUndefined:
        return ""
    if value == {}:
        return "{}"
    return json.dumps(value)  # of numbers, texts, truth values and lists, JSON is TOML


def _allowed(field: FieldInfo) -> str:
    """Bounds and choices, as people read them."""
    choices = [json.dumps(choice) for choice in get_args(field.annotation) if isinstance(choice, str | int)]
    bounds: list[str] = []
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "max_length": "at most"}
    for constraint in field.metadata:
        for name, word in words.items():
            bound: Any = getattr(constraint, name, None)
            if bound is not None:
                bounds.append(f"{word} {bound:,}{' long' if name == 'max_length' else ''}")
    return " or ".join(choices) if choices else ", ".join(bounds)
