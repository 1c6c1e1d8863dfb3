"""The addresses of connected peers that a peer gets to start from. Pure.

The run's own bootstrap addresses come first. Then come connected peers in random order, those with accepted votes first,
with two addresses each. A peer that joins first, or often, gets no more of the list than its share.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from coordinator.clock.state import Peer, PeerPhase, Run
from protos.address import Address, Network, shown, usable
from protos.identity import peer_id

BOOTSTRAP_PEERS_MAX = 16
TENURED_DRAWN_FROM = 4
"""Peers with votes are drawn from the so many times BOOTSTRAP_PEERS_MAX that have most."""
BOOTSTRAP_ADDRESSES_MAX = 64


def bootstrap(run: Run, networks: Mapping[bytes, Network], to: Network, without: bytes, seed: bytes = b"") -> list[str]:
    """The addresses for a peer that comes from `to`. `networks`: where each peer of the run comes from."""
    draw = random.Random(run.head_hash + without + seed)  # noqa: S311 - a fair draw, no secret
    theirs = [
        address
        for peer in _drawn(run, without, draw)
        for address in shown(_addresses(peer), networks.get(peer.public_key), to)
    ]
    return list(dict.fromkeys([*run.config.overlay.bootstrap, *theirs]))[:BOOTSTRAP_ADDRESSES_MAX]


def _drawn(run: Run, without: bytes, draw: random.Random) -> Sequence[Peer]:
    here = [
        p for p in run.peers.values() if p.phase is not PeerPhase.ABSENT and p.public_key != without and p.addresses
    ]
    here.sort(key=lambda p: (not p.anchor, -p.votes_accepted, p.public_key))
    tenured = [p for p in here if p.anchor or p.votes_accepted][: TENURED_DRAWN_FROM * BOOTSTRAP_PEERS_MAX]
    others = [p for p in here if not p.anchor and not p.votes_accepted]
    chosen = draw.sample(tenured, min(len(tenured), BOOTSTRAP_PEERS_MAX))
    return chosen + draw.sample(others, min(len(others), BOOTSTRAP_PEERS_MAX - len(chosen)))


def _addresses(peer: Peer) -> list[Address]:
    return usable(peer.addresses, peer_id(peer.public_key))
