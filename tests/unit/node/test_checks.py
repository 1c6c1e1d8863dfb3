"""What a check looks at: votes that were heard earlier, and bytes that are no votes at all."""

import pytest
import torch
from torch import Tensor

from node.training import vote_checks
from node.training.vote_checks import Seen
from protos.assignment import Range, SampleShare
from protos.log import Contribution, Entry, SignedEntry, Verdict
from protos.run_config import TrustConfig
from protos.tick import Tick

NAMES = [bytes([n]) * 32 for n in range(4)]
VICTIM, COPIER, SHIELD, OTHER = NAMES
ARRIVALS = {OTHER: 1, VICTIM: 2, COPIER: 3, SHIELD: 4}
CHUNKS, VOTES = 2, 64


def seen(seed: int) -> Seen:
    made = torch.Generator().manual_seed(seed)
    where = torch.arange(VOTES).repeat(CHUNKS, 1) * 64 + torch.randint(64, (CHUNKS, VOTES), generator=made)
    return Seen(where, torch.ones(CHUNKS, VOTES))


def changed(votes: Seen) -> Seen:
    where = votes.where.clone()
    where[:, :2] = (where[:, :2] + 1) % 64 + torch.tensor([0, 64])
    return Seen(where, votes.values)


def entry(arrivals: dict[bytes, int]) -> Entry:
    parts = tuple(Contribution(key, key, 1, 1, 1, 1.0, 1000, arrivals[key]) for key in NAMES)
    return Entry(1, bytes(32), parts, 0, b"", (), 0)


def test_a_copy_of_a_copy_does_not_shield_the_first_copier() -> None:
    votes = {VICTIM: seen(0), OTHER: seen(1)}
    votes[COPIER] = votes[SHIELD] = changed(votes[VICTIM])
    gradient = torch.ones(CHUNKS, 4096)

    def alike(key: bytes) -> tuple[float, bytes]:
        found = vote_checks.find(key, vote_checks.earlier(entry(ARRIVALS), votes, key), gradient, gradient)
        return found.overlap, found.like

    part, like = alike(COPIER)
    assert (part > 0.9, like) == (True, VICTIM), "the shield, which is later, is the same to the last bit"
    assert alike(SHIELD) == (1.0, COPIER)
    part, like = alike(VICTIM)
    assert (part < 0.2, like) == (True, OTHER), "who is copied repeats nobody"
    assert alike(OTHER) == (0.0, b""), "nobody was earlier"


def test_without_an_order_nobody_is_earlier() -> None:
    votes = {key: seen(0) for key in NAMES}
    assert list(vote_checks.earlier(entry(dict.fromkeys(NAMES, 0)), votes, COPIER)) == [COPIER]


@pytest.mark.parametrize("invalid", [set(), {COPIER}, set(NAMES)])
def test_votes_that_did_not_pass_the_door_are_nobodys_work(invalid: set[bytes]) -> None:
    """They are in the log, and count as nothing: to be checked less than others would be a way to do nothing."""
    shares = tuple(SampleShare(key, 4) for key in NAMES)
    tick = Tick(1, bytes(32), 1, shares, (Range(0, 16),), 0)
    votes = {key: seen(number) for number, key in enumerate(NAMES) if key not in invalid}
    looked: list[tuple[Range, ...]] = []

    def gradient(ranges: tuple[Range, ...]) -> Tensor:
        looked.append(ranges)
        return torch.ones(CHUNKS, 4096)

    found: list[Verdict] = []
    for me in NAMES:
        signed = SignedEntry(entry(ARRIVALS), b"h" * 32, b"")
        on = TrustConfig(enabled=True)
        found += vote_checks.verdicts(me, vote_checks.due(me, on, tick, signed), on, tick, signed, votes, gradient)
    assert {verdict.subject for verdict in found} == set(NAMES)
    for verdict in found:
        assert (verdict.own == 0.0) == (verdict.subject in invalid)
    assert bool(looked) == (invalid != set(NAMES))


def test_a_silent_vote_neither_fits_nor_repeats_anything() -> None:
    """A row that nobody met: its votes count for no agreement, and make no two payloads alike."""
    full = seen(0)
    silent = Seen(full.where, full.values.clone())
    silent.values[1:] = 0.0
    gradient = torch.ones(CHUNKS, 4096)
    assert vote_checks.agreement(full, gradient) == pytest.approx((CHUNKS * VOTES) ** 0.5)
    assert vote_checks.agreement(silent, gradient) == pytest.approx(VOTES**0.5)
    assert vote_checks.overlap(full, silent) == vote_checks.overlap(silent, full) == 1.0
    other = Seen(seen(1).where, silent.values)
    other.where[1:] = silent.where[1:]  # the same places in the silent chunk
    assert vote_checks.overlap(silent, other) == vote_checks.overlap(
        Seen(full.where[:1], full.values[:1]), seen_in_first(other)
    )
    nothing = Seen(full.where, torch.zeros_like(full.values))
    assert vote_checks.agreement(nothing, gradient) == vote_checks.overlap(nothing, nothing) == 0.0


def seen_in_first(votes: Seen) -> Seen:
    return Seen(votes.where[:1], votes.values[:1])


def test_a_gain_is_the_part_of_what_votes_could_gain() -> None:
    votes = seen(0)
    gradient = torch.randn(CHUNKS, 4096, generator=torch.Generator().manual_seed(1))
    right = Seen(votes.where, gradient.gather(1, votes.where).sign())
    assert vote_checks.gain(right, gradient) == pytest.approx(1.0)
    assert vote_checks.gain(Seen(right.where, -right.values), gradient) == pytest.approx(-1.0)
    assert vote_checks.gain(Seen(right.where, right.values * 0), gradient) == 0.0, "silent votes gain nothing"
    assert vote_checks.gain(right, torch.zeros(CHUNKS, 4096)) == 0.0
    there = gradient.gather(1, votes.where).abs()
    strong = there > there.quantile(2 / 3)
    half = Seen(right.where, torch.where(strong, -right.values, right.values))
    assert vote_checks.agreement(half, gradient) > 3, (
        "two thirds of the votes have the right sign: `own` lets them pass"
    )
    assert vote_checks.gain(half, gradient) < 0, "the third that is turned is what a step gains from"
