"""What peers report: payloads that they announce and hold, verdicts of their checks, proof against others.

Refuses what does not belong to the open step, and all that an excluded or absent peer says. What a report tells of states and
snapshots goes on to `agreement.py`.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator import agreement, memory, rules, transitions, trust
from coordinator.events import Append, Claim, Effect, Equivocated, Refuse, Reported, SendAnnouncement, SendNotice
from coordinator.state import OpenStep, Outcome, PeerPhase, Run
from protos.equivocation import Offence
from protos.identity import short
from protos.limits import EQUIVOCATIONS_MAX
from protos.log import Equivocation


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
    for offence in event.offences:
        run, more = _accused(run, event.public_key, offence)
        effects += more
    if reason := run.standings.get(event.public_key, trust.Standing()).excluded:
        return run, [*effects, Refuse(event.public_key, reason)]  # by its own word
    if event.claim is not None:
        run, more = _claimed(run, event.public_key, event.claim, now_ms)
        effects += more
        if run.standings.get(event.public_key, trust.Standing()).excluded:
            return run, effects
    run, more = _holds(run, event, now_ms)
    return run, effects + more


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


def _claimed(run: Run, public_key: bytes, claim: Claim, now_ms: int) -> Outcome:
    current = run.step
    if current is None or claim.step != current.tick.step:
        is_open = "none is open" if current is None else f"step {current.tick.step} is open"
        return run, [Refuse(public_key, f"payload of step {claim.step}: {is_open}")]
    if claim.parent_hash != current.tick.parent_hash:
        return run, [Refuse(public_key, f"payload of step {claim.step} was computed on another log")]
    if public_key not in current.tick.places:
        return run, [Refuse(public_key, f"not in the roster of step {claim.step}; the next tick takes you in")]
    samples = sum(len(part) for part in current.tick.pool)
    if claim.samples > samples:
        return run, [Refuse(public_key, f"{claim.samples} samples claimed; step {claim.step} has {samples}")]
    before = current.claims.get(public_key)
    if before is not None and before.payload_sha256 != claim.payload_sha256:
        payloads, said = (before.payload_sha256, claim.payload_sha256), Equivocation(before.envelope, claim.envelope)
        record = Equivocated(Offence(public_key, claim.step, payloads, said))
        return memory.remember(run, record, 0), [Append(record), Refuse(public_key, record.offence.reason)]
    holders = {
        name: mask for name, mask in current.holders.items() if name[0] != public_key or name[1] == claim.payload_sha256
    }
    claims = {**current.claims, public_key: claim}
    # The payload may be held by many already, or be another one than before: count anew.
    run = replace(run, step=replace(current, claims=claims, holders=holders, counted_within=-1))
    peer = run.peers[public_key]
    speed = peer.samples_per_second if before else rules.measured_speed(peer.samples_per_second, claim)
    return transitions.with_peer(run, replace(peer, samples_per_second=speed, loss=claim.loss)), _contradict(
        current, public_key, claim
    )


def _contradict(current: OpenStep, author: bytes, claim: Claim) -> list[Effect]:
    """Who holds another payload of this author has heard another announcement, and hears this one: then it has both."""
    heard = (mask for name, mask in current.holders.items() if name[0] == author and name[1] != claim.payload_sha256)
    own = current.bit(author)
    for mask in heard:
        if others := mask & current.here & ~own:
            witness = current.tick.roster[(others & -others).bit_length() - 1].public_key
            return [SendAnnouncement(claim.envelope, to=witness)]
    return []


def _holds(run: Run, event: Reported, now_ms: int) -> Outcome:
    current = run.step
    if current is None or not event.holdings:
        return run, []
    members = current.tick.places
    bit = current.bit(event.public_key)
    if not bit:
        return run, []
    effects: list[Effect] = []
    holders, counted, named = dict(current.holders), current.counted, None
    within, needed = rules.electors(run.config.clock, current, now_ms)
    for at_step, author, payload in event.holdings:
        if at_step != current.tick.step or author not in members:
            continue
        claim = current.claims.get(author)
        if claim is None:
            # One payload an author: a peer that names several fills nobody's memory, and takes no place of an honest word.
            named = {who for (who, _), mask in holders.items() if mask & bit} if named is None else named
            if author in named:
                continue
            named.add(author)
        elif claim.payload_sha256 != payload:
            if len(effects) < EQUIVOCATIONS_MAX and author != event.public_key:
                effects.append(SendAnnouncement(claim.envelope, to=event.public_key))
            continue
        mask = holders[author, payload] = holders.get((author, payload), 0) | bit
        if claim is not None and (mask & within).bit_count() >= needed:
            counted |= 1 << members[author]
    return replace(run, step=replace(current, holders=holders, counted=counted)), effects
