"""Clock steps: when one opens, is opened again for others, closes, and when the run is finished.

Goes as far as the rules allow now, and refuses to wait: an `Arm` asks for the time of the next look. ADR 1.
"""

from __future__ import annotations

from coordinator.clock import aggregation, agreement, entry_decision, life, memory, rules, run_changes
from coordinator.clock.effects import Append, Arm, Effect, NoticeKind, SendNotice, SendTick, TickOpened
from coordinator.clock.state import OpenStep, Outcome, Peer, PeerPhase, Phase, Run
from coordinator.clock.value_copy import replace
from protos.assignment import SampleShare
from protos.log import lr_to_bits
from protos.slices import Aggregate
from protos.tick import Tick

DECAYED = "its learning rate has decayed"
"""The reason of an end that `run decay` set."""


def progress(run: Run, now_ms: int) -> Outcome:
    """Open, close, reopen or finish, as far as the rules allow right now."""
    if missed := life.is_missed(run):
        return replace(run, reason=missed), []
    if run.phase is Phase.WAITING:
        return _try_open(run, now_ms)
    if run.phase is Phase.OPEN:
        return _try_close(run, now_ms)
    return _try_finish(run, now_ms)


def _try_open(run: Run, now_ms: int) -> Outcome:
    if run.is_paused:
        return replace(run, reason=life.words(run)), []
    if run.decay is not None and run.head_step >= run.decay.last_step:
        return life.ended(run, DECAYED, now_ms)
    ready, wanted = run.ready_count, run.config.clock.min_peers
    if ready < wanted:
        paused = f", and {run.paused_count} paused by their owners" if run.paused_count else ""
        return replace(run, reason=f"{ready} of {wanted} peers needed are ready{paused}"), []
    members = len(rules.members_of(run))
    if run.snapshot is None and run.head_step == 0:
        run, effects = agreement.agree_snapshot(run, 0)
        if run.snapshot is None:
            problem = agreement.start_problem(run)
            if problem != run.reason:  # ready peers wait for this, maybe for good
                effects.append(SendNotice(NoticeKind.WAITING, problem))
            return replace(run, reason=problem), effects
        run, more = _try_open(run, now_ms)
        return run, effects + more
    if not members or (members < wanted and not rules.founded(run)):
        text = f"{ready} peers are ready, and {members} of {wanted} needed may take part: the others are newcomers on probation"
        return replace(run, reason=f"{text}, or share a block of network addresses before the first step"), []
    return _open(run, now_ms)


def _open(run: Run, now_ms: int) -> Outcome:
    members = rules.members_of(run)
    samples = max(run.config.clock.batch_samples, len(members))
    pool, _, _ = rules.draw(run.returned_samples, run.next_sample, samples)
    lr = rules.learning_rate(run.config.optimizer, run.config.clock.steps, run.head_step + 1, run.decay)
    roster = rules.roster_of(run, members, samples)
    tick = Tick(run.head_step + 1, run.head_hash, 1, roster, pool, lr_to_bits(lr))
    return _announce(run, aggregation.assigned(run, tick), now_ms)


def _reopen(run: Run, reason: str, now_ms: int) -> Outcome:
    """The same step and samples again, for the peers that are ready now. Existing payloads stay valid.

    Peers that all abstain are asked again: what they lacked, such as a text or a program's gradient, may be there now. If all
    have lost their votes, the step is decided without any, and its samples go back.
    """
    current = run.step
    assert current is not None
    wanted, ready = run.config.clock.min_peers, run.ready
    samples = sum(len(part) for part in current.tick.pool)
    members = rules.members_of(run)[:samples]
    may_vote = members and not run.is_paused and len(ready) >= wanted
    others = {peer.public_key for peer in members} ^ set(current.tick.places)
    others_decide = any(rules.is_believed(run, key) for key in others) if rules.founded(run) else bool(others)
    if may_vote and not others_decide and entry_decision.all_lost(run, current, now_ms):
        return _decide_empty(run, now_ms)
    if not may_vote or not others:
        text = reason if run.is_paused else f"{reason}; {_next_try(len(ready), wanted)}"
        deadline = now_ms + run.config.clock.deadline_ms_max
        run = replace(run, reason=text, step=replace(current, deadline_at_ms=deadline))
        effects: list[Effect] = [SendNotice(NoticeKind.WAITING, text), Arm(deadline)]
        if not may_vote or not entry_decision.nobody_votes(run, current, now_ms):
            return run, effects
        run, again = _ask_again(run, replace(current, abstained={}), now_ms)
        return run, [*effects[:1], *again]
    roster = rules.roster_of(run, members, samples)
    return _again(run, roster, now_ms)


