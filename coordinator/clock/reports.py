"""Reports of peers: payloads that they announce and hold, verdicts of their checks, proof against others.

Refuses parts that do not belong to the open step or its roster, and all reports of an excluded or absent peer.
`agreement.py` takes the parts about states and snapshots.
"""

from __future__ import annotations

from coordinator.clock import aggregation, agreement, holder_counts, memory, rules, run_changes, trust
from coordinator.clock.effects import (
    Append,
    Effect,
    Equivocated,
    Evaluated,
    NoticeKind,
    Refuse,
    RunPaused,
    SendAnnouncement,
    SendNotice,
)
from coordinator.clock.events import Claim, HeldPlaces, Reported
from coordinator.clock.findings import Doubt
from coordinator.clock.state import OpenStep, Outcome, PeerPhase, Phase, Run
from coordinator.clock.value_copy import replace
from protos.equivocation import Offence
from protos.evaluation import is_due, reopen_evaluation
from protos.identity import short
from protos.limits import EQUIVOCATIONS_MAX, EVALUATIONS_MAX
from protos.log import Equivocation

PAUSED = "paused by its owner"


def reported(run: Run, event: Reported, now_ms: int) -> Outcome:
    """All parts of one report, the peer's own state first. A refused part does not delay the others."""
    peer = run.peers.get(event.public_key)
    standing = run.standings.get(event.public_key)
    if standing is not None and standing.excluded:
        return run, [Refuse(event.public_key, standing.excluded)]
    if peer is None or peer.phase is PeerPhase.ABSENT:
        return run, [Refuse(event.public_key, "you are not connected: join and follow first")]
    effects: list[Effect] = []
    run = _about_itself(_paused(_checked(run, event), event, now_ms), event)
    for at_step, digest in event.applied:
        run, more = agreement.applied(run, event.public_key, at_step, digest)
        effects += more
        if any(isinstance(effect, SendNotice) and effect.to == event.public_key for effect in more):
            break  # the peer starts again: its states after that step do not count
    for fact in event.snapshots:
        run, more = agreement.stored(run, event.public_key, fact)
        effects += more
    for fact in event.bad_snapshots:
        run, more = agreement.found_bad(run, event.public_key, fact)
        effects += more
    for envelope in event.evaluations:
        run, more = _evaluated(run, event.public_key, envelope)
        effects += more
    for offence in event.offences:
        run, more = _accused(run, event.public_key, offence)
        effects += more
    if reason := run.standings.get(event.public_key, trust.Standing()).excluded:
        return run, [*effects, Refuse(event.public_key, reason)]  # by the peer's own report
    if event.claim is not None:
        run, more = _claimed(run, event.public_key, event.claim, now_ms)
        effects += more
        if run.standings.get(event.public_key, trust.Standing()).excluded:
            return run, effects
    run, more = _holds(_abstained(run, event), event)
    effects += more
    run, more = _about_sums(run, event)
    return run, effects + more


def _about_itself(run: Run, event: Reported) -> Run:
    """The peer's addresses and its owner, where it names them anew."""
    peer = run.peers[event.public_key]
    if not event.addresses and event.owner is None:
        return run
    owner = peer.owner if event.owner is None else event.owner
    return run_changes.with_peer(run, replace(peer, addresses=event.addresses or peer.addresses, owner=owner))


def _paused(run: Run, event: Reported, now_ms: int) -> Run:
    """The peer's owner pauses it: the open step does not wait for it, and no later roster has it. Or it goes on. ADR 35."""
    peer = run.peers[event.public_key]
    if event.paused is None or event.paused == peer.is_paused:
        return run
    run = run_changes.with_peer(run, replace(peer, paused_since_ms=now_ms if event.paused else None))
    current, key = run.step, event.public_key
    if current is None or key not in current.tick.places or key in current.claims:
        return run
    abstained = {member: reason for member, reason in current.abstained.items() if member != key}
    if event.paused:
        abstained[key] = PAUSED
    return replace(run, step=replace(current, abstained=abstained))


def _abstained(run: Run, event: Reported) -> Run:
    """A member has no votes for the open step, or has lost those that it announced, so the step does not wait for it. Its
    announcement stands."""
    current = run.step
    if current is None or event.abstained is None or event.public_key not in current.tick.places:
        return run
    step, reason = event.abstained
    if step != current.tick.step:
        return run
    silence = step, reason, event.not_finite, event.lost
    run = run_changes.with_peer(run, replace(run.peers[event.public_key], silence=silence))
    return replace(run, step=replace(current, abstained={**current.abstained, event.public_key: reason}))


def _accused(run: Run, reporter: bytes, offence: Offence) -> Outcome:
    """A proven offence of a peer of this run. Offences of other keys are refused: anyone can make keys that offend."""
    author = offence.author
    if author not in run.peers and author not in run.roster:
        return run, [Refuse(reporter, f"evidence against {short(author)} is refused: it is no peer of this run")]
    standing = run.standings.get(author)
    if standing is not None and standing.equivocation is not None:
        return run, []  # another peer reported it before
    record = Equivocated(offence)
    return memory.written(run, record)


