"""JSON for programs: one object a line on stdout, strict: a number that is not finite is `null` (docs/json.md)."""

from __future__ import annotations

import json
import math
from typing import Any


def as_line(values: Any) -> str:
    """The values as JSON of one line. JSON has no NaN and no infinity, and most readers refuse them."""
    return json.dumps(_finite(values), allow_nan=False)


def print_json(values: Any) -> None:
    """Print one line, at once: a program may be waiting for it."""
    print(as_line(values), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
