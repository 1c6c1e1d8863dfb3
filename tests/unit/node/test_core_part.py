"""States are written in half of the time between two of them, and with more of a core if that is not enough."""

from __future__ import annotations

import pytest

from node.training.core_part import CORE_PART_BEHIND, CORE_PART_MAX, CORE_PART_MIN, CorePart

STATE = 100_000_000


def part_with(between: float, seconds: float) -> CorePart:
    """Of a thread to which states of STATE bytes come each `between` seconds and cost `seconds` of CPU time."""
    part = CorePart()
    for number in range(3):
        part.comes(1000 + number * between)
        part.used(seconds, STATE)
    return part


def test_nothing_is_known_at_first() -> None:
    part = CorePart()
    assert part.of(STATE, behind=False) == CORE_PART_MAX
    part.comes(0.0)
    part.used(1.0, STATE)
    assert part.of(STATE, behind=False) == CORE_PART_MAX


def test_the_writing_takes_half_of_the_time_to_the_next_state() -> None:
    assert part_with(10.0, 0.2).of(STATE, behind=False) == pytest.approx(0.2 / 5)
    assert part_with(10.0, 0.2).of(STATE // 2, behind=False) == pytest.approx(0.1 / 5)


def test_the_part_is_bounded() -> None:
    assert part_with(1.0, 0.2).of(STATE, behind=False) == CORE_PART_MAX
    assert part_with(1e6, 0.2).of(STATE, behind=False) == CORE_PART_MIN
    assert part_with(0.0, 0.2).of(STATE, behind=False) == CORE_PART_MAX


def test_a_later_state_that_waits_makes_haste() -> None:
    assert part_with(10.0, 0.2).of(STATE, behind=True) == CORE_PART_BEHIND
