"""Electors: the peers whose reports on states and snapshots count. Identities are free in an open run, so peers are never
simply counted.

In a run with anchors (the operator's own processes that only apply), only anchors are electors. Without anchors, the
electors of a step are the peers whose votes its entry counted. In an open run they need a tenure, and each block of network
addresses has one elector. Refuses reports of a peer that is merely ready, because such a report costs nothing. ADR 26.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from coordinator.clock.state import Electors, Peer, Run
from coordinator.clock.trust import Standing
from coordinator.clock.value_copy import replace

# Snapshot periods in which an entry must have counted a peer's votes, in a run that is old enough.
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


def electors(run: Run, step: int) -> Set[bytes]:
    """The public keys of the peers whose reports on the state after `step` count; more than half of them have to agree.

    The set is empty if no such peer is left. Then nothing is agreed, and the run goes on.
    """
    if run.anchored:
        return eligible(run, step)
    known = run.electors
    if (
        known is not None
        and known.step == step
        and known.voted is run.voted.get(step)
        and known.standings is run.standings
        and known.config is run.config
    ):
        return known.keys
    return places(run, eligible(run, step))


def with_electors(run: Run, step: int) -> Run:
    """The run, which knows the electors of `step` from now on. Each report of a state asks for them: in a run with 500 peers,
    they took half of the clock's time. ADR 57."""
    if run.anchored:
        return run
    found = electors(run, step)
    if run.electors is not None and run.electors.keys is found:
        return run
    known = Electors(step, frozenset(found), run.voted.get(step), run.standings, run.config)
    return replace(run, electors=known)


def changes_electors(before: Peer | None, peer: Peer) -> bool:
    """Whether a peer that has changed may be an elector now, or no elector any more."""
    return before is None or (before.phase, before.gone, before.anchor, before.network, before.tenure) != (
        peer.phase,
        peer.gone,
        peer.anchor,
        peer.network,
        peer.tenure,
    )


def eligible(run: Run, step: int) -> set[bytes]:
    """The electors, and the peers that would be electors if no other peer had the place of their network addresses.

    A snapshot needs keepers among these: a new identity may say that it keeps pieces, and keep none.
    """
    if run.anchored:
        return run.anchors_here
    if step == 0:
        return {peer.public_key for peer in run.trainers}
    voted = run.voted.get(step)
    if voted is None:
        return set()
    here = [key for key in voted.counted if key not in run.peers or not run.peers[key].gone]
    if run.config.trust.enabled:
        here = [key for key in here if run.standings.get(key, Standing()).counted]
    if run.config.admission.mode != "open":
        return set(here)
    needed = min(period_of(run, step) + 1, TENURE_PERIODS)
    return {key for key in here if key in run.peers and run.peers[key].tenure >= needed}


def founded(run: Run) -> bool:
    """Whether a run with checks has believed peers. From then on only these decide, and the run waits while all are away."""
    return run.config.trust.enabled and any(it.counted and not it.excluded for it in run.standings.values())


def places(run: Run, keys: Iterable[bytes]) -> set[bytes]:
    """One peer of each block of network addresses: the one with the longest tenure. Private networks are no blocks."""
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
