"""Where the labels of a picture's points go so that none covers another, or a point. Pure geometry, in pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

MARKER_PIXELS: Final = 7.0
"""Half the side of the square that a point keeps for itself."""
RINGS: Final = 40
RING_PIXELS: Final = 9.0
DIRECTIONS: Final = 16


@dataclass(frozen=True)
class Box:
    """A rectangle: its lower left corner and its size."""

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: Box) -> bool:
        """Whether they share an area."""
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and self.y < other.y + other.height and other.y < self.y + self.height

    def holds(self, other: Box) -> bool:
        """Whether `other` lies inside."""
        across = self.x <= other.x and other.x + other.width <= self.x + self.width
        return across and self.y <= other.y and other.y + other.height <= self.y + self.height


def place(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box, taken: Sequence[Box] = ()
) -> list[Box | None]:
    """A box of each size near its point, inside `frame`, clear of all points, of `taken` and of each other.

    Points are served in order, each at the nearest free place of 16 directions. None where there is no room within 360
    pixels.
    """
    side = 2 * MARKER_PIXELS
    closed = [*taken, *(Box(x - MARKER_PIXELS, y - MARKER_PIXELS, side, side) for x, y in points)]
    found: list[Box | None] = []
    for point, size in zip(points, sizes, strict=True):
        free = (
            box
            for box in _candidates(point, size)
            if frame.holds(box) and not any(box.overlaps(other) for other in closed)
        )
        chosen = next(free, None)
        found.append(chosen)
        if chosen is not None:
            closed.append(chosen)
    return found


def _candidates(point: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Boxes around a point, the nearest first, and of these the one to the right first."""
    (x, y), (width, height) = point, size
    for ring in range(1, RINGS + 1):
        for turn in range(DIRECTIONS):
            angle = 2 * math.pi * turn / DIRECTIONS
            dx, dy = math.cos(angle), math.sin(angle)
            away = MARKER_PIXELS + ring * RING_PIXELS - RING_PIXELS / 2
            # the box's side that looks at the point is `away` from it
            yield Box(x + dx * (away + width / 2) - width / 2, y + dy * (away + height / 2) - height / 2, width, height)
