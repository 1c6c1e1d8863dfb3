"""The settings of a program: flags go before the environment, which goes before its file. An error names the file's line.

pydantic-settings merges these layers before it validates. Earlier names of settings count by the layer that they stand in, so
the layers stay apart here; pydantic validates what they come to.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from protos.errors import OperatorError
from protos.toml_file import WRITTEN, Place, Wrong, describe, line_of

M = TypeVar("M", bound=BaseModel)
OFF: Final = "off"
"""No value, in a file, a variable or a flag: TOML has no word for nothing."""


@dataclass(frozen=True)
class Layers:
    """What a program's file and environment say. `named`: a person chose the file, and it does not just lie here."""

    path: Path
    named: bool
    text: str
    of_file: Mapping[str, Any]
    of_environment: Mapping[str, str]

    def made(
        self, model: type[M], values: Mapping[str, Any], helped: Callable[[Wrong], Wrong] = lambda wrong: wrong
    ) -> M:
        """The settings. The OperatorError names every wrong value; `helped` adds what a caller knows of a mistake."""
        try:
            return model(**values)
        except ValidationError as error:

            def place(loc: Place) -> str:
                return f"{self.path}:{line_of(self.text, loc)}: " if loc and loc[0] in self.of_file else ""

            raise OperatorError(f"wrong settings:\n{describe(error, place, helped)}") from error


def read_layers(prefix: str, file: str, known: Container[str]) -> Layers:
    """The file in the working folder, or that of the variable <prefix>CONFIG, and the variables of `known` settings.

    Raises OperatorError for a file that cannot be read.
    """
    name = os.environ.get(f"{prefix}CONFIG")
    path, text, values = Path(name or file), "", dict[str, Any]()
    if name and not path.is_file():
        raise OperatorError(f"{prefix}CONFIG={path}: no such file; correct the path, or unset the variable")
    try:
        if path.is_file():
            text = path.read_text(encoding=WRITTEN)
            values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path} is not TOML: {error}; correct the file, or move it away") from error
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}; move it away, or make it readable") from error
    variables = {key[len(prefix) :].lower(): it for key, it in os.environ.items() if key.upper().startswith(prefix)}
    return Layers(path, bool(name), text, values, {key: it for key, it in variables.items() if it and key in known})


def listed(value: Any) -> list[str]:
    """The values of a list: a list, a JSON list, or text with commas between them. ValueError for JSON that is none."""
    if value is None or isinstance(value, (list, tuple)):
        return [part for item in value or () for part in listed(item)]
    text = str(value).strip()
    if text.startswith("["):
        try:
            return [str(item) for item in json.loads(text)]
        except ValueError as error:
            raise ValueError(f"is no list: {error}; put commas between the values") from error
    return [] if text.lower() == OFF else [part.strip() for part in text.split(",") if part.strip()]
