"""The leaky bucket that floods run into."""

from hypothesis import given
from hypothesis import strategies as st

from protos.limits import RateLimiter


@given(st.lists(st.integers(0, 500), max_size=200), st.integers(1, 20), st.integers(1, 100))
def test_no_more_than_the_burst_and_what_time_gives(gaps: list[int], burst: int, each_ms: int) -> None:
    rate, now, taken = RateLimiter(burst, each_ms, kept=4), 0, []
    for gap in gaps:
        now += gap
        if rate.allow("ada", now):
            taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + (taken[last] - taken[first]) / each_ms


def test_who_keeps_to_the_pace_always_may_and_others_do_not_matter() -> None:
    rate = RateLimiter(2, 10, kept=4)
    for now in range(0, 1000, 10):
        assert rate.allow("ada", now)
        for _ in range(5):
            rate.allow("mallory", now)


def test_it_remembers_so_many_keys_and_no_more() -> None:
    rate = RateLimiter(1, 1000, kept=2)
    assert [rate.allow(key, 0) for key in "aabbcc"] == [True, False, True, False, True, False]
    assert len(rate._paid_until) == 2
