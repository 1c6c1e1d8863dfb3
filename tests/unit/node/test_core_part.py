"""States are written in half of the time between two of them, and with more of a core if that is not enough."""

import pytest

from node.training.keeper import CORE_PART_A_CORE, CORE_PART_BEHIND, CORE_PART_MAX, CORE_PART_MIN, CorePart

STATE = 100_000_000
CORES = 2
MOST = CORES * CORE_PART_A_CORE


def part_with(between: float, seconds: float, cores: int = CORES) -> CorePart:
    """Of a thread to which states of STATE bytes come each `between` seconds and cost `seconds` of CPU time."""
    part = CorePart(cores)
    for number in range(3):
        part.comes(1000 + number * between)
        part.used(seconds, STATE)
    return part


def test_nothing_is_known_at_first() -> None:
    part = CorePart(CORES)
    assert part.of(STATE, behind=False) == MOST
    part.comes(0.0)
    part.used(1.0, STATE)
    assert part.of(STATE, behind=False) == MOST


def test_the_writing_takes_half_of_the_time_to_the_next_state() -> None:
    assert part_with(10.0, 0.2).of(STATE, behind=False) == pytest.approx(0.2 / 5)
    assert part_with(10.0, 0.2).of(STATE // 2, behind=False) == pytest.approx(0.1 / 5)


def test_the_part_is_bounded() -> None:
    assert part_with(1.0, 0.2).of(STATE, behind=False) == MOST
    assert part_with(1e6, 0.2).of(STATE, behind=False) == CORE_PART_MIN
    assert part_with(0.0, 0.2).of(STATE, behind=False) == MOST


def test_a_later_state_that_waits_makes_haste() -> None:
    assert part_with(10.0, 0.2).of(STATE, behind=True) == CORE_PART_BEHIND


def test_a_machine_with_many_cores_writes_faster() -> None:
    assert part_with(1.0, 9.0, cores=8).of(STATE, behind=False) == pytest.approx(8 * CORE_PART_A_CORE)
    assert part_with(1.0, 9.0, cores=128).of(STATE, behind=True) == CORE_PART_MAX
