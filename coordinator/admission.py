"""Who may take part: whether a peer may join, a ticket be made or a peer be excluded, each verdict with its reason.

Decides, and changes nothing: who is admitted or excluded is for the machine to remember. Refuses to read a clock (the wall
clock's time comes with the question) and to believe what a ticket says of itself.
"""

from __future__ import annotations

from collections import Counter

from coordinator import trust
from coordinator.events import Denial
from coordinator.state import GUESTS_MAX, TICKETS_MAX, Issued, PeerPhase, Phase, Run, TicketState
from protos.identity import peer_id, short
from protos.limits import READMITTED_MAX
from protos.ticket import Ticket


def admit(
    run: Run, public_key: bytes, layout_digest: bytes, ticket: Ticket | None = None, unix_ms: int = 0
) -> tuple[Denial | None, str]:
    """Whether a peer may join: None, or what is against it."""
    denial, reason = may_enter(run, public_key, ticket, unix_ms)
    if denial is not None:
        return denial, reason
    if run.layout_digest and layout_digest != run.layout_digest:
        return Denial.LAYOUT, (
            f"your model's parameter layout is {layout_digest.hex()[:16]}, "
            f"the run's is {run.layout_digest.hex()[:16]}: model code or library versions differ; "
            "install the same versions as the other peers"
        )
    return None, "admitted"


def may_enter(run: Run, public_key: bytes, ticket: Ticket | None, unix_ms: int) -> tuple[Denial | None, str]:
    """Whether a peer may join, as far as its model does not matter. `ticket`: verified; `unix_ms`: the wall clock."""
    standing = run.standings.get(public_key)
    if standing is not None and standing.excluded:
        return Denial.EXCLUDED, standing.excluded
    admission = run.config.admission
    if admission.mode == "allow_list" and peer_id(public_key) not in admission.allowed:
        text = f"peer {peer_id(public_key)} is not on this run's allow-list; ask its operator to add you"
        return Denial.NOT_LISTED, text
    if not is_guest(run, public_key):
        invited, reason = _admits(run, ticket, unix_ms)
        if not invited:
            return Denial.TICKET, reason
    has_room, reason = room(run, public_key)
    return (None if has_room else Denial.FULL), reason


def is_guest(run: Run, public_key: bytes) -> bool:
    """Whether a peer needs no (further) ticket: it has used one, or the run asks for none."""
    return run.config.admission.mode != "invite" or public_key in run.guests


def room(run: Run, public_key: bytes) -> tuple[bool, str]:
    """Whether a place is free for this peer."""
    present = sum(peer.phase is not PeerPhase.ABSENT for key, peer in run.peers.items() if key != public_key)
    if present >= run.config.clock.max_peers:
        return False, f"the run is full: {present} of {run.config.clock.max_peers} peers are here; try again later"
    return True, "there is room"


def _admits(run: Run, ticket: Ticket | None, unix_ms: int) -> tuple[bool, str]:
    """Whether a ticket lets one more identity in. What it says of itself counts for nothing but its id."""
    if ticket is None:
        return False, (
            "this run takes only peers with an invite made by `swarmentum-coordinator invite create`; "
            "ask the run's operator for one"
        )
    issued = run.tickets.get(ticket.ticket_id)
    if issued is None:
        return (
            False,
            "this coordinator has not made this invite, or has forgotten it; ask the run's operator for another",
        )
    used = sum(came_with == ticket.ticket_id for came_with in run.guests.values())
    state, words = ticket_state(issued, used, unix_ms)
    # A clock that went back opened expired tickets again.
    if state is TicketState.OPEN and len(run.guests) >= GUESTS_MAX:
        return False, f"this run has {GUESTS_MAX} guests, as many as a run can have"
    if state is TicketState.OPEN:
        return True, words
    return False, f"this invite {words}; ask the run's operator for another"


def ticket_state(issued: Issued, used: int, unix_ms: int) -> tuple[TicketState, str]:
    """What has become of a ticket that `used` guests came with, and the same in words."""
    ticket = issued.ticket
    if issued.revoked:
        return TicketState.REVOKED, "was revoked"
    if used >= ticket.uses:
        return TicketState.USED_UP, f"was used by {used} of {ticket.uses} peers"
    if ticket.expires_unix_ms and unix_ms >= ticket.expires_unix_ms:
        return TicketState.EXPIRED, f"expired {span(unix_ms - ticket.expires_unix_ms)} ago, by the coordinator's clock"
    return TicketState.OPEN, f"has {ticket.uses - used} of {ticket.uses} uses left"


def _guests_by_ticket(run: Run) -> Counter[bytes]:
    """How many guests came with each ticket."""
    return Counter(run.guests.values())


def span(ms: int) -> str:
    """A length of time for people, in its largest whole unit."""
    for unit, unit_ms in (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1_000)):
        if ms >= unit_ms:
            count = ms // unit_ms
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "a moment"


def may_issue(run: Run, ticket: Ticket, unix_ms: int) -> tuple[bool, str]:
    """Whether the operator may have one more ticket: its guests are remembered for as long as the run is."""
    mode = run.config.admission.mode
    if mode != "invite":
        return False, f'this run is in admission mode "{mode}": tickets are for `admission.mode = "invite"` (run.toml)'
    if ticket.ticket_id in run.tickets:
        return False, "this ticket was made before"
    if len(run.tickets) >= TICKETS_MAX:
        return False, f"this run has {TICKETS_MAX} tickets, as many as a run can have; give the next ones more --uses"
    came_with = _guests_by_ticket(run)
    waiting = sum(
        issued.ticket.uses - came_with[name]
        for name, issued in run.tickets.items()
        if ticket_state(issued, came_with[name], unix_ms)[0] is TicketState.OPEN
    )
    free = GUESTS_MAX - len(run.guests) - waiting
    if ticket.uses > free:
        return (
            False,
            f"{ticket.uses} uses are too many: {free} of {GUESTS_MAX} places are left; revoke tickets that wait",
        )
    return True, "made"


def may_exclude(run: Run, public_key: bytes) -> tuple[bool, str]:
    """Whether the operator may have this peer take part no more."""
    standing = run.standings.get(public_key, trust.Standing())
    if run.phase is Phase.FINISHED:
        return False, "the run is finished: nobody takes part in it any more"
    if standing.excluded:
        return False, f"peer {short(public_key)} is excluded already: {standing.excluded}"
    if sum(other.by_operator for other in run.standings.values()) >= trust.REMOVED_MAX:
        return (
            False,
            f"{trust.REMOVED_MAX} peers are excluded, as many as a run can keep out; readmit some, or use tickets",
        )
    return True, "excluded"


def may_readmit(run: Run, public_key: bytes) -> tuple[bool, str]:
    """Whether the operator may end this peer's exclusion."""
    standing = run.standings.get(public_key, trust.Standing())
    if run.phase is Phase.FINISHED:
        return False, "the run is finished: nobody takes part in it any more"
    if not standing.excluded:
        return False, f"peer {short(public_key)} is not excluded"
    if standing.equivocation is not None:
        return False, (
            f"peer {short(public_key)} cannot be readmitted: it announced two payloads for one step, which its own "
            "signatures in the log prove; its owner may come back with a new identity"
        )
    if sum(map(trust.readmission_due, run.standings.values())) >= READMITTED_MAX:
        return False, f"{READMITTED_MAX} peers are to be readmitted by the next entry, as many as it holds; wait for it"
    return True, "readmitted"
