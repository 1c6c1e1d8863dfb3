"""Text for eyes and for programs: words from strangers on one line, and JSON of one object a line.

Words from strangers are printable and bounded: characters that do not print become `?`. Escape sequences, line breaks and marks
that turn the direction of writing do not print. Markup is not known here: who shows such words shows them as plain text
(`rich.text.Text`), never as markup. JSON is strict: a number that is not finite is `null` (docs/json.md).
"""

from __future__ import annotations

import json
import math
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
