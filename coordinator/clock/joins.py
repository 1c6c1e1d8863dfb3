"""Peers that come and go: a peer joins, its stream of events opens or breaks, it leaves for good; the operator excludes and
readmits peers, and makes and revokes their tickets.

Refuses what `admission.py` does not allow, with its reason. Refuses to make a peer ready: `agreement.py` does.
`serving/operator_service.py` has verified the operator's signature. ADR 21.
"""

from __future__ import annotations

from coordinator.clock import admission, aggregation, agreement, holder_counts, memory, operator_orders, run_changes
from coordinator.clock.effects import (
    Append,
    Denial,
    Effect,
    EndStream,
    NoticeKind,
    PeerExcluded,
    PeerLeft,
    PeerReadmitted,
    Refuse,
    SendAnnouncement,
    SendNotice,
    SendTick,
    TicketMade,
    TicketRevoked,
    TicketUsed,
)
from coordinator.clock.events import (
    Disconnected,
    ExclusionAsked,
    JoinAsked,
    ReadmissionAsked,
    RevocationAsked,
    TicketAsked,
    WithdrawalAsked,
)
from coordinator.clock.state import Outcome, Peer, PeerPhase, Run
from coordinator.clock.value_copy import replace


def joined(run: Run, event: JoinAsked, now_ms: int) -> Outcome:
    """A peer asks to take part. The first anchor's layout is the run's, if the run was made without one."""
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
        software_version=event.software_version,
        addresses=event.addresses,
        owner=event.owner,
        applied_step=-1,
        state_digest=b"",
        paused_since_ms=None,
        silence=None,
    )
    run = run_changes.with_peer(run, run_changes.move_peer(peer, PeerPhase.ABSENT))
    if event.anchor and not run.layout_digest:
        run, more = agreement.fix_layout(run, event.layout_digest, event.parameters)
        effects += more
    return run, effects


def _holds_nothing(run: Run, public_key: bytes) -> Run:
    """A new life of a peer has lost its payloads and snapshots, until it reports them again. Its word on roots stands."""
    reported = {
        step: {**facts, public_key: replace(facts[public_key], kept=False)} if public_key in facts else facts
        for step, facts in run.reported_snapshots.items()
    }
    run, current = replace(run, reported_snapshots=reported), run.step
    if current is None:
        return run
    return replace(run, step=holder_counts.lost(current, public_key))


def connected(run: Run, public_key: bytes, now_ms: int) -> Outcome:
    """A peer that has joined follows from now on, and gets the run's present state."""
    peer = run.peers.get(public_key)
    if peer is None or not admission.is_admitted(run, public_key):
        return run, [Refuse(public_key, "you are not admitted to this run now: join first")]
    standing = run.standings.get(public_key)
    if standing is not None and standing.excluded:
        return run, [Refuse(public_key, standing.excluded)]
    if run.layout_digest and peer.layout_digest != run.layout_digest:
        return run, [
            Refuse(
                public_key, "the run's parameter layout is fixed now, and yours is another one: join again to get both"
            )
        ]
    effects: list[Effect] = []
    if peer.phase is PeerPhase.ABSENT:
        room = admission.room(run, public_key, peer.network, now_ms, anchor=peer.anchor)
        if not room.free:
            return run, [Refuse(public_key, room.reason, Denial.FULL)]
        if room.instead_of:
            run, effects = _make_room(run, room.instead_of)
        since = peer.syncing_since_ms or now_ms  # of all its lives, until it has the state
        syncing = replace(run_changes.move_peer(peer, PeerPhase.SYNCING), gone=False, syncing_since_ms=since)
        run = run_changes.with_peer(run, syncing)
    if run.step is not None:
        left = max(run.step.deadline_at_ms - now_ms, 0)
        claim = run.step.claims.get(public_key) or run.step.earlier.get(public_key)
        if claim is not None:  # a peer may have its key alone, on a new disk
            effects.append(SendAnnouncement(claim.envelope, to=public_key))
        effects += [SendTick(run.step.tick, left, to=public_key), *aggregation.request_for(run, public_key)]
    elif run.finished_told:
        effects.append(SendNotice(NoticeKind.FINISHED, run.reason, run.snapshot, to=public_key))
    else:
        effects.append(SendNotice(NoticeKind.WAITING, run.reason, to=public_key))
    return run, effects