def _again(run: Run, roster: tuple[SampleShare, ...], now_ms: int) -> Outcome:
    """The open step once more, for this roster, with aggregators that are drawn anew."""
    assert run.step is not None
    attempt = run.step.tick.attempt + 1
    return _announce(run, aggregation.assigned(run, replace(run.step.tick, attempt=attempt, roster=roster)), now_ms)


def _next_try(ready: int, wanted: int) -> str:
    """What becomes of a step that is not decided at its deadline, for people."""
    if ready < wanted:
        return f"the step waits for peers: {ready} of {wanted} needed are ready"
    return "the peers that have the step may still send them, and then it is decided"


def _ask_again(run: Run, current: OpenStep, now_ms: int) -> Outcome:
    """The same tick is sent again. A strict step has no deadline, and a message may have been lost."""
    deadline = now_ms + run.config.clock.deadline_ms_max
    run = replace(run, step=replace(current, deadline_at_ms=deadline))
    return run, [SendTick(current.tick, deadline - now_ms), Arm(deadline)]


def _announce(run: Run, tick: Tick, now_ms: int) -> Outcome:
    record = TickOpened(tick)
    run = memory.remember(run, record, now_ms)
    assert run.step is not None
    left = run.step.deadline_at_ms - now_ms
    return run, [Append(record), SendTick(tick, left), Arm(run.step.deadline_at_ms)]


def _add_up(run: Run, now_ms: int) -> Outcome:
    """The votes that count are with the aggregators: decide the step by their sum, or ask others for it."""
    current = run.step
    assert current is not None
    if not aggregation.stands(current):
        return _try_close(replace(run, step=replace(current, summing=None)), now_ms)
    assert current.summing is not None
    aggregate, problem = aggregation.verdict(run, current, now_ms)
    if aggregate is None and not problem:
        return run, [Arm(current.summing.until_ms)]
    if aggregate is None:
        return _without_aggregators(run, current, problem, now_ms)
    run, told = aggregation.rested(replace(run, step=entry_decision.counted(run, current, now_ms)), current)
    return _decide(run, now_ms, aggregate, told)


def _without_aggregators(run: Run, current: OpenStep, problem: str, now_ms: int) -> Outcome:
    """The step's aggregators do not decide: they have a rest, and the step is opened with others, or with none."""
    run, told = aggregation.rested(run, current)
    roster = current.tick.roster
    kept = [run.peers.get(key, Peer(key)) for key in current.tick.places if not _is_out(run, key)]
    if 0 < len(kept) < len(roster):
        roster = rules.roster_of(run, kept, sum(len(part) for part in current.tick.pool))
    run, effects = _again(run, roster, now_ms)
    assert run.step is not None
    if not run.step.tick.aggregators:  # enough peers may have been aggregators to hold everything
        run, more = _try_close(run, now_ms)
        return run, [*told, *effects, *more]
    return replace(run, reason=problem), [*told, *effects]


def _is_out(run: Run, public_key: bytes) -> bool:
    standing = run.standings.get(public_key)
    return standing is not None and bool(standing.excluded)


def _decide(run: Run, now_ms: int, aggregate: Aggregate | None, first: list[Effect]) -> Outcome:
    current = run.step
    run, effects, told = entry_decision.commit(run, now_ms, aggregate)
    added = () if current is None or current.summing is None or aggregate is None else current.summing.contributions
    run = replace(run, added=added)
    if aggregate is not None and current is not None and not run.anchored:
        of = aggregation.summed_step(current, aggregate, rules.electors(run, run.head_step))
        run = replace(run, doubts=run.doubts.kept(run.head_step, of))
    run, more = _after_commit(run, now_ms)
    return run, [*first, *effects, *more, *told]


def _decide_empty(run: Run, now_ms: int) -> Outcome:
    """Newcomers' votes may be held, but nobody would have checked them."""
    assert run.step is not None
    return _decide(replace(run, step=replace(run.step, counted=0)), now_ms, None, [])


def _try_close(run: Run, now_ms: int) -> Outcome:
    current = run.step
    assert current is not None
    if current.summing is not None:
        return _add_up(run, now_ms)
    if current.tick.aggregators and aggregation.are_lost(run, current):
        return _without_aggregators(run, current, "the aggregators of the step have left", now_ms)
    current = entry_decision.counted(run, current, now_ms)
    if not current.most_at_ms and entry_decision.most_counted(run, current, now_ms):
        current = replace(current, most_at_ms=now_ms)
    closes, reason = entry_decision.should_close(run, current, now_ms)
    if run.is_paused:
        reason = f"{life.words(run)}; step {current.tick.step} is decided first: {reason}"
    run = replace(run, reason=reason, step=current)
    if closes and current.tick.aggregators:
        run, effects, counted, tried = entry_decision.counted_votes(run)
        run, requests = aggregation.asked(run, counted, tried, now_ms)
        return run, [*effects, *requests]
    if closes:
        return _decide(run, now_ms, None, [])
    if now_ms >= current.deadline_at_ms:
        again = aggregation.asked_again(run, now_ms)
        run, effects = _missed(run, current, reason, now_ms)
        return run, [*again, *effects]
    return _waits(run, current, now_ms)


