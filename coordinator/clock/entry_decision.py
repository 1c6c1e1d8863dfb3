"""The decision of a step: which payloads count as held, when that is enough, and the entry that follows.

A payload is held when enough of the deciders report that they hold it, or when an anchor does. Deciders are the live members of
the roster; in a run with checks only believed peers, because newcomers decide nothing and keep no peer out. In a step with
aggregators these hold the payloads, by the same rule. The entry has the payloads that count; the samples of the others go back
to the pool. Refuses to say when the decision is due (`steps.py`) and to judge votes itself: `trust.py` adds verdicts up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache, reduce
from operator import or_

from coordinator.clock import holder_counts, memory, operator_orders, rules, trust
from coordinator.clock.effects import (
    Append,
    Effect,
    EntryCommitted,
    Judged,
    NoticeKind,
    OwnerNamed,
    SendEntry,
    SendNotice,
)
from coordinator.clock.events import Claim
from coordinator.clock.holder_counts import everyone
from coordinator.clock.state import DURATIONS_KEPT, OpenStep, Outcome, Peer, Quorum, Run
from coordinator.clock.value_copy import replace
from protos.assignment import assign, merge
from protos.checks import VERDICT_STEPS
from protos.identity import short
from protos.limits import EVALUATIONS_MAX, OWNER_STEPS_MIN, POOL_RANGES_MAX
from protos.log import Contribution, Entry, entry_body, entry_hash, summed_entry
from protos.slices import Aggregate
from protos.start import RUN_DIGITS_SHOWN

# How long a step waits for newcomers once all votes that count are there, as a part of the usual time of a step.
NEWCOMERS_WAIT = 0.1
NEWCOMERS_WAIT_MS_MIN = 5
NAMES_SHOWN_MAX = 4
# Of the learning rate that a run diverged with: what its operator is told to try.
LOWER_LR = 0.5


def quorum_of(quorum: float, members: int) -> int:
    """How many of `members` are more than the part `quorum`, at least 1."""
    return max(1, min(members, math.floor(quorum * members) + 1))


def live_mask(step: OpenStep, now_ms: int) -> int:
    """Bit mask of the roster members that the step waits for: all that have not hung up.

    After the deadline, only connected members: all others had time to come back after a restart of the coordinator.
    """
    return step.here if now_ms >= step.deadline_at_ms else everyone(step) & ~step.gone


def deciders(run: Run, step: OpenStep, now_ms: int) -> int:
    """Bit mask of the members whose reports and votes decide the step: live peers, in a run with checks live believed peers.

    Before any peer is believed, all live members decide. In strict runs all members decide, connected or not.
    """
    live = everyone(step) if run.config.clock.strict else live_mask(step, now_ms)
    if not rules.founded(run):
        return live
    believed = 0
    for key, place in step.tick.places.items():
        believed |= rules.is_believed(run, key) << place
    return live & believed


def quorum(run: Run, step: OpenStep, now_ms: int) -> Quorum:
    """The quorum that has to hold a payload. The quorum includes an anchor if one is connected.

    An anchor that holds no payload of the deciders by the deadline counts as away. It does so in the next step, too, until
    it reports a payload.
    """
    if run.config.clock.strict and not step.tick.aggregators:
        return Quorum(everyone(step), len(step.tick.roster))
    within = deciders(run, step, now_ms)
    if step.tick.aggregators:
        within = reduce(or_, step.tick.masks) & step.here
    says = bool(within & step.anchored) or any(within & step.bit(author) for author, _ in step.anchor_named)
    silent = not says and (run.anchor_late or now_ms >= step.deadline_at_ms)
    anchor = not silent and anchor_here(run)
    rule = Quorum(within, quorum_of(run.config.clock.quorum, within.bit_count()), anchor)
    if not step.tick.ranges:
        return rule
    here = frozenset(key for key in step.tick.outside if anchor and _is_anchor_here(run.peers.get(key)))
    ranges = frozenset(number for key in here for number in step.tick.ranges_of(key))
    return replace(rule, ranges=_of_ranges(step.tick.masks, step.here, run.config.clock.quorum, ranges))


@lru_cache(maxsize=64)
def _of_ranges(masks: tuple[int, ...], here: int, part: float, anchored: frozenset[int]) -> tuple[Quorum, ...]:
    """The quorum of each range; `anchored`: those with an anchor that is here. Most reports change nothing of it."""
    own = [mask & here for mask in masks]
    return tuple(Quorum(it, quorum_of(part, it.bit_count()), number in anchored) for number, it in enumerate(own))


def _is_anchor_here(peer: Peer | None) -> bool:
    return peer is not None and peer.anchor and peer.is_here


def anchor_here(run: Run) -> bool:
    """Whether an anchor is connected."""
    return run.anchored and any(peer.anchor and peer.is_here for peer in run.peers.values())


def counted(run: Run, step: OpenStep, now_ms: int) -> OpenStep:
    """The open step with its mask of authors whose payload is held, counted anew if the quorum changed."""
    now = quorum(run, step, now_ms)
    if now == step.counted_by:
        return step
    step = replace(step, counted_by=now, tally=holder_counts.tallied(step, now.within), masks=())
    return holder_counts.recounted(step)


def most_counted(run: Run, step: OpenStep, now_ms: int) -> bool:
    """Whether more than half of the peers that the step waits for are counted."""
    asked = everyone(step) & ~step.gone & ~step.rarely
    asked = asked & deciders(run, step, now_ms) if run.config.trust.enabled else asked
    return 2 * (step.counted & asked).bit_count() > asked.bit_count()


def newcomers_until_ms(run: Run, step: OpenStep) -> int:
    """Until when a step that could close waits for newcomers: a little longer than steps take."""
    usual = statistics.median(run.durations_ms) if run.durations_ms else 0.0
    wait = max(math.ceil(usual * (1.0 + NEWCOMERS_WAIT)), NEWCOMERS_WAIT_MS_MIN)
    return min(step.opened_ms + wait, step.deadline_at_ms)


def should_close(run: Run, step: OpenStep, now_ms: int) -> tuple[bool, str]:
    """Whether the open step, counted, can be decided now."""
    clock, roster, connected = run.config.clock, step.tick.roster, step.here.bit_count()
    needed = min(clock.min_peers, len(roster))
    if connected < needed and not clock.strict:
        of = f"{needed} peers needed from the roster of step {step.tick.step}"  # others may be ready
        return False, f"{connected} of {of} are connected; it waits for them until its deadline"
    abstained = _silent(step)
    asked = deciders(run, step, now_ms) & ~abstained
    if nobody_votes(run, step, now_ms):
        return False, _all_abstain(run, step)
    prompt = asked & ~step.rarely
    least = min(clock.min_peers, asked.bit_count() if run.config.trust.enabled else len(roster))
    enough = prompt.bit_count() >= least and not clock.strict
    awaited = (prompt if enough else asked) & ~step.counted
    votes, deciding = step.counted.bit_count(), (step.counted & asked).bit_count()
    if not awaited and deciding:
        newcomers = everyone(step) & ~(asked | abstained | step.gone | step.rarely | step.counted)
        if newcomers and now_ms < newcomers_until_ms(run, step):
            return False, f"waiting a moment for newcomers: {_names(step, newcomers)}"
        late = f", but for {_names(step, slow)}: too slow lately" if (slow := step.rarely & ~step.counted) else ""
        return True, f"all {votes} payloads are held{late}"
    names = _names(step, awaited)
    if clock.strict:
        gone = f"; {len(run.left)} of them left: waiting for {clock.min_peers} ready peers" if run.left else ""
        return False, f"strict: waiting for {names}{gone}"
    if now_ms >= step.deadline_at_ms and deciding:
        return True, f"deadline: {votes} payloads are held, without {names}"
    return False, f"{votes} of {len(roster)} payloads are held; waiting for {names or 'a payload'}"


def _silent(step: OpenStep) -> int:
    """The peers that abstain, but for those whose votes others hold."""
    return sum(1 << step.tick.places[key] for key in step.abstained) & ~step.counted


def nobody_votes(run: Run, step: OpenStep, now_ms: int) -> bool:
    """Whether all peers that could decide the open step abstain from it."""
    return bool(silent := _silent(step)) and not deciders(run, step, now_ms) & ~silent


def all_lost(run: Run, step: OpenStep, now_ms: int) -> bool:
    """Whether no peer that could decide the open step ever votes in it. Those that their owners paused are not asked."""
    if not nobody_votes(run, step, now_ms):
        return False
    within = deciders(run, step, now_ms)
    deciding = [run.peers[key] for key in step.abstained if within & step.bit(key) and key in run.peers]
    silences = [peer.silence for peer in deciding if not peer.is_paused]
    return bool(silences) and all(it is not None and it[0] == step.tick.step and it[3] for it in silences)


def _all_abstain(run: Run, step: OpenStep) -> str:
    """The reason if no peer has votes, and what to do if it is a loss that is no number."""
    paused = sum(key in run.peers and run.peers[key].is_paused for key in step.abstained)
    if paused == len(step.abstained):
        return f"all {paused} peers of step {step.tick.step} that are here are paused by their owners"
    all_here = f"all {len(step.abstained)} peers that are here abstain from step {step.tick.step}"
    peers = {key: run.peers[key].silence for key in step.abstained if key in run.peers and not run.peers[key].is_paused}
    said = [it for it in peers.values() if it is not None and it[0] == step.tick.step]
    if broken := [why for _, why, not_finite, _ in said if not_finite]:
        diverged = (
            "the run has diverged" if len(broken) == len(said) else "if that of the others is not, the run has diverged"
        )
        return (
            f"{all_here}, {len(broken)} of them because the loss or gradient is not finite ({broken[0]}): {diverged}. "
            f"{_way_back(run)}"
        )
    words = f"{all_here} ({next(iter(step.abstained.values()))}), and are asked again at its deadline"
    if any(not_finite is None for _, _, not_finite, _ in said):  # of an earlier version
        words += f". If it is the loss that is not finite, the run has diverged. {_way_back(run)}"
    return words


def _way_back(run: Run) -> str:
    """The command with which the operator of a diverged run goes back to its newest agreed state."""
    if run.snapshot is None or run.snapshot.step == 0:
        return "It has no agreed snapshot to go back to: its operator can make a new run with a lower optimizer.lr or clip_norm"
    lower = f"{run.config.optimizer.lr * LOWER_LR:g}"
    return (
        f"Its operator can go back to step {run.snapshot.step} with a lower learning rate: swarmentum-coordinator run fork "
        f"{run.run_id.hex()[:RUN_DIGITS_SHOWN]} --from-step {run.snapshot.step} optimizer.lr={lower} (an earlier step, if "
        "the loss had grown by then)"
    )


def _names(step: OpenStep, members: int) -> str:
    """The first few of a mask's members, for people."""
    shown: list[str] = []
    more = members.bit_count() > NAMES_SHOWN_MAX
    while members and len(shown) < NAMES_SHOWN_MAX:
        place = (members & -members).bit_length() - 1
        shown.append(short(step.tick.roster[place].public_key))
        members &= members - 1
    return ", ".join(shown) + (" ..." if more else "")


