"""Votes: what is chosen, and the bytes, which are a contract between peers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.optim.votes import groups as votes
from tests.unit.optim import reference

SIZES = pytest.mark.parametrize("group_size", votes.GROUP_SIZES)


def plain(positions, signs, silent=None):
    """As the reference says it: None for a silent vote."""
    votes = [list(zip(p, s, strict=True)) for p, s in zip(positions.tolist(), signs.tolist(), strict=True)]
    if silent is None:
        return votes
    return [[None if s else v for v, s in zip(*pair, strict=True)] for pair in zip(votes, silent.tolist(), strict=True)]


@SIZES
def test_selects_as_the_reference_does_with_many_ties_and_zeros(group_size):
    generator = torch.Generator().manual_seed(group_size)
    smooth = torch.randn(2, 64, 64, generator=generator)
    momentum = torch.cat([smooth, smooth.round(), torch.zeros(1, 64, 64), -torch.ones(1, 64, 64)])
    expected = reference.select(list(momentum.numpy()), group_size)
    assert plain(*votes.select(momentum, group_size)) == expected


@SIZES
def test_every_coefficient_can_win_alone(group_size):
    """One non-zero coefficient in each chunk: it is the one voted for, negative if it is."""
    momentum = -torch.eye(4096)[::7].reshape(-1, 64, 64)
    packed = votes.pack(*votes.select(momentum, group_size)[:2], group_size)
    where, values = votes.indices(packed, group_size)
    won = torch.zeros(len(momentum), 4096, dtype=torch.int8).scatter_(1, where, (values < 0).to(torch.int8))
    assert torch.equal(won, torch.eye(4096, dtype=torch.int8)[::7])
    assert torch.equal(torch.sort(votes.coefficients(group_size, momentum.device))[0], torch.arange(4096))


def test_zeros_are_no_vote_and_infinity_wins():
    momentum = torch.full((1, 64, 64), -0.0)
    positions, signs, silent = votes.select(momentum, 128)
    assert not positions.any()
    assert not signs.any()
    assert silent.all()
    momentum[0, 63, 63] = -torch.inf
    assert votes.select(momentum, 128)[1].sum() == 1


@SIZES
def test_nan_is_refused(group_size):
    momentum = torch.zeros(3, 64, 64)
    momentum[1, 17, 5] = torch.nan
    with pytest.raises(votes.NotANumber):
        votes.select(momentum, group_size)


@SIZES
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), chunks=st.integers(0, 3))
def test_every_byte_string_of_the_right_length_is_a_payload(group_size, seed, chunks):
    payload = np.random.default_rng(seed).bytes(votes.vote_bytes(chunks, group_size))
    positions, signs = votes.decode(payload, group_size, chunks)
    assert positions.shape == signs.shape == (chunks, votes.groups(group_size))
    assert positions.max() < group_size if chunks else True
    assert votes.encode(positions, signs, group_size) == payload


@SIZES
def test_codes_as_the_reference_does(group_size):
    payload = np.random.default_rng(7).bytes(votes.vote_bytes(2, group_size))
    assert plain(*votes.decode(payload, group_size, 2)) == reference.decode(payload, group_size, 2)
    assert reference.encode(reference.decode(payload, group_size, 2), group_size) == payload


@SIZES
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_length_is_refused(group_size, change):
    payload = bytes(votes.vote_bytes(2, group_size) + change)
    with pytest.raises(votes.VotesError, match="bytes of votes"):
        votes.decode(payload, group_size, 2)


@pytest.mark.parametrize("group_size", [0, 1, 4, 12, 100, 256, -8])
def test_a_group_size_that_is_not_offered_is_refused(group_size):
    with pytest.raises(votes.VotesError, match="group size"):
        votes.vote_bytes(1, group_size)


def test_vote_bytes():
    assert {size: votes.vote_bytes(1, size) for size in votes.GROUP_SIZES} == {8: 256, 16: 160, 32: 96, 64: 56, 128: 32}


GOLDEN = {
    8: "49a7056bc1270de3412f856349a7056b",
    16: "911cddc034893f51d1f2815cd5e03099",
    32: "2171a80d345b19ff0925b2b811756b1d",
    64: "41c241d9804c2d19ee475446addc31da",
    128: "8104078a0d109316199c1f22a5282bae",
}


@SIZES
def test_the_bits_are_pinned(group_size):
    """Vote q: position 3q + 1, negative for every third. A change here breaks peers of another version."""
    count = votes.groups(group_size)
    order = torch.arange(count)
    positions = ((3 * order + 1) % group_size).to(torch.uint8)[None]
    signs = (order % 3 == 0).to(torch.uint8)[None]
    assert votes.encode(positions, signs, group_size)[:16].hex() == GOLDEN[group_size]


@SIZES
def test_the_groups_are_pinned(group_size):
    """The first and last members of two groups, as `64 * row + column`."""
    members = votes.coefficients(group_size, torch.device("cpu")).view(group_size, -1)
    expected = reference.members(group_size)
    for group in (0, 1, members.shape[1] - 1):
        assert members[:, group].tolist() == [64 * row + column for row, column in expected[group]]
    spread = members[:, 0] // 64
    assert spread[-1] - spread[0] >= 56, "a group spans all frequencies"
