"""Waits between tries grow to a bound, begin anew, and differ between peers."""

import random
from itertools import pairwise

from protos.waits import Waits


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
