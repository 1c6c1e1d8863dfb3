"""TOML files that people write, checked against a pydantic model; an error names the line and what was expected.

`read` finds the mistakes of all layers at once: it leaves wrong settings out, and checks the rest again.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from protos.errors import OperatorError
from protos.mistakes import REMOVED, Mistake, expected, tell_unread

Place = tuple[int | str, ...]
M = TypeVar("M", bound=BaseModel)
WRITTEN: Final = "utf-8-sig"
"""Of text that people write: UTF-8, and editors of Windows put a byte order mark before it."""
LINE_DOTS_MAX: Final = 256
"""The reader of TOML takes quadratic time for a key of many parts: 64 kB of one took 72 s."""
WRONG_SHOWN_MAX: Final = 100
"""The line of each wrong value is looked for in the whole text: 8,000 of them in 64 kB took 93 s."""
GIVEN_CHARACTERS_MAX: Final = 200
NEAR: Final = 0.7
NEAR_SHOWN_MAX: Final = 3
ROUNDS_MAX: Final = 5
"""Checks of what is left of a file: a layer of rules for each, and one more."""
_TABLE = re.compile(r"^\[\[?([^\]=]+)\]\]?\s*(#.*)?$")


@dataclass(frozen=True)
class Wrong:
    """A mistake: its place in the file, what to say about it, and the places of all settings that it is about."""

    place: Place
    text: str
    about: tuple[Place, ...]


@dataclass(frozen=True)
class Read(Generic[M]):
    """A file that was read. `value`: what its right settings mean, or None if that cannot be told. `text`: the file's."""

    path: Path
    text: str
    value: M | None
    wrong: tuple[Wrong, ...]

    def touches(self, places: Iterable[Place]) -> bool:
        """Whether a mistake is about one of these settings already, so that its value here is not the file's."""
        known = [place for wrong in self.wrong for place in wrong.about]
        return any(_same(one, other) for one in places for other in known)

    def error(self, more: Iterable[Wrong] = ()) -> OperatorError:
        """All mistakes, in the order of the file's lines."""
        found = [*self.wrong, *more]
        lines = [(line_of(self.text, wrong.place), wrong.text) for wrong in found[:WRONG_SHOWN_MAX]]
        said = [f"{self.path}:{line}: {text}" for line, text in sorted(lines, key=lambda it: it[0])]
        if len(found) > WRONG_SHOWN_MAX:
            said.append(f"and {len(found) - WRONG_SHOWN_MAX} more")
        return OperatorError("\n".join(said))


def load(path: Path, model: type[M]) -> M:
    """Read and validate; OperatorError lists every wrong value (at most WRONG_SHOWN_MAX) with its place in the file."""
    found = read(path, model)
    if found.value is None or found.wrong:
        raise found.error()
    return found.value


def read(path: Path, model: type[M]) -> Read[M]:
    """Read and validate. Settings that are wrong are left out, so that those that depend on the others are checked, too."""
    text = _text_of(path)
    values: Any = _parsed(path, text)
    found: list[Wrong] = []
    for _ in range(ROUNDS_MAX):
        try:
            return Read(path, text, model.model_validate(values), tuple(found))
        except ValidationError as error:
            so_far = Read[M](path, text, None, tuple(found))
            new = [hinted(wrong, model) for wrong in wrongs(error)]
            found += [wrong for wrong in new if not so_far.touches(wrong.about)]
            values = _without(values, found)
    return Read(path, text, None, tuple(found))


def hinted(wrong: Wrong, model: type[BaseModel]) -> Wrong:
    """A mistake, with the settings that an unknown one is near to: of its table, or of its name in another one."""
    if UNKNOWN not in wrong.text:
        return wrong
    known = sorted(_keys_of(model), key=lambda key: key.count("."))
    names = [part for part in wrong.place if isinstance(part, str)]
    table, last = ".".join(names[:-1]), names[-1]
    here = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    near = [here[name] for name in difflib.get_close_matches(last, here, n=3, cutoff=NEAR)]
    near = near or [key for key in known if key.rpartition(".")[2] == last][:1]
    near = near or difflib.get_close_matches(".".join(names), known, n=3, cutoff=NEAR)
    if not near:
        return wrong
    meant = f"did you mean {' or '.join(near[:NEAR_SHOWN_MAX])}? Correct it"
    return replace(wrong, text=wrong.text.replace("correct it", meant))


def _keys_of(model: type[BaseModel], before: str = "", depth: int = 0) -> Iterator[str]:
    """The dotted settings of a model and of the models in it."""
    for name, field in model.model_fields.items():
        yield before + name
        inner = field.annotation
        if depth < ROUNDS_MAX and isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _keys_of(inner, f"{before}{name}.", depth + 1)


