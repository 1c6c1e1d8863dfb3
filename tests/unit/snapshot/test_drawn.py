"""Who stores a snapshot: the same three of the voters on every peer, fairly; everybody where fewer voted."""

from collections import Counter

import pytest

from node.snapshot.store import STORED_BY, stores
from protos.identity import Identity
from protos.log import Contribution, Entry, SignedEntry, lr_to_bits, seal_entry

COORDINATOR, RUN = Identity.from_seed(b"c" * 32), bytes(32)
KEYS = [bytes([n]) * 32 for n in range(12)]


def entry(step: int, keys: list[bytes]) -> SignedEntry:
    votes = tuple(Contribution(key, bytes(32), 10, 4, 40, 1.0) for key in keys)
    return seal_entry(COORDINATOR, RUN, Entry(step, RUN, votes, lr_to_bits(1e-3), b"", (), 0))


def storing(signed: SignedEntry) -> list[bytes]:
    return [key for key in KEYS if stores(signed, key)]


@pytest.mark.parametrize("peers", [3, 4, 12])
def test_so_many_and_only_of_those_whose_votes_count(peers: int) -> None:
    found = storing(entry(25, KEYS[:peers]))
    assert len(found) == STORED_BY
    assert set(found) <= set(KEYS[:peers])


@pytest.mark.parametrize("peers", [0, 1, 2])
def test_where_fewer_have_votes_all_others_store_it_too(peers: int) -> None:
    """The one author was excluded for two payloads, a slow peer had stored nothing, and the run's state was gone."""
    assert storing(entry(25, KEYS[:peers])) == KEYS


def test_everybody_has_the_turn_as_often() -> None:
    turns = Counter(key for step in range(1, 401) for key in storing(entry(step, KEYS)))
    assert sum(turns.values()) == 400 * STORED_BY
    assert min(turns.values()) > 60, "100 each are expected"
