"""The order of samples is a permutation in each epoch, and windows never meet the held-out tail."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data.samples import Samples, permute
from protos.assignment import Range
from protos.errors import DataError


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**70))
def test_order_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**62), data=st.data())
def test_order_of_huge_sets_stays_inside_and_does_not_collide(n: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    places = permute(np.array(positions), n, 1, 1)
    assert len(set(places.tolist())) == len(positions)
    assert places.min() >= 0
    assert places.max() < n


def test_order_is_frozen() -> None:
    """Peers of one run must agree on it: a change of the order is a change of the protocol."""
    assert permute(np.arange(10), 10, seed=1, epoch=0).tolist() == FROZEN


def test_order_mixes() -> None:
    """Neighbours do not stay neighbours, and a new epoch or seed is another order."""
    n = 10_000
    order = permute(np.arange(n), n, 1, 0)
    assert np.mean(np.abs(np.diff(order)) < n // 100) < 0.04  # 2 % by chance
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
    for other in (permute(np.arange(n), n, 1, 1), permute(np.arange(n), n, 2, 0)):
        assert np.mean(order == other) < 0.01


@settings(max_examples=80, deadline=None)
@given(length=st.integers(4, 3000), context=st.integers(1, 60), seed=st.integers(0, 9))
def test_an_epoch_predicts_every_training_token_once_and_no_held_out_one(length: int, context: int, seed: int) -> None:
    tokens = np.arange(length, dtype=np.uint16)  # a token is its own place
    if length < 2 * (context + 1):
        with pytest.raises(DataError, match=f"{length} tokens"):
            Samples(tokens, context, seed)
        return
    samples = Samples(tokens, context, seed)
    epoch = samples.batch(0, samples.windows)
    assert np.array_equal(np.diff(epoch, axis=1), np.ones((samples.windows, context)))
    predicted = np.sort(epoch[:, 1:].ravel())
    assert np.array_equal(predicted, np.arange(1, samples.windows * context + 1))
    assert samples.validation().min() > epoch.max()
    assert samples.validation().max() == length - 1
    assert len(samples.validation()) == samples.validation_windows >= 1


def test_ranges_add_up_across_epochs() -> None:
    samples = Samples(np.arange(500, dtype=np.uint16), 16, seed=3)
    start, stop = samples.windows - 3, 3 * samples.windows + 2
    whole = samples.batch(start, stop)
    assert whole.dtype == np.int64
    cuts = [Range(start, start + 3), Range(start + 3, start + 3), Range(start + 3, start + 20), Range(start + 20, stop)]
    batches = list(samples.micro_batches(cuts, 7))
    assert np.array_equal(np.concatenate(batches), whole)
    assert {len(batch) for batch in batches[:-1]} == {7}, "crumbs cost a forward pass each"
    assert list(samples.micro_batches([], 7)) == []
    assert samples.batch(5, 5).shape == (0, 17)
    assert np.array_equal(samples.batch(10**30, 10**30 + 1), samples.batch(10**30, 10**30 + 2)[:1])


def test_validation_is_spread() -> None:
    samples = Samples(np.arange(60_000, dtype=np.uint16), 10, seed=0)
    few = samples.validation(4)
    assert few.shape == (4, 11)
    assert len(np.unique(few[:, 0])) == 4
    assert np.ptp(few[:, 0]) > samples.validation_windows * 10 / 2


FROZEN = [8, 5, 7, 6, 0, 2, 1, 4, 3, 9]
