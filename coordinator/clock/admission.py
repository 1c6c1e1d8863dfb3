"""Admission: whether a peer may join, a ticket be made or a peer be excluded, each verdict with its reason.

Decides, and changes nothing: the machine remembers admitted and excluded peers. Refuses to read a clock (the wall clock's
time comes with the question) and to believe what a ticket says of itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from coordinator.clock import trust
from coordinator.clock.effects import Denial
from coordinator.clock.events import JoinAsked
from coordinator.clock.state import GUESTS_MAX, TICKETS_MAX, Issued, Peer, PeerPhase, Phase, Run, TicketState
from protos.identity import peer_id, short
from protos.invite import Ticket
from protos.limits import FULL, READMITTED_MAX

# Places of a run that one block of network addresses may take, as a part of all: a flood from one block leaves the rest.
BLOCK_PLACES_PART = 1 / 8
BLOCK_PLACES_MIN = 8
# A peer that has not got the state after this time may lose its place to another peer, if the run is full.
SYNCING_MS_MAX = 30 * 60_000
# Nor does a peer that its owner paused keep a place for longer than this.
PAUSED_MS_MAX = 60 * 60_000


@dataclass(frozen=True)
class Admission:
    """Whether there is a place for a peer, the reason, and which peer has to go for it (empty: none)."""

    free: bool
    reason: str
    instead_of: bytes = b""


def admit(run: Run, event: JoinAsked, now_ms: int = 0) -> tuple[Denial | None, str]:
    """Whether a peer may join: None, or the denial, each with a reason."""
    denial, reason = may_enter(
        run, event.public_key, event.ticket, event.unix_ms, event.network, now_ms, anchor=event.anchor
    )
    if denial is not None:
        return denial, reason
    if run.layout_digest and event.layout_digest != run.layout_digest:
        return Denial.LAYOUT, (
            f"your model's parameter layout is {event.layout_digest.hex()[:16]}, "
            f"the run's is {run.layout_digest.hex()[:16]}: model code or library versions differ; "
            "install the same versions as the other peers"
        )
    return None, "admitted"


def may_enter(
    run: Run,
    public_key: bytes,
    ticket: Ticket | None,
    unix_ms: int,
    network: str = "",
    now_ms: int = 0,
    *,
    anchor: bool = False,
) -> tuple[Denial | None, str]:
    """Whether a peer may join, as far as its model does not matter. `ticket`: verified; `unix_ms`: the wall clock."""
    standing = run.standings.get(public_key)
    if standing is not None and standing.excluded:
        return Denial.EXCLUDED, standing.excluded
    if needs_ticket(run, public_key, anchor=anchor):
        invited, reason = _admits(run, ticket, unix_ms, anchor=anchor)
        if not invited:
            return (Denial.ANCHOR if anchor else Denial.TICKET), reason
    admission = run.config.admission
    if admission.mode == "allow_list" and not anchor and peer_id(public_key) not in admission.allowed:
        text = f"peer {peer_id(public_key)} is not on this run's allow-list; ask its operator to add you"
        return Denial.NOT_LISTED, text
    found = room(run, public_key, network, now_ms, anchor=anchor)
    return (None if found.free else Denial.FULL), found.reason


def needs_ticket(run: Run, public_key: bytes, *, anchor: bool = False) -> bool:
    """Whether a peer has to show a ticket: it has used none yet, and it wants to be an anchor or the run requires
    tickets."""
    if anchor:
        return public_key not in run.anchors
    return run.config.admission.mode == "invite" and public_key not in run.guests


def is_admitted(run: Run, public_key: bytes) -> bool:
    """Whether a peer that has joined may still take part in the role in which it joined."""
    peer = run.peers.get(public_key)
    return peer is not None and not needs_ticket(run, public_key, anchor=peer.anchor)


def room(run: Run, public_key: bytes, network: str, now_ms: int, *, anchor: bool = False) -> Admission:
    """Whether a place is free for this peer. Anchors need none.

    In a full run, or a full block of network addresses, a peer with accepted votes takes the place of a peer without. Any
    peer takes the place of one that has been getting the state for longer than SYNCING_MS_MAX, or has been paused for longer
    than PAUSED_MS_MAX.
    """
    if anchor:
        return Admission(True, "anchors need no place")
    present = _others(run, public_key)
    most, text = run.config.clock.max_peers, f"{FULL}: {{0}} of {{1}} peers are here; try again later"
    if network and run.config.admission.mode == "open":
        block = [peer for peer in present if peer.network == network]
        block_most = block_places(run)
        if len(block) >= block_most and len(present) < most:
            present, most = block, block_most
            text = "{0} peers from your network block are here, of {1} places for one; try again later"
    if len(present) < most:
        return Admission(True, "there is room")
    before = run.peers.get(public_key)
    victim = _gives_way(present, now_ms, accepted=before is not None and before.votes_accepted > 0)
    if victim is not None:
        return Admission(True, "a peer with less claim to it gives its place", victim.public_key)
    return Admission(False, text.format(len(present), most))


def block_places(run: Run) -> int:
    """Places of an open run that one block of network addresses may take."""
    most = run.config.clock.max_peers
    return max(int(most * BLOCK_PLACES_PART), min(BLOCK_PLACES_MIN, most))


def places_free(run: Run, public_key: bytes) -> int:
    """Places of the run that nobody has, besides this peer's own. Not less than 0."""
    return max(run.config.clock.max_peers - len(_others(run, public_key)), 0)


