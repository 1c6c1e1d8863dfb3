"""Peers that come and go: who joins, whose stream of events opens or breaks, who says goodbye.

Refuses whom `admission.py` does not admit, with its reason, and to make a peer ready: that takes a state (`agreement.py`).
"""

from __future__ import annotations

from dataclasses import replace

from coordinator import admission, memory, transitions
from coordinator.events import (
    Append,
    Disconnected,
    Effect,
    Joined,
    LayoutFixed,
    NoticeKind,
    PeerLeft,
    Refuse,
    SendNotice,
    SendTick,
    TicketUsed,
)
from coordinator.state import Outcome, Peer, PeerPhase, Run


def joined(run: Run, event: Joined) -> Outcome:
    """A peer asks to take part. The first fixes the layout of everybody's parameters."""
    denial, reason = admission.admit(run, event.public_key, event.layout_digest, event.ticket, event.unix_ms)
    if denial is not None:
        return run, [Refuse(event.public_key, reason, denial)]
    effects: list[Effect] = []
    if not run.layout_digest:
        record = LayoutFixed(event.layout_digest, event.parameters)
        run, effects = memory.written(run, record)
    if not admission.is_guest(run, event.public_key):
        assert event.ticket is not None, "admitted without a ticket"
        used = TicketUsed(event.ticket.ticket_id, event.public_key)
        run, effects = memory.remember(run, used, 0), [*effects, Append(used)]
    run = replace(_holds_nothing(run, event.public_key), left=run.left - {event.public_key})
    before = run.peers.get(event.public_key, Peer(event.public_key))
    peer = replace(
        before, gone=False, device=event.device, addresses=event.addresses, applied_step=-1, state_digest=b""
    )
    return transitions.with_peer(run, transitions.move_peer(peer, PeerPhase.ABSENT)), effects


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
    return replace(run, step=replace(current, holders=holders, counted_within=-1))


def connected(run: Run, public_key: bytes, now_ms: int) -> Outcome:
    """A peer that has joined follows from now on; it is told where the run stands."""
    peer = run.peers.get(public_key)
    if peer is None or not admission.is_guest(run, public_key):
        return run, [Refuse(public_key, "join first")]
    standing = run.standings.get(public_key)
    if standing is not None and standing.excluded:
        return run, [Refuse(public_key, standing.excluded)]
    if peer.phase is PeerPhase.ABSENT:
        has_room, reason = admission.room(run, public_key)
        if not has_room:
            return run, [Refuse(public_key, reason)]
        run = transitions.with_peer(run, replace(transitions.move_peer(peer, PeerPhase.SYNCING), gone=False))
    effects: list[Effect] = []
    if run.step is not None:
        left = max(run.step.deadline_at_ms - now_ms, 0)
        effects.append(SendTick(run.step.tick, left, to=public_key))
    elif run.finished_told:
        effects.append(SendNotice(NoticeKind.FINISHED, run.reason, run.snapshot, to=public_key))
    else:
        effects.append(SendNotice(NoticeKind.WAITING, run.reason, to=public_key))
    return run, effects


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