def _about_sums(run: Run, event: Reported) -> Outcome:
    """The sum that an aggregator made, and earlier sums that the peer found false."""
    effects: list[Effect] = []
    if event.summed is not None:
        run, effects = aggregation.summed(run, event.public_key, event.summed)
    for at_step, number in event.false_sums:
        run, more = _doubted(run, event.public_key, at_step, number)
        effects = [*effects, *more]
    return run, effects


def _doubted(run: Run, reporter: bytes, step: int, number: int) -> Outcome:
    """A peer added a range up again, and found its sum false: all others look, and if most find the same, the run stops."""
    doubts, verdict = run.doubts.heard(reporter, step, number, run.head_step, len(run.trainers))
    run = replace(run, doubts=doubts)
    if verdict is Doubt.ASK_ALL:
        text = f"{short(reporter)} doubts the sum of range {number} of step {step}: every peer adds it up again"
        return run, [SendNotice(NoticeKind.DOUBTED, text, step=step, number=number)]
    if verdict is not Doubt.FORGED:
        return run, []
    right, words = doubts.steps[step].others[number], doubts.words(step, number)
    resting = {key: until for key, until in run.resting.items() if key not in right}
    resting |= dict.fromkeys(doubts.steps[step].signers[number], run.head_step + aggregation.REST_STEPS)
    run = replace(run, resting=resting)
    effects: list[Effect] = []
    if not run.is_paused and run.phase is not Phase.FINISHED:
        run, effects = memory.written(run, RunPaused(words))
    return run, [*effects, SendNotice(NoticeKind.WAITING, words)]


def _checked(run: Run, event: Reported) -> Run:
    """Verdicts on steps that are not judged yet, of checkers that were drawn."""
    for verdict in event.verdicts:
        drawn = run.checks.get(verdict.step)
        if drawn is not None and verdict.checker == event.public_key:
            run = replace(run, checks={**run.checks, verdict.step: drawn.with_verdict(verdict)})
    return run


def _holds(run: Run, event: Reported) -> Outcome:
    """Payloads that a member of the roster, or an anchor, says that it holds."""
    current = run.step
    if current is None or not (event.holdings or event.held):
        return run, []
    peer = run.peers[event.public_key]
    if event.public_key not in current.tick.places and not peer.anchor:
        return run, []
    effects: list[Effect] = []
    if event.held is not None:
        current, effects = _by_places(current, event, event.held, anchor=peer.anchor)
    if event.holdings and not _is_of_earlier_attempt(current, event):
        current, more = _by_name(current, event, anchor=peer.anchor)
        effects += more
    return replace(run, step=current), effects


def _is_of_earlier_attempt(current: OpenStep, event: Reported) -> bool:
    """Whether names may be of payloads of which the peer held other slices: aggregators of slices say for which attempt."""
    said = event.held
    return bool(current.tick.ranges) and (said is None or said.attempt != current.tick.attempt)


def _by_places(current: OpenStep, event: Reported, said: HeldPlaces, *, anchor: bool) -> tuple[OpenStep, list[Effect]]:
    """A mask over the roster. The mask counts if every payload in it is the claimed one. Otherwise the reporter has to name
    the payloads."""
    if (said.step, said.attempt) != (current.tick.step, current.tick.attempt):
        return current, []
    members = len(current.tick.roster)
    if said.mask >> members:
        text = f"place {said.mask.bit_length() - 1} held of step {said.step}, whose roster has {members} places"
        return current, [Refuse(event.public_key, text)]
    current, right = holder_counts.compare_mask(current, said)
    return (holder_counts.hold(current, event.public_key, said.mask, anchor=anchor) if right else current), []


def _by_name(current: OpenStep, event: Reported, *, anchor: bool) -> tuple[OpenStep, list[Effect]]:
    """Payloads by name. A peer that names another payload than the claimed one gets the author's announcement."""
    bit, mask, effects = current.bit(event.public_key), 0, list[Effect]()
    named, by_anchor = dict(current.named), set[holder_counts.Name]()
    # One payload an author: a peer that names several fills no memory, and takes no place of an honest peer's report.
    known = {author for (author, _), holders in named.items() if holders & bit}
    for at_step, author, payload in event.holdings:
        if at_step != current.tick.step or author not in current.tick.places:
            continue
        claim = current.claims.get(author)
        if claim is None:
            if author not in known and bit:
                named[author, payload] = named.get((author, payload), 0) | bit
            if author not in known and anchor:
                by_anchor.add((author, payload))
            known.add(author)
        elif claim.payload_sha256 == payload:
            mask |= current.bit(author)
        elif len(effects) < EQUIVOCATIONS_MAX and author != event.public_key:
            effects.append(SendAnnouncement(claim.envelope, to=event.public_key))
    if named != current.named:
        current = replace(current, named=named)
    current = holder_counts.named_by(current, event.public_key, frozenset(by_anchor))
    return holder_counts.hold(current, event.public_key, mask, anchor=anchor), effects