def may_return(run: Run) -> int:
    """Members of the last roster that this coordinator has not heard of since its start. Before a run's first step, any place
    may be that of a member."""
    if not run.roster:
        return run.config.clock.max_peers
    members = (run.peers.get(key) for key in run.roster)
    return sum(peer is None or (peer.phase is PeerPhase.ABSENT and not peer.gone) for peer in members)


def _others(run: Run, public_key: bytes) -> list[Peer]:
    """The peers that have a place of the run, without this one. Anchors need none."""
    return [
        peer
        for key, peer in run.peers.items()
        if key != public_key and peer.phase is not PeerPhase.ABSENT and not peer.anchor
    ]


def needs_turn(run: Run, public_key: bytes, *, anchor: bool) -> bool:
    """Whether a peer waits for its turn in the line. Anchors, peers that are here, and peers with accepted votes do not."""
    peer = run.peers.get(public_key)
    return not anchor and (peer is None or (peer.phase is PeerPhase.ABSENT and not peer.votes_accepted))


def _gives_way(present: list[Peer], now_ms: int, *, accepted: bool) -> Peer | None:
    """The peer with the least claim to its place, if the joining peer (with accepted votes, or without) has a better one."""
    idle = [peer for peer in present if not peer.votes_accepted]
    if not accepted:
        idle = [
            peer for peer in idle if peer.phase is PeerPhase.SYNCING and now_ms - peer.syncing_since_ms > SYNCING_MS_MAX
        ]
    paused = [(peer.paused_since_ms, peer.public_key) for peer in present if peer.paused_since_ms is not None]
    if paused and now_ms - min(paused)[0] > PAUSED_MS_MAX:
        longest = min(paused)[1]
        return next(peer for peer in present if peer.public_key == longest)
    return max(idle, key=lambda peer: (peer.syncing_since_ms, peer.public_key), default=None)


def _admits(run: Run, ticket: Ticket | None, unix_ms: int, *, anchor: bool) -> tuple[bool, str]:
    """Whether a ticket lets one more identity in. Only the ticket's id counts: its other fields are looked up in the run."""
    if anchor and (ticket is None or not ticket.anchor):
        return False, (
            "this link names no anchor; the run's operator makes one with `swarmentum-coordinator anchor create`, or names "
            "your peer id in [trust] anchors when the run is created"
        )
    if ticket is None:
        return False, (
            "this run takes only peers with an invite made by `swarmentum-coordinator invite create`; "
            "ask the run's operator for one"
        )
    issued = run.tickets.get(ticket.ticket_id)
    if issued is None or (anchor and not issued.ticket.anchor):
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
    """The state of a ticket that `used` guests came with, and the same in words."""
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
    """Whether the operator may have one more ticket. The run remembers a ticket's guests until its end."""
    mode = run.config.admission.mode
    if mode != "invite" and not ticket.anchor:
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
    """Whether the operator may exclude this peer."""
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


def may_withdraw(run: Run, step: int) -> tuple[bool, str]:
    """Whether the operator may withdraw what was agreed about the states after `step` and later ones."""
    known = ", ".join(str(fact.step) for fact in run.snapshots) or "none"
    if step == 0:
        return False, "the initial state cannot be withdrawn: make a new run"
    if step > run.head_step:
        return False, f"step {step} is not committed yet; the head is {run.head_step}"
    if not any(fact.step >= step for fact in run.snapshots) and not any(at >= step for at in run.agreed_digests):
        return False, f"nothing is agreed about step {step} or later; the agreed snapshots are of steps: {known}"
    return True, "withdrawn"
