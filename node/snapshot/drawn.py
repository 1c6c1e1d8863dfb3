"""Which peers store the snapshot of a step: drawn from the log, so that each knows of all. Pure.

Everybody computes the root, since its word may be needed to agree on it; only the drawn write the pieces, and are asked for
them. Anchors always do.
"""

from __future__ import annotations

import hashlib
from typing import Final

from protos.log import SignedEntry

STORED_BY: Final = 3
"""Peers that store a snapshot beside the anchors: one may be gone and one slow."""


def drawn(signed: SignedEntry) -> frozenset[bytes]:
    """The public keys of those that store the state after an entry: of the peers whose votes are in it, the first by the
    sha256 of the entry's hash and their key. The hash was open until the entry was sealed, so nobody could choose a key."""
    keys = {contribution.public_key for contribution in signed.entry.contributions}
    order = sorted(keys, key=lambda key: hashlib.sha256(signed.hash + key).digest())
    return frozenset(order[:STORED_BY])