def _missed(run: Run, current: OpenStep, reason: str, now_ms: int) -> Outcome:
    """The deadline of a step that cannot be decided."""
    why = f"no votes of step {current.tick.step} reached a quorum of the peers before its deadline"
    if current.tick.aggregators and current.claimed & ~current.counted:
        return _without_aggregators(run, current, why, now_ms)
    if run.config.clock.strict:
        if entry_decision.all_lost(run, current, now_ms):
            return _decide_empty(run, now_ms)
        return _ask_again(run, current, now_ms)
    if run.is_paused:
        why = f"{life.words(run)}; {why}, so the step waits for the end of the pause"
    elif current.abstained:
        why = reason
    return _reopen(run, why, now_ms)


def _waits(run: Run, current: OpenStep, now_ms: int) -> Outcome:
    """A step before its deadline: it waits, unless too few of its roster are left."""
    wanted, left = run.config.clock.min_peers, entry_decision.live_mask(current, now_ms).bit_count()
    deserted = left < min(wanted, len(current.tick.roster))
    if run.config.clock.strict:
        deserted = bool(run.left)
    if deserted and len(run.ready) >= wanted and not run.is_paused and rules.members_of(run):
        again_at = min(current.opened_ms + run.config.clock.deadline_ms_min, current.deadline_at_ms)
        if current.tick.attempt > 1 and now_ms < again_at and not run.config.clock.strict:
            return run, [Arm(again_at)]  # peers that come and go do not have it opened again and again
        return _reopen(run, "too few of the roster are left", now_ms)
    until = entry_decision.newcomers_until_ms(run, current)
    return run, [Arm(until)] if run.config.trust.enabled and now_ms < until else []


def _after_commit(run: Run, now_ms: int) -> Outcome:
    if run.phase is Phase.FINISHED:
        return replace(run, reason="the last step is committed; peers are applying it"), [Arm(run.finish_by_ms)]
    for peer in run.trainers:
        if peer.applied_step < run.head_step - 1:
            run = run_changes.with_peer(run, run_changes.move_peer(peer, PeerPhase.SYNCING))
    run, effects = _try_open(run, now_ms)
    if run.phase is Phase.WAITING:
        effects.append(SendNotice(NoticeKind.WAITING, run.reason))
    return run, effects


def _awaited(run: Run, behind: int, keeping: int) -> str:
    """The peers whose last report a finished run waits for, for a while."""
    number = behind or keeping
    if not number:
        return "the coordinator waits a moment for an anchor, which keeps the last state"
    if not any(peer.phase is not PeerPhase.ABSENT for peer in run.peers.values()):
        whom = "1 peer that is" if number == 1 else f"{number} peers that are"
        return f"the coordinator waits a moment for {whom} not connected now"
    whom = "1 peer is" if number == 1 else f"{number} peers are"
    return f"{whom} still {'applying it' if behind else 'storing its state'}"


def _try_finish(run: Run, now_ms: int) -> Outcome:
    """Tell everyone once all connected peers, the last roster and an anchor have applied the last step, or its deadline has
    passed."""
    if run.finished_told:
        return run, []
    awaited = {key for key, peer in run.peers.items() if peer.phase is not PeerPhase.ABSENT}
    awaited |= {key for key in run.roster if key not in run.peers or not run.peers[key].gone}
    again: list[Effect] = []
    unanchored = run.anchored and not run.anchors_here and any(peer.is_here for peer in run.peers.values())
    if run.anchored and not run.anchors_here and (again := aggregation.asked_again(run, now_ms)):
        run = replace(run, added=())  # once
    behind = sum(key not in run.peers or run.peers[key].applied_step < run.head_step for key in awaited)
    keeping = sum(key not in run.reported_snapshots.get(run.head_step, {}) for key in awaited) if run.ended else 0
    if (behind or keeping or unanchored) and now_ms < run.finish_by_ms:
        what = str(run.ended) if run.ended else "the last step is committed"
        return replace(run, reason=f"{what}; {_awaited(run, behind, keeping)}"), again
    text = str(run.ended) if run.ended else f"finished: {run.head_step} steps"
    run = replace(run, finished_told=True, reason=text)
    return run, [SendNotice(NoticeKind.FINISHED, text, run.snapshot)]
