"""The peers that store the snapshot of a step: the log draws them, so each peer knows all of them. Pure.

Every peer computes the root, because its report may be needed to agree on the root. Only the drawn peers and the anchors write
the pieces and serve them.
"""

from __future__ import annotations

import hashlib
from typing import Final

from protos.log import SignedEntry

STORED_BY: Final = 3
"""Peers that store a snapshot beside the anchors: three, because one may be gone and one slow."""


def drawn(signed: SignedEntry) -> frozenset[bytes]:
    """The public keys of the peers that store the state after an entry.

    Of the peers whose votes the entry holds, these are the first by the sha256 of the entry's hash and their key. Nobody knew
    the hash before the coordinator sealed the entry, so nobody could choose a key."""
    keys = {contribution.public_key for contribution in signed.entry.contributions}
    order = sorted(keys, key=lambda key: hashlib.sha256(signed.hash + key).digest())
    return frozenset(order[:STORED_BY])
