"""The part of a core that writing a state takes: the same in every step, bounded, and what waits too long makes haste."""

import pytest

from node.training.keeper import (
    BACKLOG,
    CORE_PART_FIRST,
    CORE_PART_LATE,
    CORE_PART_MAX,
    CORE_PART_MIN,
    SPREAD,
    CorePart,
)

STATE, MOMENTUM = 100_000_000, 200_000_000
MEAN = (STATE + MOMENTUM) / 2
CORES = 2
FIRST = CORES * CORE_PART_FIRST


def part_with(between: float, seconds: float, first: float | None = None) -> CorePart:
    """Of a thread to which states and momenta come in turn, each `between` seconds, and STATE bytes cost `seconds` of CPU time.
    `first`: the seconds from the first to the second."""
    part = CorePart(CORES)
    for number, size in enumerate((STATE, MOMENTUM, STATE)):
        part.comes(1000 + number * between - (0 if number or first is None else first - between), size)
    part.used(3 * seconds, 3 * STATE)
    return part


def test_nothing_is_known_at_first() -> None:
    part = CorePart(CORES)
    assert part.of(STATE, late=False) == FIRST
    part.comes(0.0, STATE)
    part.comes(9.0, MOMENTUM)
    part.used(1.0, STATE)
    assert part.of(STATE, late=False) == FIRST


def test_a_state_of_any_size_takes_as_much_of_each_step_as_others() -> None:
    """A momentum is twice a state: over an equal time it took twice as much of the steps after it."""
    part = part_with(10.0, 0.2)
    even = MEAN / STATE * 0.2 / (10.0 * SPREAD)
    sizes = (MOMENTUM, MOMENTUM // 2, STATE, STATE // 100)
    assert [part.of(size, late=False) for size in sizes] == pytest.approx([even] * len(sizes))


def test_all_that_comes_is_written_in_the_time_in_which_it_comes() -> None:
    part, second, waits, most = part_with(10.0, 0.2), 0.1, 0.0, 0.0
    for tick in range(2000):
        waits += {0: STATE, 100: MOMENTUM}.get(tick % 200, 0)
        most = max(most, waits)
        waits = max(0.0, waits - second * part.of(int(waits), late=False) / 0.2 * STATE)
        if tick % 200 == 99:
            assert waits == 0, "a snapshot is on the disk when the next momentum comes"
    assert most < MOMENTUM + STATE / 2


def test_what_waits_too_long_makes_haste() -> None:
    part = part_with(10.0, 0.2)
    assert part.of(5 * STATE, late=False) == pytest.approx(5 * 0.2 / (10.0 * BACKLOG))


def test_a_first_state_that_waited_for_peers_does_not_slow_the_next_ones() -> None:
    assert part_with(10.0, 0.2, first=900.0).of(STATE, late=False) == pytest.approx(
        part_with(10.0, 0.2).of(STATE, late=False) / 2
    )


def test_the_part_is_bounded() -> None:
    assert part_with(1.0, 9.0).of(STATE, late=False) == CORE_PART_MAX
    assert part_with(0.0, 0.2).of(STATE, late=False) == CORE_PART_MAX
    assert part_with(1e6, 0.2).of(STATE, late=False) == CORE_PART_MIN


def test_a_state_that_was_left_out_makes_haste() -> None:
    assert part_with(10.0, 0.2).of(STATE, late=True) == CORE_PART_LATE
    assert part_with(1.0, 9.0).of(STATE, late=True) == CORE_PART_MAX


def test_a_machine_with_many_cores_writes_faster_at_first() -> None:
    assert CorePart(8).of(STATE, late=False) == pytest.approx(8 * CORE_PART_FIRST)
    assert CorePart(128).of(STATE, late=False) == CORE_PART_MAX
