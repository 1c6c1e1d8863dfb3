"""Text for eyes and for programs: words from strangers on one line, amounts, and JSON of one object a line. Pure.

Words from strangers are printable and bounded: characters that do not print become `?`. Escape sequences, line breaks and marks
that turn the direction of writing do not print. Markup is not known here: who shows such words shows them as plain text
(`rich.text.Text`), never as markup. Amounts (bytes, counts, times) are in their largest unit, with two or three figures. JSON
is strict: a number that is not finite is `null` (docs/json.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

TEXT_CHARACTERS_MAX = 512


def printable(text: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """The words, with `?` for what does not print, cut at `characters_max`."""
    cut = text[:characters_max]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


def as_line(values: Any) -> str:
    """The values as JSON of one line. JSON has no NaN and no infinity, and most readers refuse them."""
    return json.dumps(_finite(values), allow_nan=False)


def print_json(values: Any) -> None:
    """Print one line, at once: a program may be waiting for it."""
    print(as_line(values), flush=True)


def finite(value: float) -> float | None:
    """The value; None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
COUNTS = ("", " k", " M", " G", " T")
STEP = 1000
FIGURES_BELOW = 10
MINUTE, HOUR, DAY = 60, 3600, 86_400
SPAN_SHORT = 10


def amount(size: float) -> str:
    """Bytes: `512 B`, `1.4 GB`, `85 MB`."""
    number, unit = _largest(size, BYTES)
    return f"{number} {unit}"


def count(things: float) -> str:
    """A number of things: `640`, `1.2 M`, `85 M`."""
    number, unit = _largest(things, COUNTS)
    return f"{number}{unit}"


def things(number: int, name: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`45 s`, `14 min`, `2 h 12 min`, `3 d 4 h`."""
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    if seconds < HOUR:
        return f"{seconds // MINUTE:.0f} min"
    if seconds < DAY:
        return f"{seconds // HOUR:.0f} h {seconds % HOUR // MINUTE:.0f} min"
    return f"{seconds // DAY:.0f} d {seconds % DAY // HOUR:.0f} h"


def span(seconds: float) -> str:
    """The same, but with two figures below ten seconds: `0.013 s`, `2.5 s`, `45 s`."""
    return f"{seconds:.2g} s" if seconds < SPAN_SHORT else duration(seconds)


def _largest(value: float, units: Sequence[str]) -> tuple[str, str]:
    for unit in units[:-1]:
        if round(value) < STEP:
            small = unit != units[0] and value < FIGURES_BELOW
            return (f"{value:.1f}" if small else f"{value:.0f}"), unit
        value /= STEP
    return f"{value:,.1f}" if value < FIGURES_BELOW else f"{value:,.0f}", units[-1]