MS = 1000
_COPIED = "another peer announced the same payload first"


Votes = tuple[Contribution, ...]


def counted_votes(run: Run) -> tuple[Run, list[Effect], Votes, Votes]:
    """The votes of the open step that count, and those on trial, by its mask `counted`: after the verdicts that are due."""
    current = run.step
    assert current is not None
    run, effects = _judged(run, current.tick.step - VERDICT_STEPS)
    held = {key: c for key, c in current.claims.items() if current.counted >> current.tick.places[key] & 1}
    accepted, trials = _split(run, held)
    return run, effects, _contributions(run, current, accepted), _contributions(run, current, trials)


def commit(run: Run, now_ms: int, aggregate: Aggregate | None = None) -> tuple[Run, list[Effect], list[Effect]]:
    """Decide the open step: by the votes whose sum `aggregate` is, or by those that its mask `counted` names. The caller opens
    the next one.

    The second list is what single authors are told. It comes after the next tick, which travels with the entry in one message
    to all: a message to one peer in between would part them.
    """
    current = run.step
    assert current is not None
    if current.summing is None or aggregate is None:
        run, effects, counted, tried = counted_votes(run)
    else:
        effects, counted, tried = [], current.summing.contributions, current.summing.trials
    entry = _entry(run, current, counted, tried)
    if current.summing is not None and aggregate is not None:
        entry = summed_entry(entry, aggregate, current.summing.digest)
    body = entry_body(entry)
    record = EntryCommitted(entry, body, entry_hash(body))
    accepted, seen = {c.public_key for c in counted}, {c.public_key for c in (*counted, *tried)}
    run = _paced(run, current, seen) if seen else run
    run = memory.remember(run, record, now_ms)
    # The time that most peers needed, so a few cannot make the next step wait longer. If most were late, it is the whole
    # time.
    duration = max((current.most_at_ms or now_ms) - current.opened_ms, 0)
    late = anchor_here(run) and not any(current.anchored & current.bit(author) for author in accepted)
    if seen and not late:  # the time of a step that waited in vain says nothing about the peers
        run = replace(run, durations_ms=(*run.durations_ms, duration)[-DURATIONS_KEPT:])
    if seen:  # nor does a step without votes about the anchor
        run = replace(run, anchor_late=late)
    run, named = _owners(run, accepted)
    told = _uncounted(current, seen, now_ms)
    return run, [*effects, Append(record), SendEntry(entry.step), *named], told


