"""Whose word on states and snapshots counts. Identities are free in an open run, so heads are never simply counted.

In a run with anchors (the operator's own processes that only apply) it is theirs alone. Without anchors it is that of the
peers whose votes the step's entry counted; in an open run, those of them that have a tenure, and one for each block of network
addresses. Refuses the word of a peer that is merely ready: to say so costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from coordinator.state import Peer, Run
from coordinator.trust import Standing

# Snapshot periods in which a peer's votes have to have counted, in a run that is old enough: a new identity waits so long.
TENURE_PERIODS = 3


def period_of(run: Run, step: int) -> int:
    """Which snapshot period a step is in, from 0."""
    return (step - 1) // run.config.clock.snapshot_every


def served(run: Run, peer: Peer, step: int) -> Peer:
    """The peer after an entry that counts its votes."""
    period = period_of(run, step)
    if period == peer.last_period:
        return peer
    return replace(peer, tenure=peer.tenure + 1, last_period=period)


def electors(run: Run, step: int) -> set[bytes]:
    """The public keys of those whose word on the state after `step` counts; more than half of them have to agree.

    Nobody, where none of those that may have a say is left: then nothing is agreed, and the run goes on.
    """
    if run.anchored:
        return run.anchors_here
    if step == 0:
        return places(run, (peer.public_key for peer in run.ready))
    voted = run.voted.get(step)
    if voted is None:
        return set()
    here = [key for key in voted.counted if key not in run.peers or not run.peers[key].gone]
    if run.config.trust.enabled:
        here = [key for key in here if run.standings.get(key, Standing()).counted]
    if run.config.admission.mode != "open":
        return set(here)
    needed = min(period_of(run, step) + 1, TENURE_PERIODS)
    return places(run, (key for key in here if key in run.peers and run.peers[key].tenure >= needed))


def founded(run: Run) -> bool:
    """Whether a run with checks has peers whose votes count: from then on only they decide, and it waits while all are away."""
    return run.config.trust.enabled and any(it.counted and not it.excluded for it in run.standings.values())


def places(run: Run, keys: Iterable[bytes]) -> set[bytes]:
    """One of each block of network addresses: the one with the longest tenure. Private networks are no blocks."""
    if run.config.admission.mode != "open":
        return set(keys)
    found: dict[object, Peer] = {}
    for peer in sorted((run.peers[key] for key in keys), key=lambda peer: (-peer.tenure, peer.public_key)):
        found.setdefault(peer.network or peer.public_key, peer)
    return {peer.public_key for peer in found.values()}


def is_believed(run: Run, public_key: bytes) -> bool:
    """Whether a peer's votes count: it is not on probation, or the run has no checks."""
    if not run.config.trust.enabled:
        return True
    standing = run.standings.get(public_key, Standing())
    return standing.counted and not standing.excluded
