"""What peers report: payloads that they announce and hold, verdicts of their checks, proof against others.

Refuses what does not belong to the open step, and all that an excluded or absent peer says. What a report tells of states and
snapshots goes on to `agreement.py`.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator import agreement, claims, memory, quorum, transitions, trust
from coordinator.events import Effect, Equivocated, Refuse, Reported, SendAnnouncement, SendNotice
from coordinator.state import OpenStep, Outcome, PeerPhase, Run
from protos.equivocation import Offence
from protos.identity import short
from protos.limits import EQUIVOCATIONS_MAX

# Payloads that anchors may name for a step before their authors do, as a multiple of the roster.
ANCHORED_A_MEMBER_MAX = 4


def reported(run: Run, event: Reported, now_ms: int) -> Outcome:
    """Everything that one report says, the peer's own state first: parts that are refused do not hold up the others."""
    peer = run.peers.get(event.public_key)
    standing = run.standings.get(event.public_key)
    if standing is not None and standing.excluded:
        return run, [Refuse(event.public_key, standing.excluded)]
    if peer is None or peer.phase is PeerPhase.ABSENT:
        return run, [Refuse(event.public_key, "not connected: join and follow first")]
    effects: list[Effect] = []
    run = _checked(run, event)
    if event.addresses:
        run = transitions.with_peer(run, replace(peer, addresses=event.addresses))
    for at_step, digest in event.applied:
        run, more = agreement.applied(run, event.public_key, at_step, digest)
        effects += more
        if any(isinstance(effect, SendNotice) and effect.to == event.public_key for effect in more):
            break  # it starts again: what it reached after that step does not count
    for fact in event.snapshots:
        run, more = agreement.stored(run, event.public_key, fact)
        effects += more
    for fact in event.bad_snapshots:
        run, more = agreement.found_bad(run, event.public_key, fact)
        effects += more
    for offence in event.offences:
        run, more = _accused(run, event.public_key, offence)
        effects += more
    if reason := run.standings.get(event.public_key, trust.Standing()).excluded:
        return run, [*effects, Refuse(event.public_key, reason)]  # by its own word
    if event.claim is not None:
        run, more = claims.claimed(run, event.public_key, event.claim, now_ms)
        effects += more
        if run.standings.get(event.public_key, trust.Standing()).excluded:
            return run, effects
    run, more = _holds(_abstained(run, event), event, now_ms)
    return run, effects + more


def _abstained(run: Run, event: Reported) -> Run:
    """A member has no votes for the open step: nobody waits for it. What it announced before stands."""
    current = run.step
    if current is None or event.abstained is None or event.public_key not in current.tick.places:
        return run
    step, reason = event.abstained
    if step != current.tick.step or event.public_key in current.claims:
        return run
    return replace(run, step=replace(current, abstained={**current.abstained, event.public_key: reason}))


def _accused(run: Run, reporter: bytes, offence: Offence) -> Outcome:
    """A proven offence of a peer of this run. Strangers fill no log: whoever makes keys can make offences."""
    author = offence.author
    if author not in run.peers and author not in run.roster:
        return run, [Refuse(reporter, f"evidence against {short(author)}, which is no peer of this run")]
    standing = run.standings.get(author)
    if standing is not None and standing.equivocation is not None:
        return run, []  # others reported it, too
    record = Equivocated(offence)
    return memory.written(run, record)


def _checked(run: Run, event: Reported) -> Run:
    """Verdicts on steps that are not judged yet, of checkers that were drawn."""
    for verdict in event.verdicts:
        audit = run.audits.get(verdict.step)
        if audit is not None and verdict.checker == event.public_key:
            run = replace(run, audits={**run.audits, verdict.step: audit.taken(verdict)})
    return run


def _holds(run: Run, event: Reported, now_ms: int) -> Outcome:
    """Payloads that a member of the roster, or an anchor, says that it holds."""
    current = run.step
    if current is None or not event.holdings:
        return run, []
    bit, anchor = current.bit(event.public_key), run.peers[event.public_key].anchor
    if not bit and not anchor:
        return run, []
    held, effects = _possible(current, event, bit)
    holders, counted = dict(current.holders), current.counted
    for name in held if bit else ():
        holders[name] = holders.get(name, 0) | bit
    anchored = current.anchored.union(held) if anchor else current.anchored
    if len(anchored) > ANCHORED_A_MEMBER_MAX * len(current.tick.roster):
        anchored = current.anchored
    after = replace(current, holders=holders, anchored=anchored)
    rule = quorum.quorum(run, after, now_ms)
    if rule != after.counted_by:
        return replace(run, step=replace(after, counted_by=None)), effects  # an anchor's first word: counted anew
    for author, payload in held:
        claim = current.claims.get(author)
        if claim is not None and claim.payload_sha256 == payload and quorum.holds(rule, after, (author, payload)):
            counted |= 1 << current.tick.places[author]
    return replace(run, step=replace(after, counted=counted)), effects


def _possible(current: OpenStep, event: Reported, bit: int) -> tuple[list[tuple[bytes, bytes]], list[Effect]]:
    """Those of the (author, payload)s in a report that can be; and, for others, in which words their authors spoke."""
    found: list[tuple[bytes, bytes]] = []
    effects: list[Effect] = []
    named: set[bytes] | None = None
    for at_step, author, payload in event.holdings:
        if at_step != current.tick.step or author not in current.tick.places:
            continue
        claim = current.claims.get(author)
        if claim is None:
            # One payload an author: a peer that names several fills nobody's memory, and takes no place of an honest word.
            if named is None:
                named = {who for (who, _), mask in current.holders.items() if mask & bit}
            if author in named:
                continue
            named.add(author)
        elif claim.payload_sha256 != payload:
            if len(effects) < EQUIVOCATIONS_MAX and author != event.public_key:
                effects.append(SendAnnouncement(claim.envelope, to=event.public_key))
            continue
        found.append((author, payload))
    return found, effects
