"""TOML files that people write, checked against a pydantic model; an error names the line and what was expected."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from protos.errors import OperatorError
from protos.forms import expected

M = TypeVar("M", bound=BaseModel)
LINE_DOTS_MAX: Final = 256
"""The reader of TOML takes quadratic time for a key of many parts: 64 kB of one took 72 s."""
WRONG_SHOWN_MAX: Final = 100
"""The line of each wrong value is looked for in the whole text: 8,000 of them in 64 kB took 93 s."""
GIVEN_CHARACTERS_MAX: Final = 200
_TABLE = re.compile(r"^\[\[?([^\]=]+)\]\]?\s*(#.*)?$")


def load(path: Path, model: type[M]) -> M:
    """Read and validate; OperatorError lists every wrong value (at most WRONG_SHOWN_MAX) with its place in the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OperatorError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    values = _parsed(path, text)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise OperatorError(describe(error, lambda loc: f"{path}:{line_of(text, loc)}: ")) from error


def _parsed(path: Path, text: str) -> dict[str, Any]:
    """The values of a file. The text may come from the operator's page, so its cost is bounded. OperatorError."""
    dots = next((number for number, line in enumerate(text.split("\n"), 1) if line.count(".") > LINE_DOTS_MAX), 0)
    if dots:
        raise OperatorError(
            f"{path}:{dots}: more than {LINE_DOTS_MAX} dots in a line: give each table a line of its own"
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OperatorError(f"{path}:{_syntax_line(str(error))}: is not TOML: {error}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; [[[[ without end
        raise OperatorError(f"{path}: cannot be read as TOML: {str(error).partition(':')[0]}") from error


UNKNOWN = "is not a known setting of this version: correct it, remove it, or upgrade swarmentum"


def describe(error: ValidationError, place: Any = lambda loc: "") -> str:
    """One line a wrong value: place, key, what was wrong, what was given."""
    lines, wrong = [], error.errors()
    for item in wrong[:WRONG_SHOWN_MAX]:
        key = ".".join(str(part) for part in item["loc"]) or "the whole"
        message = _message(item)
        given = "" if item["type"] in ("missing", "value_error") else f" (given: {_cut(item['input'])})"
        lines.append(f"{place(item['loc'])}{key}: {message}{given}")
    if len(wrong) > WRONG_SHOWN_MAX:
        lines.append(f"and {len(wrong) - WRONG_SHOWN_MAX} more")
    return "\n".join(lines)


def _message(item: Any) -> str:
    """What is wrong with a value, in words for a person who knows no pydantic."""
    match item["type"]:
        case "extra_forbidden":
            return UNKNOWN
        case "value_error":
            return str(item["ctx"]["error"])
        case "string_pattern_mismatch":
            return f"expected is {expected(item['ctx']['pattern'])}"
    return str(item["msg"])


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= GIVEN_CHARACTERS_MAX else f"{text[:GIVEN_CHARACTERS_MAX]}..."


def _syntax_line(message: str) -> int:
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else 1


def _numbers_of(loc: tuple[int | str, ...]) -> dict[str, int]:
    """The place in its list that a location names, by the dotted key of the list."""
    found, names = dict[str, int](), list[str]()
    for part in loc:
        if isinstance(part, int):
            found[".".join(names)] = part
        else:
            names.append(part)
    return found


def line_of(text: str, loc: tuple[int | str, ...]) -> int:
    """Best line number (from 1) of a dotted key: its own line, else its table's, else the first."""
    names = [str(part) for part in loc if isinstance(part, str)]
    wanted = _numbers_of(loc)
    seen: dict[str, int] = {}
    best, table, own = 1, "", ".".join(names) + "."
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if header := _TABLE.match(stripped):
            table = ".".join(part.strip().strip("\"'") for part in header[1].split("."))
            if stripped.startswith("[["):
                seen[table] = seen.get(table, -1) + 1
            if table in wanted and wanted[table] != seen.get(table):
                table = "(another table of the list)"
            elif table == ".".join(names[: table.count(".") + 1]) or (
                best == 1 and table in seen and f"{table}.".startswith(own)
            ):
                best = number
            continue
        key = stripped.split("=", 1)[0].strip().strip("\"'") if "=" in stripped else ""
        full = f"{table}.{key}" if table else key
        if key and full in (".".join(names), ".".join(names[: full.count(".") + 1])):
            return number
    return best
