"""Peers that come and go: who joins, whose stream of events opens or breaks, who says goodbye.

Refuses whom `admission.py` does not admit, with its reason, and to make a peer ready: that takes a state (`agreement.py`).
"""

from __future__ import annotations

from dataclasses import replace

from coordinator import admission, agreement, memory, transitions
from coordinator.events import (
    Append,
    Disconnected,
    Effect,
    EndStream,
    Joined,
    NoticeKind,
    PeerLeft,
    Refuse,
    SendNotice,
    SendTick,
    TicketUsed,
)
from coordinator.state import Outcome, Peer, PeerPhase, Run


def joined(run: Run, event: Joined, now_ms: int) -> Outcome:
    """A peer asks to take part. The first anchor's layout is everybody's, if the run was made without one."""
    denial, reason = admission.admit(run, event, now_ms)
    if denial is not None:
        return run, [Refuse(event.public_key, reason, denial)]
    effects: list[Effect] = []
    if admission.needs_ticket(run, event.public_key, anchor=event.anchor):
        assert event.ticket is not None, "admitted without a ticket"
        used = TicketUsed(event.ticket.ticket_id, event.public_key)
        run, effects = memory.remember(run, used, 0), [Append(used)]
    run = replace(_holds_nothing(run, event.public_key), left=run.left - {event.public_key})
    before = run.peers.get(event.public_key, Peer(event.public_key))
    peer = replace(
        before,
        gone=False,
        anchor=event.anchor,
        network=event.network,
        layout_digest=event.layout_digest,
        parameters=event.parameters,
        device=event.device,
        addresses=event.addresses,
        applied_step=-1,
        state_digest=b"",
    )
    run = transitions.with_peer(run, transitions.move_peer(peer, PeerPhase.ABSENT))
    if event.anchor and not run.layout_digest:
        run, more = agreement.fix_layout(run, event.layout_digest, event.parameters)
        effects += more
    return run, effects


def _holds_nothing(run: Run, public_key: bytes) -> Run:
    """A new life of a peer has lost its payloads, until it says again what it holds. What it claimed, it claimed."""
    current = run.step
    if current is None:
        return run
    bit = current.bit(public_key)
    holders = {
        (author, payload): mask if author == public_key else mask & ~bit
        for (author, payload), mask in current.holders.items()
    }
    was = run.peers.get(public_key)
    anchored = frozenset() if was is not None and was.anchor else current.anchored  # another anchor says it again
    return replace(run, step=replace(current, holders=holders, anchored=anchored, counted_by=None))


def connected(run: Run, public_key: bytes, now_ms: int) -> Outcome:
    """A peer that has joined follows from now on; it is told where the run stands."""
    peer = run.peers.get(public_key)
    if peer is None or not admission.is_admitted(run, public_key):
        return run, [Refuse(public_key, "join first")]
    standing = run.standings.get(public_key)
    if standing is not None and standing.excluded:
        return run, [Refuse(public_key, standing.excluded)]
    if run.layout_digest and peer.layout_digest != run.layout_digest:
        return run, [
            Refuse(public_key, "the run's layout is fixed now, and yours is another one: join again to hear more")
        ]
    effects: list[Effect] = []
    if peer.phase is PeerPhase.ABSENT:
        room = admission.room(run, public_key, peer.network, now_ms, anchor=peer.anchor)
        if not room.free:
            return run, [Refuse(public_key, room.reason)]
        if room.instead_of:
            run, effects = _make_room(run, room.instead_of)
        since = peer.syncing_since_ms or now_ms  # of all its lives, until it has the state
        syncing = replace(transitions.move_peer(peer, PeerPhase.SYNCING), gone=False, syncing_since_ms=since)
        run = transitions.with_peer(run, syncing)
    if run.step is not None:
        left = max(run.step.deadline_at_ms - now_ms, 0)
        effects.append(SendTick(run.step.tick, left, to=public_key))
    elif run.finished_told:
        effects.append(SendNotice(NoticeKind.FINISHED, run.reason, run.snapshot, to=public_key))
    else:
        effects.append(SendNotice(NoticeKind.WAITING, run.reason, to=public_key))
    return run, effects


def _make_room(run: Run, public_key: bytes) -> Outcome:
    """A peer gives its place to one that has a better claim; it hears why when it joins again."""
    run = transitions.with_peer(run, replace(transitions.move_peer(run.peers[public_key], PeerPhase.ABSENT), gone=True))
    return run, [EndStream(public_key)]


def disconnected(run: Run, event: Disconnected) -> Outcome:
    """A peer follows no more."""
    peer = run.peers.get(event.public_key)
    if peer is None:
        return run, []
    run = transitions.with_peer(run, replace(transitions.move_peer(peer, PeerPhase.ABSENT), gone=True))
    awaited = run.step is not None and event.public_key in run.roster and event.public_key not in run.left
    if event.leaving and awaited and run.config.clock.strict:
        # Strict steps wait for absent peers, never for one that said goodbye.
        record = PeerLeft(run.head_step + 1, event.public_key)
        return memory.written(run, record)
    return run, []
