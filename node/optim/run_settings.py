"""The settings of optimizers have one definition, `[optimizer]` of run.toml: defaults, choices and bounds (`protos`).

The optimizers' own configurations take them from here, and say only where they differ. Refuses what run.toml refuses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from protos.example import allowed
from protos.optimizer_config import BaseOptimizerConfig, LocalStepsConfig, OptimizerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RUN = OptimizerConfig.model_construct()
"""The defaults of a file that sets nothing, before a method or a recipe adds its own."""
BASE = BaseOptimizerConfig.model_construct()
LOCAL = LocalStepsConfig.model_construct()


def check(config: DataclassInstance, section: BaseModel, but: Collection[str] = ()) -> None:
    """Raises `ValueError` for a value that run.toml would refuse, of a setting that `config` and the section have. None is no
    value where the configuration may have none; the keys of `but` mean something else in it. Numbers become Python's own."""
    own = {it.name: str(it.type) for it in fields(config)}
    for key, field in type(section).model_fields.items():
        if key not in own or key in but:
            continue
        value = plain(getattr(config, key))
        if value is None and "None" in own[key]:
            continue
        try:
            object.__setattr__(config, key, _rule(type(section), key).validate_python(value))
        except ValidationError as error:
            raise ValueError(f"{key} = {value!r}: expected is {allowed(field)}") from error


def plain(value: Any) -> Any:
    """A number of numpy or torch, as a sweep or a scheduler may give it, as Python's own; else the value itself."""
    item = getattr(value, "item", None)
    try:
        return item() if callable(item) else value
    except (ValueError, RuntimeError):  # several numbers
        return value


@cache
def _rule(section: type[BaseModel], key: str) -> TypeAdapter[Any]:
    field = section.model_fields[key]
    kind: Any = Annotated[field.annotation, *field.metadata, key]
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False, strict=True))
