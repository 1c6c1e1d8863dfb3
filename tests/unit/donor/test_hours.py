"""A weekly schedule: what a person writes, against a slow count of every minute of the week."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.donor.owner_settings import DAYS, EXAMPLE, WEEK, clock, parse


def at(text: str) -> int:
    day, time = text.split()
    hour, minute = map(int, time.split(":"))
    return (DAYS.index(day) * 24 + hour) * 60 + minute


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (
            EXAMPLE,
            ["mon 18:00", "tue 07:59", "fri 23:00", "sat 12:00", "sun 23:59"],
            ["mon 00:00", "mon 07:00", "fri 08:00"],
        ),
        ("22:00-06:00", ["mon 00:00", "sun 23:00", "wed 05:59"], ["mon 06:00", "sun 21:59"]),
        ("sun 18:00-08:00", ["sun 18:00", "mon 07:59"], ["mon 08:00", "sun 17:59"]),
        ("fri-mon", ["fri 00:00", "sun 12:00", "mon 23:59"], ["tue 00:00", "thu 23:59"]),
        ("WED  9:00-24:00", ["wed 09:00", "wed 23:59"], ["thu 00:00", "wed 08:59"]),
    ],
)
def test_a_schedule_is_read_as_people_mean_it(text: str, inside: list[str], outside: list[str]) -> None:
    hours = parse(text)
    assert all(hours.include(at(when)) for when in inside)
    assert not any(hours.include(at(when)) for when in outside)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not days, times, or both"),
        ("mon-fri 18:00", "'18:00' is not a time such as 18:00-08:00"),
        ("monday", "'monday' is not a day: mon, tue"),
        ("mon-fry", "'fry' is not a day"),
        ("mon 25:00-08:00", "hours go from 00:00 to 24:00"),
        ("mon 08:60-09:00", "hours go from 00:00 to 24:00"),
        ("mon 08:00-08:00", "begins and ends at the same time"),
        ("mon tue wed", "is not days, times, or both"),
        (", ".join(["mon"] * 51), "51 parts"),
    ],
)
def test_a_wrong_part_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"is not|hours go|begins and ends|parts") as caught:
        parse(text)
    assert words in str(caught.value)


TIMES = st.tuples(st.integers(0, 1439), st.integers(1, 1440)).filter(lambda pair: pair[0] != pair[1])
PARTS = st.lists(st.tuples(st.sampled_from(DAYS), st.sampled_from(DAYS), TIMES), min_size=1, max_size=4)


@given(PARTS, st.integers(0, WEEK - 1))
def test_begin_and_end_are_those_of_a_slow_count(parts: list[tuple[str, str, tuple[int, int]]], now: int) -> None:
    def words(minute: int) -> str:
        return f"{minute // 60:02}:{minute % 60:02}"

    hours = parse(", ".join(f"{a}-{b} {words(begins)}-{words(ends)}" for a, b, (begins, ends) in parts))
    minutes = [(now + later) % WEEK for later in range(WEEK)]
    if hours.include(now):
        assert hours.end_after(now) == next((minute for minute in minutes if not hours.include(minute)), None)
    else:
        assert hours.begin_after(now) == next(minute for minute in minutes if hours.include(minute))


def test_a_time_is_told_with_its_day_only_if_it_is_not_within_a_day() -> None:
    assert clock(at("mon 18:00"), at("mon 09:00")) == "18:00"
    assert clock(at("mon 00:00"), at("sun 23:00")) == "00:00"
    assert clock(at("sat 00:00"), at("mon 09:00")) == "sat 00:00"
