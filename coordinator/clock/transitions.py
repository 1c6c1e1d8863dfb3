"""A run or a peer in its next phase; a run with one peer changed, and with it all that follows from its peers.

Refuses moves that the tables in `state.py` do not have, and to remember more than PEERS_KEPT peers.
"""

from __future__ import annotations

from coordinator.clock import electorate, rules
from coordinator.clock.state import MOVES, PEER_MOVES, PEERS_KEPT, Peer, PeerPhase, Phase, Run
from coordinator.clock.value_copy import replace
from protos.identity import short


def move(run: Run, phase: Phase) -> Run:
    """The run in this phase. An illegal move is our own mistake."""
    assert phase in MOVES[run.phase], f"{run.phase} cannot become {phase}"
    return replace(run, phase=phase)


def move_peer(peer: Peer, phase: PeerPhase) -> Peer:
    """The peer in this phase. An illegal move is our own mistake."""
    assert phase in PEER_MOVES[peer.phase], f"peer {short(peer.public_key)}: {peer.phase} cannot become {phase}"
    return replace(peer, phase=phase)


def with_peer(run: Run, peer: Peer) -> Run:
    """The run with this peer, new or changed. The open step's masks follow."""
    step = None if run.step is None else rules.met(run.step, peer)
    electors = None if electorate.changes_electors(run.peers.get(peer.public_key), peer) else run.electors
    peers = {**run.peers, peer.public_key: peer}
    return bounded(replace(run, step=step, electors=electors, peers=peers), peer.public_key)


def bounded(run: Run, newest: bytes = b"") -> Run:
    """Forget the absent peers with the fewest accepted votes, and their reports, while there are too many peers.

    `newest`: a peer to keep; members of the last roster are kept, too.
    """
    while len(run.peers) > PEERS_KEPT:
        kept = {newest, *run.roster}
        absent = [peer for key, peer in run.peers.items() if peer.phase is PeerPhase.ABSENT and key not in kept]
        gone = min(absent, key=lambda peer: (peer.votes_accepted, peer.public_key)).public_key
        digests, snapshots = run.reported_digests, run.reported_snapshots
        run = replace(
            run,
            electors=None,
            peers={key: peer for key, peer in run.peers.items() if key != gone},
            reported_digests={s: {k: v for k, v in r.items() if k != gone} for s, r in digests.items()},
            reported_snapshots={s: {k: v for k, v in r.items() if k != gone} for s, r in snapshots.items()},
        )
    return run