def _uncounted(current: OpenStep, counted: Collection[bytes], now_ms: int) -> list[Effect]:
    """Tell each author of a payload that was claimed, and is not in the entry, why: its owner asks. ADR 8."""
    rule, found = current.counted_by, list[Effect]()
    assert rule is not None, "a step is counted before it is decided"
    took = f"when the step was decided after {(now_ms - current.opened_ms) / MS:.1f} s"
    for author in sorted(current.claims.keys() - counted):
        place = current.tick.places[author]
        if current.counted >> place & 1:
            why = "it came after the votes to add up were chosen" if current.summing else _COPIED
        elif not counted:
            why = f"all peers that decide had lost their votes {took}"
        elif rule.anchor:
            why = f"no anchor held the payload {took}"
        else:
            held, of = holder_counts.count_of(current.tally, place), rule.within.bit_count()
            why = f"held by {held} of {of} peers, quorum {rule.needed}, {took}"
        found.append(SendNotice(NoticeKind.VOTE, why, to=author, step=current.tick.step))
    return found


def _owners(run: Run, counted: Iterable[bytes]) -> Outcome:
    """Write down the owners of peers whose votes have just counted. A stranger without votes writes nothing. ADR 35."""
    effects: list[Effect] = []
    for key in sorted(counted):
        peer = run.peers.get(key)
        if peer is None or peer.owner == peer.owner_kept:
            continue
        if peer.owner_step and run.head_step < peer.owner_step + OWNER_STEPS_MIN:
            continue
        run, more = memory.written(run, OwnerNamed(run.head_step, key, peer.owner))
        effects += more
    return run, effects