def _evaluated(run: Run, public_key: bytes, envelope: bytes) -> Outcome:
    """A peer evaluated a state; the door has verified the envelope, and that the peer itself signed it. ADR 53.

    Only peers whose word on that state counts may report (`rules.eligible`), once a state. No rule of the clock reads the
    figures: they are journalled, in the next entry, and shown.
    """
    made = reopen_evaluation(envelope)
    step = made.step
    known = run.evaluations.get(step, {})
    if public_key in known or len(known) >= EVALUATIONS_MAX:
        return run, []
    if not is_due(run.config, step, run.last_step) or not any(fact.step == step for fact in run.snapshots):
        return run, [Refuse(public_key, f"evaluation of step {step}: this state is not to be evaluated, or not agreed")]
    if made.sample and not run.config.evaluation.sample_tokens:
        return run, [Refuse(public_key, f"evaluation of step {step}: this run asks for no text of its model")]
    if public_key not in rules.eligible(run, step):
        return run, [
            Refuse(public_key, f"evaluation of step {step}: your word on this state does not count in this run")
        ]
    return memory.written(run, Evaluated(step, public_key, envelope))


# Nats a token: that of a model that knows nothing is the logarithm of its vocabulary, some 12.
LOSS_MAX = 1e4


def _claimed(run: Run, public_key: bytes, claim: Claim, now_ms: int) -> Outcome:
    """An author's claim about its payload of the open step: limited to figures that the coordinator can check, or refused.

    A claimed time can only make its author seem slower.
    """
    current, problem = run.step, _problem(run, public_key, claim)
    if current is None or problem:
        return run, [Refuse(public_key, problem)]
    claim, before = _within(run, current, public_key, claim), current.claims.get(public_key)
    before = before or current.earlier.get(public_key)
    if before is not None and before.payload_sha256 != claim.payload_sha256:
        payloads, said = (before.payload_sha256, claim.payload_sha256), Equivocation(before.envelope, claim.envelope)
        record = Equivocated(Offence(public_key, claim.step, payloads, said))
        return memory.remember(run, record, 0), [Append(record), Refuse(public_key, record.offence.reason)]
    abstained = {key: why for key, why in current.abstained.items() if key != public_key}
    step = replace(current, claims={**current.claims, public_key: claim}, abstained=abstained)
    run = replace(run, step=holder_counts.claimed(step, public_key, claim.payload_sha256))
    peer = run.peers[public_key]
    speed = peer.samples_per_second
    if before is None:
        speed = rules.measured_speed(speed, claim, now_ms - current.opened_ms)
    return run_changes.with_peer(
        run, replace(peer, samples_per_second=speed, loss=claim.loss, silence=None)
    ), _contradict(current, public_key, claim)


def _problem(run: Run, public_key: bytes, claim: Claim) -> str:
    """The reason to refuse a claim; empty if there is none."""
    current = run.step
    if current is None or claim.step != current.tick.step:
        is_open = "none is open" if current is None else f"step {current.tick.step} is open"
        return f"payload of step {claim.step}: {is_open}"
    if claim.parent_hash != current.tick.parent_hash:
        return f"payload of step {claim.step} was computed on another log than this coordinator's"
    if public_key not in current.tick.places:
        return f"you are not in the roster of step {claim.step}; the next tick may include you"
    samples = sum(len(part) for part in current.tick.pool)
    if claim.samples > samples:
        return f"{claim.samples} samples claimed; step {claim.step} has {samples}"
    return ""


def _within(run: Run, current: OpenStep, public_key: bytes, claim: Claim) -> Claim:
    """The claim with its figures limited to the author's own share and to a possible loss.

    With overlap, or when a step was opened again, an honest author's samples are those of another share: nothing is refused.
    """
    share = current.tick.roster[current.tick.places[public_key]].samples
    samples = min(claim.samples, share)
    tokens = min(claim.tokens, samples * run.config.data.context)
    return replace(claim, samples=samples, tokens=tokens, loss=min(max(claim.loss, -LOSS_MAX), LOSS_MAX))


def _contradict(current: OpenStep, author: bytes, claim: Claim) -> list[Effect]:
    """A peer that holds another payload of this author received another announcement. Such a peer gets this one too, and
    then has both."""
    heard = (mask for name, mask in current.named.items() if name[0] == author and name[1] != claim.payload_sha256)
    own = current.bit(author)
    for mask in heard:
        if others := mask & current.here & ~own:
            witness = current.tick.roster[(others & -others).bit_length() - 1].public_key
            return [SendAnnouncement(claim.envelope, to=witness)]
    return []
