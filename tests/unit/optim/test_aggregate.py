"""Vote sums: order does not count, caps hold, and every peer may have its own group size."""

import itertools

import numpy as np
import pytest
import torch

from node.optim import aggregate
from node.optim.backends.portable import spend_ballot
from node.optim.base import BaseConfig
from node.optim.votes import groups as votes
from node.optim.votes.payload import Format
from node.optim.votes.values import EIGHT_BIT, GRIDS, SIGN, TWO_BIT, quantise
from tests.unit.optim import reference

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


def test_the_inverse_has_the_signs_of_the_real_one_and_zero_where_nobody_votes():
    values = sums(ballots([32, 16]))
    expected = np.stack([np.sign(reference.inverse(chunk)) for chunk in values.numpy().astype(np.int64)])
    assert np.array_equal(aggregate.inverse(values).sign().numpy(), expected)
    assert not aggregate.inverse(torch.zeros(2, 64, 64, dtype=torch.int32)).any()


@pytest.mark.parametrize(("grid", "most"), [(SIGN, 2), (TWO_BIT, 5), (EIGHT_BIT, 64)])
def test_sums_that_grow_hold_every_peers_vote_and_none_above_twice_a_typical_one(grid, most):
    form = Format("topk", grid)
    momentum = torch.zeros(1, 64, 64)
    momentum[0, 0, :16] = torch.arange(1, 17)
    momentum[0, 0, 15] = 1000.0
    payload = form.encode([form.choose(momentum, 16)], 16)
    grown, capped = (aggregate.VoteSum(1, CPU, form, grows=grows) for grows in (True, False))
    for count in range(1, 40):
        for total in (grown, capped):
            total.add(16, payload)
        one = form.decode(payload, 16, 1, CPU).values[0].to(torch.int32).clamp(-most, most)
        assert torch.equal(grown.sums(0, 1)[0, 0, :16], one * count), "nothing is lost, however many agree"
        assert int(one.max()) == min(most, grid.peak)
        assert int(capped.sums(0, 1).max()) <= most


def test_only_signs_with_base_sign_stay_capped():
    bases = [BaseConfig(name) for name in ("sign", "sgd", "adamw", "muon")]
    grown = {
        (grid, base.name) for grid in GRIDS for base in bases if aggregate.grows(Format("groups", GRIDS[grid]), base)
    }
    assert grown == {(grid, base.name) for grid in GRIDS for base in bases} - {("sign", "sign")}


def test_a_quarter_of_peers_that_collude_is_held_as_well_as_by_a_cap_that_does_not_grow():
    """3 of 12 peers say the opposite of one honest peer, as loud as they may."""
    form = Format("topk", TWO_BIT)
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(8, 64, 64, generator=generator)
    momenta = [common + torch.randn(8, 64, 64, generator=generator) for _ in range(9)]
    payloads = [form.encode([form.choose(momentum, 32)], 32) for momentum in momenta]
    payloads += [form.encode([form.choose(-momenta[0], 32)], 32)] * 3
    cosines = []
    for grows in (True, False):
        total = aggregate.VoteSum(8, CPU, form, grows=grows)
        for payload in payloads:
            total.add(32, payload)
        sums, mean = total.sums(0, 8).double(), sum(momenta).double()
        cosines.append(float((sums * mean).sum() / (sums.norm() * mean.norm())))
    assert cosines[0] > 0.3
    assert cosines[0] > 0.95 * cosines[1]


@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_what_heavy_tails_lose_to_the_largest_size_stays_in_the_momentum(sigma):
    """Lognormal with sigma 2: 37 % of the energy was clipped, and thrown away."""
    form = Format("topk", EIGHT_BIT)
    momentum = (torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1)) * sigma).exp()
    flat = momentum.view(4, -1).clone()
    ballot = form.decode(form.encode([form.choose(momentum, 128)], 128), 128, 4, CPU)
    spend_ballot(flat, ballot, form)
    own = momentum.view(4, -1).gather(1, ballot.where)
    said = own - flat.gather(1, ballot.where)
    _, codes = quantise(own, EIGHT_BIT)
    counted = ballot.values.clamp(-64, 64).float()
    scale = (said * counted).sum(1) / counted.square().sum(1)
    assert codes.all()
    error = (said - counted * scale[:, None]).norm() / said.norm()
    assert float(error) < 0.05, "what left the momentum is what the votes say"
