"""Samples: cut, merged and shared out without losing or doubling one."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.assignment import Range, SampleShare, assign, merge, shares

deterministic = settings(derandomize=True, deadline=None)
gaps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8)
keys = st.binary(min_size=1, max_size=3)


def pool_of(pairs: list[tuple[int, int]]) -> list[Range]:
    made, at = [], 0
    for gap, length in pairs:
        made.append(Range(at + gap, at + gap + length))
        at += gap + length
    return made


@given(
    pairs=gaps,
    roster=st.lists(st.builds(SampleShare, keys, st.integers(0, 20)), max_size=6, unique_by=lambda s: s.public_key),
)
@deterministic
def test_assign_partitions_the_pool(pairs: list[tuple[int, int]], roster: list[SampleShare]) -> None:
    pool = pool_of(pairs)
    ranges = assign(pool, roster)
    assert list(ranges) == [share.public_key for share in roster]
    samples = [i for part in pool for i in range(part.start, part.stop)]
    given_out = [i for share in roster for part in ranges[share.public_key] for i in range(part.start, part.stop)]
    assert given_out == samples[: len(given_out)], "in the order of the pool and the roster, each once"
    assert len(given_out) == min(len(samples), sum(share.samples for share in roster))
    assert all(len(part) for parts in ranges.values() for part in parts)
    for share in roster:
        assert sum(map(len, ranges[share.public_key])) <= share.samples


@given(pairs=gaps, order=st.randoms(use_true_random=False))
@deterministic
def test_merge_keeps_the_samples_in_few_ranges(pairs: list[tuple[int, int]], order: object) -> None:
    pool = pool_of(pairs)
    mixed = list(pool)
    order.shuffle(mixed)  # type: ignore[attr-defined]
    merged = merge(mixed)
    assert [i for p in merged for i in range(p.start, p.stop)] == [i for p in pool for i in range(p.start, p.stop)]
    assert all(a.stop < b.start for a, b in pairwise(merged))


def test_merge_refuses_a_sample_that_is_there_twice() -> None:
    with pytest.raises(AssertionError, match="twice"):
        merge([Range(0, 5), Range(4, 6)])
    with pytest.raises(AssertionError):
        Range(3, 2)


@given(
    speeds=st.lists(st.tuples(keys, st.floats(0, 1e30)), min_size=1, max_size=20, unique_by=lambda s: s[0]),
    spare=st.integers(0, 1 << 20),
)
@deterministic
def test_shares_are_exact_positive_and_follow_speed(speeds: list[tuple[bytes, float]], spare: int) -> None:
    total = len(speeds) + spare
    made = shares(total, speeds)
    assert [share.public_key for share in made] == sorted(key for key, _ in speeds)
    assert sum(share.samples for share in made) == total
    assert all(share.samples >= 1 for share in made)
    by_speed = dict(speeds)
    for one in made:
        for other in made:
            if by_speed[one.public_key] > by_speed[other.public_key]:
                assert one.samples >= other.samples
    assert shares(total, list(reversed(speeds))) == made


def test_shares_examples() -> None:
    assert shares(10, [(b"b", 1.0), (b"a", 1.0)]) == (SampleShare(b"a", 5), SampleShare(b"b", 5))
    assert shares(10, [(b"a", 3.0), (b"b", 1.0)]) == (SampleShare(b"a", 7), SampleShare(b"b", 3))
    assert shares(3, [(b"a", 0.0), (b"b", 0.0)]) == (SampleShare(b"a", 2), SampleShare(b"b", 1))
    with pytest.raises(AssertionError):
        shares(1, [(b"a", 1.0), (b"b", 1.0)])
