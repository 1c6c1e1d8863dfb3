"""States are written in most of the time between two of them, with no more of a core than that needs."""

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


def at(between: float, later: float = 0.0) -> float:
    """So much later than the last of the states."""
    return 1000 + 2 * between + later


def test_nothing_is_known_at_first() -> None:
    part = CorePart(CORES)
    assert part.of(STATE, 0.0, behind=False) == MOST
    part.comes(0.0)
    part.used(1.0, STATE)
    assert part.of(STATE, 0.0, behind=False) == MOST


def test_the_writing_is_spread_over_most_of_the_time_to_the_next_state() -> None:
    part = part_with(10.0, 0.2)
    assert part.of(STATE, at(10.0), behind=False) == pytest.approx(0.2 / 8)
    assert part.of(STATE // 2, at(10.0, 2.5), behind=False) == pytest.approx(0.1 / 5.5)


def test_what_is_written_early_leaves_less_to_do() -> None:
    assert part_with(10.0, 0.4).of(STATE // 4, at(10.0, 1.0), behind=False) == pytest.approx(0.1 / 7)


def test_what_is_late_makes_haste() -> None:
    assert part_with(10.0, 0.2).of(STATE // 2, at(10.0, 7.9), behind=False) == MOST
    assert part_with(10.0, 0.2).of(STATE // 2, at(10.0, 9.0), behind=False) == MOST


def test_the_part_is_bounded() -> None:
    assert part_with(1.0, 0.2).of(STATE, at(1.0), behind=False) == MOST
    assert part_with(1e6, 0.2).of(STATE, at(1e6), behind=False) == CORE_PART_MIN
    assert part_with(0.0, 0.2).of(STATE, at(0.0), behind=False) == MOST


def test_a_later_state_that_waits_makes_haste() -> None:
    assert part_with(10.0, 0.2).of(STATE, at(10.0), behind=True) == CORE_PART_BEHIND


def test_a_machine_with_many_cores_writes_faster() -> None:
    assert part_with(1.0, 9.0, cores=8).of(STATE, at(1.0), behind=False) == pytest.approx(8 * CORE_PART_A_CORE)
    assert part_with(1.0, 9.0, cores=128).of(STATE, at(1.0), behind=True) == CORE_PART_MAX
