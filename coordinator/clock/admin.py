"""Requests of the operator: tickets made and revoked, peers excluded and readmitted.

Refuses a request that `admission.py` does not allow, with its reason. `serving/operator_service.py` has verified the
operator's signature. ADR 21.
"""

from __future__ import annotations

from coordinator.clock import admission, agreement, joins, memory, operator_orders
from coordinator.clock.effects import Append, Effect, EndStream, Refuse
from coordinator.clock.events import (
    Disconnected,
    ExclusionAsked,
    ReadmissionAsked,
    RevocationAsked,
    TicketAsked,
    WithdrawalAsked,
)
from coordinator.clock.records import PeerExcluded, PeerReadmitted, TicketMade, TicketRevoked
from coordinator.clock.state import Outcome, Run

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
        run, more = joins.disconnected(run, Disconnected(key, leaving=True))
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
