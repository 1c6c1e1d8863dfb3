"""A commented example of a TOML file, made from the pydantic model that reads it: so the example cannot lag behind the code.

Refuses models whose fields have no docstring: a setting that nobody explains is a defect.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from protos.disk import with_tilde
from protos.mistakes import expected

COLUMNS = 100
NOUNS = {int: "a whole number", float: "a number"}
COMMON = frozenset({
    "name", "model.config", "data.source", "data.tokenizer", "data.context", "optimizer.lr", "optimizer.group_size",
    "clock.steps", "clock.batch_samples", "clock.deadline_ms_max", "admission.mode", "overlay.bootstrap",
})  # fmt: skip
"""The keys of run.toml that people set. The rest has defaults that fit, or follows from these."""
FILLED_IN = frozenset({"clock.ranges", "model.reference", "trust.anchored"})
"""Keys that `run create` writes into a run's definition. They are no settings of a person."""
MEASURED = (
    "clock.quorum", "clock.deadline_mad_factor", "clock.deadline_ms_min", "clock.digest_steps",
    "trust.checkers", "trust.check_samples", "trust.agreement_min", "trust.overlap_max", "trust.exclude_at",
)  # fmt: skip
"""Constants that were measured. A run's definition records them, a file may have them, and no list shows them."""
COMPARED = tuple(f"optimizer.{key}" for key in (
    "chunk", "nesterov", "transform", "magnitudes", "refused", "local.beta1", "local.beta2", "local.weight_decay",
    "base.momentum", "base.nesterov", "base.beta1", "base.beta2", "base.eps", "base.output",
))  # fmt: skip
"""Parts of methods that a paper or a recipe fixes, or that lost a comparison: docs/optimizers.md has them, and no list."""


@dataclass(frozen=True)
class Setting:
    """One key of a file: `default` as TOML, empty if there is none; `allowed` in words."""

    table: str
    key: str
    default: str
    allowed: str
    text: str

    def commented(self) -> str:
        """Lines of a file: the key with its default, commented out, below what it does."""
        values = f" Values: {self.allowed}." if self.allowed else ""
        words = textwrap.wrap(f"{self.text}{values}", COLUMNS, initial_indent="# ", subsequent_indent="# ")
        return "\n".join([*words, f"# {self.key} = {self.default or '...'}", ""])


def settings_of(
    model: type[BaseModel], table: str = "", made: BaseModel | None = None, none: str = ""
) -> Iterator[Setting]:
    """Every key of a model and of the tables in it, in the order of the code; a table's own keys come first.

    `made`: what an empty file, or table, makes. Its values are the defaults, because some follow from others. `none`: as
    `allowed` has it.
    """
    nested = []
    made = model() if made is None and not any(field.is_required() for field in model.model_fields.values()) else made
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            nested.append((f"{table}.{name}".lstrip("."), inner, getattr(made, name, None)))
            continue
        if f"{table}.{name}" in (*FILLED_IN, *MEASURED, *COMPARED):
            continue
        if not field.description:
            raise ValueError(f"{model.__name__}.{name} has no docstring")
        yield Setting(
            table,
            name,
            _default(field, getattr(made, name, None)),
            allowed(field, none),
            " ".join(field.description.split()),
        )
    for inner_table, inner, value in nested:
        yield from settings_of(inner, inner_table, value, none)


def example(model: type[BaseModel], only: Container[str] | None = None) -> str:
    """The file: each key (of `only`, such as "clock.steps") is commented out and has its default, below what it does."""
    lines, table = [], ""
    for setting in settings_of(model):
        if only is not None and f"{setting.table}.{setting.key}".lstrip(".") not in only:
            continue
        if setting.table != table:
            table = setting.table
            lines += [f"[{table}]"]
        lines.append(setting.commented())
    return "\n".join(lines)


def allowed(field: FieldInfo, none: str = "") -> str:
    """The values that a field takes, as people read them: choices, or a range. A field's title is its unit, or the whole text.

    `none`: the word for no value, if a field may have none.
    """
    inner = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    optional = NoneType in get_args(field.annotation)
    found = _kind(inner[0] if optional else field.annotation, field)
    return f"{found}, or {none}" if found and optional and none else found


def _kind(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is Literal:
        return f"any of {', '.join(get_args(get_args(kind)[0]))}; commas between them"
    if get_origin(kind) is Literal:
        return _either([json.dumps(choice) for choice in get_args(kind)])
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return f"{field.title or NOUNS[kind]}{_range(field)}"
    if pattern := next((it.pattern for it in field.metadata if getattr(it, "pattern", None)), None):
        return expected(str(pattern)).removeprefix("expected ")
    longest = next((it.max_length for it in field.metadata if getattr(it, "max_length", None)), None)
    return field.title or (f"at most {longest:,} long" if longest else "")


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _range(field: FieldInfo) -> str:
    """Words to go behind a noun: between 1 and 19 is ` from 1 to 19`."""
    words = {"ge": "of at least", "gt": "above", "le": "up to", "lt": "below"}
    bounds: dict[str, str] = {}
    for constraint in field.metadata:
        for name in words:
            if (bound := getattr(constraint, name, None)) is not None:
                bounds[name] = f"{bound:,}"
    if {"ge", "le"} <= bounds.keys():
        return f" from {bounds['ge']} to {bounds['le']}"
    return "".join(f"{',' if number else ''} {words[name]} {bounds[name]}" for number, name in enumerate(bounds))


def _default(field: FieldInfo, made: Any) -> str:
    value = field.get_default(call_default_factory=True) if made is None else made
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, Path):
        return json.dumps(with_tilde(str(value)))
    if value == {}:
        return "{}"
    return json.dumps(value)  # of numbers, texts, truth values and lists, JSON is TOML
