"""Vote sums: order does not count, caps hold, and every peer may have its own group size."""

import itertools

import numpy as np
import pytest
import torch

from node.optim import aggregate, reference, votes

CPU = torch.device("cpu")
CHUNKS = 3


def ballots(sizes, seed=0):
    random = np.random.default_rng(seed)
    return [(size, random.bytes(votes.vote_bytes(CHUNKS, size))) for size in sizes]


def sums(contributions):
    total = aggregate.VoteSum(CHUNKS, CPU)
    for size, payload in contributions:
        total.add(size, payload)
    return total.sums(0, CHUNKS)


def test_sums_are_those_of_the_reference():
    contributions = ballots(votes.GROUP_SIZES * 2)
    assert np.array_equal(sums(contributions).numpy(), np.stack(reference.sums(contributions, CHUNKS)))


def test_the_order_of_contributions_does_not_count():
    contributions = ballots([8, 16, 128, 32])
    results = [sums(order) for order in itertools.permutations(contributions)]
    assert all(torch.equal(results[0], result) for result in results)


def test_many_equal_votes_are_capped_and_do_not_overflow():
    contributions = ballots([128]) * 300
    values = sums(contributions)
    assert set(values.unique().tolist()) == {-2, 0, 2}
    assert torch.equal(values, 2 * sums(contributions[:1]))


def test_a_range_of_chunks_is_the_same_as_all():
    contributions = ballots([64, 8])
    total = aggregate.VoteSum(CHUNKS, CPU)
    for size, payload in contributions:
        total.add(size, payload)
    parts = [total.sums(0, 1), total.sums(1, 1), total.sums(1, 3)]
    assert torch.equal(torch.cat(parts), sums(contributions))


def test_votes_that_do_not_fit_are_not_counted():
    total = aggregate.VoteSum(CHUNKS, CPU)
    with pytest.raises(votes.VotesError):
        total.add(128, bytes(5))
    assert not total.sums(0, CHUNKS).any()


def test_direction_is_the_sign_and_zero_where_nobody_votes():
    values = sums(ballots([32, 16]))
    expected = np.stack([np.sign(reference.inverse(chunk)) for chunk in values.numpy().astype(np.int64)])
    assert np.array_equal(aggregate.direction(values).numpy(), expected)
    nothing = aggregate.direction(torch.zeros(2, 64, 64, dtype=torch.int32))
    assert not nothing.any()
    assert not torch.signbit(nothing).any()
