"""The entry that decides a step: the payloads that count, the samples that go back to the pool, the members that missed it.

Refuses to say when a step is decided (`steps.py`) and to judge votes itself: `trust.py` adds verdicts up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from coordinator.clock import electorate, holder_counts, memory, operator_orders, quorum, rules, trust
from coordinator.clock.effects import Append, Effect, NoticeKind, SendEntry, SendNotice
from coordinator.clock.events import Claim
from coordinator.clock.records import EntryCommitted, Judged, OwnerNamed
from coordinator.clock.state import DURATIONS_KEPT, OpenStep, Outcome, Run
from coordinator.clock.value_copy import replace
from protos.assignment import assign, merge
from protos.checks import VERDICT_STEPS
from protos.limits import EVALUATIONS_MAX, OWNER_STEPS_MIN, POOL_RANGES_MAX
from protos.log import Contribution, Entry, entry_body, entry_hash, summed_entry
from protos.slices import Aggregate

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
    run = _paced(run, current, seen)
    run = memory.remember(run, record, now_ms)
    # The time that most peers needed, so a few cannot make the next step wait longer. If most were late, it is the whole
    # time.
    duration = max((current.most_at_ms or now_ms) - current.opened_ms, 0)
    late = quorum.anchor_here(run) and not any(current.anchored & current.bit(author) for author in accepted)
    if not late:  # the time of a step that waited in vain says nothing about the peers
        run = replace(run, durations_ms=(*run.durations_ms, duration)[-DURATIONS_KEPT:])
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
    believed = {key: claim for key, claim in held.items() if electorate.is_believed(run, key)} or held
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
