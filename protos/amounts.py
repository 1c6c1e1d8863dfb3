"""Amounts for people's eyes: bytes, counts and times in their largest unit, with two or three figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
