"""Who stores a snapshot: the same three on every peer, fairly, and never nobody who voted."""

from collections import Counter

import pytest

from node.snapshot.store import STORED_BY, drawn
from protos.identity import Identity
from protos.log import Contribution, Entry, SignedEntry, lr_to_bits, seal_entry

COORDINATOR, RUN = Identity.from_seed(b"c" * 32), bytes(32)
KEYS = [bytes([n]) * 32 for n in range(12)]


def entry(step: int, keys: list[bytes]) -> SignedEntry:
    votes = tuple(Contribution(key, bytes(32), 10, 4, 40, 1.0) for key in keys)
    return seal_entry(COORDINATOR, RUN, Entry(step, RUN, votes, lr_to_bits(1e-3), b"", (), 0))


@pytest.mark.parametrize("peers", [0, 1, 2, 3, 4, 12])
def test_so_many_and_only_of_those_whose_votes_count(peers: int) -> None:
    signed = entry(25, KEYS[:peers])
    assert len(drawn(signed)) == min(peers, STORED_BY)
    assert drawn(signed) <= set(KEYS[:peers])


def test_everybody_has_the_turn_as_often() -> None:
    turns = Counter(key for step in range(1, 401) for key in drawn(entry(step, KEYS)))
    assert sum(turns.values()) == 400 * STORED_BY
    assert min(turns.values()) > 60, "100 each are expected"