def _same(one: Place, other: Place) -> bool:
    """Whether one of two places holds the other."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _without(values: dict[str, Any], wrong: Iterable[Wrong]) -> dict[str, Any]:
    """The values but those that are wrong. Of a list with a wrong part nothing stays."""
    places = {tuple(_names(place)) for one in wrong for place in one.about}
    return dict(_kept(values, (), places))


def _kept(values: dict[str, Any], at: tuple[str, ...], places: set[tuple[str, ...]]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        here = (*at, key)
        if here in places:
            continue
        yield key, dict(_kept(value, here, places)) if isinstance(value, dict) else value


def _names(place: Place) -> Iterator[str]:
    """The names before the first number in a place."""
    for part in place:
        if isinstance(part, int):
            return
        yield part


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding=WRITTEN)
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OperatorError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


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


def describe(
    error: ValidationError,
    place: Callable[[Place], str] = lambda loc: "",
    helped: Callable[[Wrong], Wrong] = lambda wrong: wrong,
) -> str:
    """One line a wrong value: place, key, what was wrong, what was given. `helped` adds what a caller knows of a mistake."""
    found = [helped(wrong) for wrong in wrongs(error)]
    lines = [f"{place(wrong.place)}{wrong.text}" for wrong in found[:WRONG_SHOWN_MAX]]
    if len(found) > WRONG_SHOWN_MAX:
        lines.append(f"and {len(found) - WRONG_SHOWN_MAX} more")
    return "\n".join(lines)


def wrongs(error: ValidationError) -> list[Wrong]:
    """Each wrong value with what to say about it: the key, what was wrong, what was given."""
    found = []
    for item in error.errors():
        place: Place = item["loc"]
        message, given = item["msg"], f" (given: {_cut(item['input'])})"
        about: tuple[Place, ...] = (place,)
        match item["type"]:
            case "extra_forbidden":
                message = REMOVED.get(str(place[-1]), UNKNOWN)
            case "string_pattern_mismatch":
                message = expected(str(item["ctx"]["pattern"]))
            case "value_error":
                cause = item["ctx"]["error"]
                message, given = str(cause), ""
                if isinstance(cause, Mistake):
                    about = tuple((*place, *key.split(".")) for key in cause.keys)
            case "missing":
                given = ""
        key = ".".join(str(part) for part in about[0]) or "the whole"
        found.append(Wrong(about[0], f"{key}: {message}{given}", about))
    return found


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= GIVEN_CHARACTERS_MAX else f"{text[:GIVEN_CHARACTERS_MAX]}..."


def _syntax_line(message: str) -> int:
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else 1


def _numbers_of(loc: Place) -> dict[str, int]:
    """The place in its list that a location names, by the dotted key of the list."""
    found, names = dict[str, int](), list[str]()
    for part in loc:
        if isinstance(part, int):
            found[".".join(names)] = part
        else:
            names.append(part)
    return found


def line_of(text: str, loc: Place) -> int:
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


OFF: Final = "off"
"""No value, in a file, a variable or a flag: TOML has no word for nothing."""


@dataclass(frozen=True)
class Layers:
    """The settings of a program: flags go before the environment, which goes before its file. An error names the file's
    line.

    pydantic-settings merges these layers before it validates. Earlier names of settings count by the layer that they stand in,
    so the layers stay apart here; pydantic validates what they come to.

    What a program's file and environment say. `named`: a person chose the file, and it does not just lie here.
    """

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


def read_layers(prefix: str, file: str, known: Collection[str]) -> Layers:
    """The file in the working folder, or that of the variable <prefix>CONFIG, and the variables of `known` settings.

    A line on stderr names each variable that is mistyped. Raises OperatorError for a file that cannot be read.
    """
    name = os.environ.get(f"{prefix}CONFIG")
    path, text, values = Path(name or file), "", dict[str, Any]()
    if name and not path.is_file():
        raise OperatorError(f"{prefix}CONFIG={path}: no such file; correct the path, or unset the variable")
    if os.path.lexists(path) and not path.is_file():
        raise OperatorError(
            f"{path} is no file that can be read (a folder, or a link to nothing): correct it, or move it away"
        )
    try:
        if path.is_file():
            text = path.read_text(encoding=WRITTEN)
            values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise OperatorError(f"{path} is not TOML: {error}; correct the file, or move it away") from error
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}; move it away, or make it readable") from error
    tell_unread(os.environ, prefix, known)
    variables = {
        key[len(prefix) :].lower(): it.strip() for key, it in os.environ.items() if key.upper().startswith(prefix)
    }
    given = {key: it for key, it in variables.items() if it and key in known}
    for key, it in given.items():
        # docker's --env-file keeps them: a home in the folder `"`. The value may be a link, which no log should have
        if len(it) > 1 and it[0] == it[-1] and it[0] in "\"'":
            raise OperatorError(f"{prefix}{key.upper()}: the quotes are a part of its value; leave them out")
    return Layers(path, bool(name), text, values, given)


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