def _make_room(run: Run, public_key: bytes) -> Outcome:
    """A peer gives its place to a peer with a better claim. The first peer gets the reason when it joins again."""
    run = run_changes.with_peer(run, replace(run_changes.move_peer(run.peers[public_key], PeerPhase.ABSENT), gone=True))
    return run, [EndStream(public_key)]


def disconnected(run: Run, event: Disconnected) -> Outcome:
    """A peer follows no more."""
    peer = run.peers.get(event.public_key)
    if peer is None:
        return run, []
    run = run_changes.with_peer(run, replace(run_changes.move_peer(peer, PeerPhase.ABSENT), gone=True))
    awaited = run.step is not None and event.public_key in run.roster and event.public_key not in run.left
    if event.leaving and awaited and run.config.clock.strict:
        # Strict steps wait for absent peers, but not for a peer that left for good.
        record = PeerLeft(run.head_step + 1, event.public_key)
        return memory.written(run, record)
    return run, []


Requests = TicketAsked | RevocationAsked | ExclusionAsked | ReadmissionAsked | WithdrawalAsked


def asked(run: Run, event: Requests) -> Outcome:
    """One request of the operator: done, or refused with a reason."""
    match event:
        case TicketAsked():
            return _ticket_asked(run, event)
        case RevocationAsked():
            return _revocation_asked(run, event)
        case ExclusionAsked():
            return _exclusion_asked(run, event)
        case ReadmissionAsked():
            return _readmission_asked(run, event)
        case WithdrawalAsked():
            return _withdrawal_asked(run, event)


def _ticket_asked(run: Run, event: TicketAsked) -> Outcome:
    may, reason = admission.may_issue(run, event.ticket, event.unix_ms)
    if not may:
        return run, [Refuse(b"", reason)]
    record = TicketMade(event.ticket)
    return memory.written(run, record)


def _revocation_asked(run: Run, event: RevocationAsked) -> Outcome:
    """Guests that have to go leave first. So after a crash in between, no step waits for a guest that may not come back."""
    if event.ticket_id not in run.tickets:
        return run, [Refuse(b"", "this run has no such ticket")]
    if event.with_peers and run.config.operators.keys:
        reason = "peers go only by an order of its operators: revoke the invite alone, and order each `peer exclude`"
        return run, [Refuse(b"", reason)]
    effects: list[Effect] = []
    leaving = [key for key, came_with in run.guests.items() if event.with_peers and came_with == event.ticket_id]
    for key in leaving:
        run, more = disconnected(run, Disconnected(key, leaving=True))
        effects += more
    record = TicketRevoked(event.ticket_id, event.with_peers)
    return memory.remember(run, record, 0), [*effects, Append(record), *(EndStream(key) for key in leaving)]


def _exclusion_asked(run: Run, event: ExclusionAsked) -> Outcome:
    """The peer is out at once. Its stream ends, and when the peer joins again it gets the reason."""
    may, reason = admission.may_exclude(run, event.public_key)
    if not may or (reason := operator_orders.alone(run.config.operators, "the exclusion of a peer")):
        return run, [Refuse(b"", reason)]
    record = PeerExcluded(event.public_key, event.reason)
    return memory.remember(run, record, 0), [Append(record), EndStream(event.public_key)]


def _readmission_asked(run: Run, event: ReadmissionAsked) -> Outcome:
    may, reason = admission.may_readmit(run, event.public_key)
    if not may:
        return run, [Refuse(b"", reason)]
    record = PeerReadmitted(event.public_key)
    return memory.written(run, record)


def _withdrawal_asked(run: Run, event: WithdrawalAsked) -> Outcome:
    may, reason = admission.may_withdraw(run, event.step)
    if not may:
        return run, [Refuse(b"", reason)]
    return agreement.withdraw(run, event.step)
