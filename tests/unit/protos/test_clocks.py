"""A wrong wall clock is named, with both times; a right one, and one that nobody can judge, is not. Waits between tries grow to
a bound, begin anew, and differ between peers."""

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from protos.clocks import APART_SECONDS_MAX, MADE, Waits, wrong

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


def test_each_wait_is_between_half_and_the_whole_of_the_doubled_time() -> None:
    whole, half = Waits(0.2, 5.0, lambda: 1.0), Waits(0.2, 5.0, lambda: 0.0)
    assert [whole.next() for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert [half.next() for _ in range(3)] == [0.1, 0.2, 0.4]
    whole.reset()
    assert whole.next() == 0.2
    for _ in range(2000):
        assert 0 < whole.next() <= 5.0
    assert whole.next(0.5) == 0.5


def test_a_seed_repeats_the_waits() -> None:
    one, other = (Waits(0.2, 5.0, random.Random(7).random) for _ in range(2))
    assert [one.next() for _ in range(9)] == [other.next() for _ in range(9)]


def test_peers_that_lost_a_coordinator_at_once_do_not_come_back_in_step() -> None:
    """Of 200 peers, no tenth of a second of the last seconds of a minute has more than a few."""
    drawn = random.Random(1)
    tries = []
    for _ in range(200):
        waits, at = Waits(0.2, 5.0, drawn.random), 0.0
        while at < 60.0:
            at += waits.next()
        tries.append(at)
    tries.sort()
    assert max(sum(start <= at < start + 0.1 for at in tries) for start in tries) < 30
    assert max(after - before for before, after in pairwise(tries)) < 1.0
