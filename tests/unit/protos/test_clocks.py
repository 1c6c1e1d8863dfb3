"""A wrong wall clock is named, with both times; a right one, and one that nobody can judge, is not."""

from datetime import UTC, datetime, timedelta

import pytest

from protos.clocks import APART_SECONDS_MAX, MADE, wrong

NOW = datetime(2027, 3, 4, 12, 0, tzinfo=UTC)
THERE = int(NOW.timestamp() * 1000)


@pytest.mark.parametrize("year", [1970, 1972, 2000, 2025])
def test_a_clock_from_before_this_software_is_wrong_without_anybody_to_ask(year: int) -> None:
    assert f"this machine's clock says {year}-01-01" in wrong(datetime(year, 1, 1, tzinfo=UTC))


def test_a_clock_is_held_against_the_coordinators() -> None:
    said = wrong(NOW + timedelta(days=4000), THERE)
    assert "2038-02-14 12:00" in said
    assert "2027-03-04 12:00" in said
    assert "4000 d 0 h apart" in said
    assert wrong(NOW - timedelta(seconds=APART_SECONDS_MAX + 1), THERE)
    assert not wrong(NOW + timedelta(seconds=APART_SECONDS_MAX), THERE)


@pytest.mark.parametrize("there", [0, -1, 2**63, 2**64 - 1])
def test_a_coordinator_that_does_not_say_its_time_or_a_hostile_one_ends_nothing(there: int) -> None:
    assert wrong(NOW, there) == ""
    assert wrong(MADE, there) == ""