def _judged(run: Run, at_step: int) -> Outcome:
    """Judge a step's votes by its verdicts, once the time for verdicts is over."""
    drawn = run.checks.get(at_step)
    if drawn is None or not drawn.verdicts:
        return run, []
    verdicts = tuple(drawn.verdicts[name] for name in sorted(drawn.verdicts))
    record = Judged(at_step, verdicts, drawn.arrival, drawn.samples)
    return memory.written(run, record)


def _split(run: Run, held: Mapping[bytes, Claim]) -> tuple[Mapping[bytes, Claim], Mapping[bytes, Claim]]:
    """(payloads that count, payloads on probation) of those that are held, in the order in which they were announced.

    The same payload counts once, even if several peers name it. In a run with checks, a copy is checked like a newcomer's. If
    no peer is believed (in the first step, or because none is left), all held payloads count.
    """
    first: dict[bytes, bytes] = {}
    if not run.config.trust.enabled:
        return {key: c for key, c in held.items() if first.setdefault(c.payload_sha256, key) == key}, {}
    believed = {key: claim for key, claim in held.items() if rules.is_believed(run, key)} or held
    counted = {key: c for key, c in believed.items() if first.setdefault(c.payload_sha256, key) == key}
    return counted, {key: claim for key, claim in held.items() if key not in counted}


def _entry(run: Run, current: OpenStep, counted: Votes, trials: Votes) -> Entry:
    tick, used = current.tick, {c.public_key for c in counted}
    ranges = assign(tick.pool, tick.roster)
    unused = [part for key, parts in ranges.items() if key not in used for part in parts]
    exclusions = trust.exclusions(run.standings)
    return Entry(
        step=tick.step,
        parent_hash=tick.parent_hash,
        contributions=counted,
        lr_bits=tick.lr_bits,
        parent_state_digest=run.agreed_digests.get(tick.step - 1, b""),
        returned_samples=rules.bounded(merge([*run.returned_samples, *unused]), POOL_RANGES_MAX - 1),
        next_sample=run.next_sample,
        trials=trials,
        exclusions=exclusions,
        readmitted=trust.readmissions(run.standings),
        settings=run.settings_at(tick.step),
        evaluations=run.unlogged[:EVALUATIONS_MAX],
        orders=operator_orders.for_entry(run.orders, exclusions, tick.step),
    )


def _contributions(run: Run, current: OpenStep, claims: Mapping[bytes, Claim]) -> tuple[Contribution, ...]:
    """Contributions, each with the probability of a check: 0 after the first attempt, whose samples some votes are on."""
    checked = run.config.trust.enabled and current.tick.attempt == 1
    places = {key: place for place, key in enumerate(current.claims, 1)} if checked else {}
    found = []
    for key, c in sorted(claims.items()):
        permille = run.standings.get(key, trust.Standing()).check_permille if checked else 0
        facts = c.payload_sha256, c.payload_bytes, c.samples, c.tokens, c.loss
        found.append(Contribution(key, *facts, check_permille=permille, arrival=places.get(key, 0)))
    return tuple(found)


def _paced(run: Run, current: OpenStep, counted: Iterable[bytes]) -> Run:
    """Roster members that missed the step get a smaller share of the next, and steps wait for them more rarely."""
    counted, peers = set(counted), dict(run.peers)
    for key in current.tick.places.keys() & peers.keys():
        if peers[key].is_paused:
            continue  # its owner's wish is no fault
        awaited = not current.rarely & current.bit(key)
        peers[key] = rules.paced(peers[key], counted=key in counted, awaited=awaited)
    return replace(run, peers=peers)
