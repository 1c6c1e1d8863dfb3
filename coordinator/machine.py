"""The clock as a pure function: `step(run, event, now_ms) -> (run, effects)`; and `restore`, its memory after a crash.

Refuses to do anything itself: effects are values, to be carried out in order by the runtime. Whatever peers shall see
is preceded by the `Append` that makes it survive a crash, so a crash between any two effects loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from coordinator import admission, rules, trust
from coordinator.events import (
    Append,
    Arm,
    Asked,
    Claim,
    Connected,
    Disconnected,
    Effect,
    EndStream,
    EntryCommitted,
    Equivocated,
    Event,
    ExclusionAsked,
    Joined,
    Judged,
    LayoutFixed,
    NoticeKind,
    PeerExcluded,
    PeerLeft,
    PeerReadmitted,
    ReadmissionAsked,
    Record,
    Refuse,
    Reported,
    RevocationAsked,
    SendAnnouncement,
    SendEntry,
    SendNotice,
    SendTick,
    SnapshotAgreed,
    SnapshotFact,
    TicketAsked,
    TicketMade,
    TicketRevoked,
    TicketUsed,
    TickOpened,
    TimerFired,
)
from coordinator.state import (
    DIGEST_STEPS_KEPT,
    DURATIONS_KEPT,
    MOVES,
    PEER_MOVES,
    PEERS_KEPT,
    SNAPSHOT_STEPS_KEPT,
    Issued,
    OpenStep,
    Peer,
    PeerPhase,
    Phase,
    Run,
)
from protos.assignment import assign, merge
from protos.checks import VERDICT_STEPS
from protos.equivocation import Offence
from protos.identity import short
from protos.limits import EQUIVOCATIONS_MAX, POOL_RANGES_MAX
from protos.log import Contribution, Entry, Equivocation, Tick, entry_body, entry_hash, lr_to_bits
from protos.run_config import RunConfig

Outcome = tuple[Run, list[Effect]]
V = TypeVar("V")


def new_run(run_id: bytes, config: RunConfig) -> Run:
    """A run that nobody has joined. The hash that the first entry follows is the run id."""
    return Run(run_id=run_id, config=config, head_hash=run_id)


def restore(run: Run, records: Iterable[Record], now_ms: int) -> Run:
    """Fold the journal over a new run. An open step stays open, with a whole deadline from now."""
    for record in records:
        run = _remember(run, record, now_ms)
    return run


def step(run: Run, event: Event, now_ms: int) -> Outcome:
    """One event. Every event in every phase moves to a known state or refuses with a reason."""
    before = run
    match event:
        case Joined():
            run, effects = _joined(run, event)
        case Connected():
            run, effects = _connected(run, event.public_key, now_ms)
        case Disconnected():
            run, effects = _disconnected(run, event)
        case Reported():
            run, effects = _reported(run, event, now_ms)
        case TimerFired():
            effects = _early(run, now_ms)
        case TicketAsked() | RevocationAsked() | ExclusionAsked() | ReadmissionAsked():
            run, effects = _asked(run, event)
    if isinstance(event, Reported) and _says_nothing_of_the_step(before, run, event, now_ms):
        return run, effects
    run, more = _progress(run, now_ms)
    return run, effects + more


def _says_nothing_of_the_step(before: Run, run: Run, event: Reported, now_ms: int) -> bool:
    """Most reports in a large swarm are about applied states: the open step then stands as it stood."""
    if run.step is None or run.step is not before.step or now_ms >= run.step.deadline_at_ms:
        return False
    was, now = before.peers.get(event.public_key), run.peers.get(event.public_key)
    return was is not None and now is not None and was.phase is now.phase and run.snapshot is before.snapshot


def _early(run: Run, now_ms: int) -> list[Effect]:
    """A timer that fires before its time (clocks are rounded) is set again."""
    if run.step is not None and now_ms < run.step.deadline_at_ms:
        return [Arm(run.step.deadline_at_ms)]
    if run.phase is Phase.FINISHED and not run.finished_told and now_ms < run.finish_by_ms:
        return [Arm(run.finish_by_ms)]
    return []


# ---- what peers tell -------------------------------------------------------------------------------------------------


def _joined(run: Run, event: Joined) -> Outcome:
    denial, reason = admission.admit(run, event.public_key, event.layout_digest, event.ticket, event.unix_ms)
    if denial is not None:
        return run, [Refuse(event.public_key, reason, denial)]
    effects: list[Effect] = []
    if not run.layout_digest:
        record = LayoutFixed(event.layout_digest, event.parameters)
        run, effects = _remember(run, record, 0), [Append(record)]
    if not admission.is_guest(run, event.public_key):
        assert event.ticket is not None, "admitted without a ticket"
        used = TicketUsed(event.ticket.ticket_id, event.public_key)
        run, effects = _remember(run, used, 0), [*effects, Append(used)]
    run = replace(_holds_nothing(run, event.public_key), left=run.left - {event.public_key})
    before = run.peers.get(event.public_key, Peer(event.public_key))
    peer = replace(
        before, gone=False, device=event.device, addresses=event.addresses, applied_step=-1, state_digest=b""
    )
    return _with_peer(run, _move_peer(peer, PeerPhase.ABSENT)), effects


def _holds_nothing(run: Run, public_key: bytes) -> Run:
    """A new life of a peer has lost its payloads, until it says again what it holds. What it claimed, it claimed."""
    current = run.step
    if current is None:
        return run
    bit = _bit(current, public_key)
    holders = {
        (author, payload): mask if author == public_key else mask & ~bit
        for (author, payload), mask in current.holders.items()
    }
    return replace(run, step=replace(current, holders=holders, counted_within=-1))


def _connected(run: Run, public_key: bytes, now_ms: int) -> Outcome:
    peer = run.peers.get(public_key)
    if peer is None or not admission.is_guest(run, public_key):
        return run, [Refuse(public_key, "join first")]
    standing = run.standings.get(public_key)
    if standing is not None and standing.excluded:
        return run, [Refuse(public_key, standing.excluded)]
    if peer.phase is PeerPhase.ABSENT:
        has_room, reason = admission.room(run, public_key)
        if not has_room:
            return run, [Refuse(public_key, reason)]
        run = _with_peer(run, replace(_move_peer(peer, PeerPhase.SYNCING), gone=False))
    effects: list[Effect] = []
    if run.step is not None:
        left = max(run.step.deadline_at_ms - now_ms, 0)
        effects.append(SendTick(run.step.tick, left, to=public_key))
    elif run.finished_told:
        effects.append(SendNotice(NoticeKind.FINISHED, run.reason, run.snapshot, to=public_key))
    else:
        effects.append(SendNotice(NoticeKind.WAITING, run.reason, to=public_key))
    return run, effects


def _disconnected(run: Run, event: Disconnected) -> Outcome:
    peer = run.peers.get(event.public_key)
    if peer is None:
        return run, []
    run = _with_peer(run, replace(_move_peer(peer, PeerPhase.ABSENT), gone=True))
    awaited = run.step is not None and event.public_key in run.roster and event.public_key not in run.left
    if event.leaving and awaited and run.config.clock.strict:
        # Strict steps wait for absent peers, never for one that said goodbye.
        record = PeerLeft(run.head_step + 1, event.public_key)
        return _remember(run, record, 0), [Append(record)]
    return run, []


def _reported(run: Run, event: Reported, now_ms: int) -> Outcome:
    peer = run.peers.get(event.public_key)
    standing = run.standings.get(event.public_key)
    if standing is not None and standing.excluded:
        return run, [Refuse(event.public_key, standing.excluded)]
    if peer is None or peer.phase is PeerPhase.ABSENT:
        return run, [Refuse(event.public_key, "not connected: join and follow first")]
    effects: list[Effect] = []
    run = _checked(run, event)
    if event.addresses:
        run = _with_peer(run, replace(peer, addresses=event.addresses))
    for at_step, digest in event.applied:
        run, more = _applied(run, event.public_key, at_step, digest)
        effects += more
        if any(isinstance(effect, SendNotice) and effect.to == event.public_key for effect in more):
            break  # it starts again: what it reached after that step does not count
    for fact in event.snapshots:
        run, more = _stored(run, event.public_key, fact)
        effects += more
    for offence in event.offences:
        run, more = _accused(run, event.public_key, offence)
        effects += more
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
    return _remember(run, record, 0), [Append(record)]


def _checked(run: Run, event: Reported) -> Run:
    """Verdicts on steps that are not judged yet, of checkers that were drawn."""
    for verdict in event.verdicts:
        audit = run.audits.get(verdict.step)
        if audit is not None and verdict.checker == event.public_key:
            run = replace(run, audits={**run.audits, verdict.step: audit.taken(verdict)})
    return run


def _applied(run: Run, public_key: bytes, at_step: int, digest: bytes) -> Outcome:
    peer = run.peers[public_key]
    if at_step > run.head_step:
        return run, [Refuse(public_key, f"step {at_step} is not committed yet; the head is {run.head_step}")]
    peer = replace(peer, applied_step=at_step, state_digest=digest)
    run = _with_peer(run, peer)
    agreed = run.agreed_digests.get(at_step)
    if agreed is not None and agreed != digest:
        return _resync(run, [public_key], at_step, "the digest that the log holds")
    if agreed is None and at_step >= run.head_step - 1:
        reports = {**run.reported_digests.get(at_step, {}), public_key: digest}
        run = replace(run, reported_digests={**run.reported_digests, at_step: reports})
        electorate = _electorate(run)
        counted = _votes(reports, electorate)
        value, reason = rules.agree(counted, len(electorate), final=electorate <= counted.keys())
        if value is not None and at_step > 0:
            run, effects = _agreed(run, at_step, value, reason)
            if run.peers[public_key].phase is PeerPhase.SYNCING and digest == value:
                run = _caught_up(run, public_key)
            return run, effects
    return _caught_up(run, public_key), []


def _electorate(run: Run) -> set[bytes]:
    """Whose word counts about the state: the last roster but who hung up; if nobody is left, every peer that is ready.

    A member that has not come back yet after a restart of the coordinator counts: the first to come does not decide alone.
    """
    members = {key for key in run.roster if key not in run.peers or not run.peers[key].gone}
    return members or {peer.public_key for peer in run.ready}


def _votes(reports: Mapping[bytes, V], electorate: set[bytes]) -> dict[bytes, V]:
    return {key: value for key, value in reports.items() if key in electorate}


def _agreed(run: Run, at_step: int, digest: bytes, reason: str) -> Outcome:
    """Fix the digest of a step; whoever reported another is told to re-sync, never to exit."""
    agreed = {s: d for s, d in run.agreed_digests.items() if s > at_step - DIGEST_STEPS_KEPT} | {at_step: digest}
    reports = run.reported_digests.get(at_step, {})
    kept = {s: r for s, r in run.reported_digests.items() if s > at_step}
    run = replace(run, agreed_digests=agreed, reported_digests=kept)
    minority = sorted(key for key, value in reports.items() if value != digest)
    return _resync(run, minority, at_step, reason) if minority else (run, [])


def _caught_up(run: Run, public_key: bytes) -> Run:
    """A syncing peer within one step of the head is ready: it takes part from the next tick on."""
    peer = run.peers[public_key]
    if peer.phase is PeerPhase.SYNCING and peer.applied_step >= max(run.head_step - 1, 0):
        return _with_peer(run, _move_peer(peer, PeerPhase.READY))
    return run


def _resync(run: Run, keys: list[bytes], at_step: int, reason: str) -> Outcome:
    effects: list[Effect] = []
    for key in keys:
        peer = run.peers.get(key)
        if peer is None or peer.phase is PeerPhase.ABSENT:
            continue
        run = _with_peer(run, replace(_move_peer(peer, PeerPhase.SYNCING), applied_step=-1, state_digest=b""))
        text = (
            f"your state after step {at_step} differs from what counts ({reason}): load the snapshot and replay the log"
        )
        effects.append(SendNotice(NoticeKind.RESYNC, text, run.snapshot, to=key))
    return run, effects


def _stored(run: Run, public_key: bytes, fact: SnapshotFact) -> Outcome:
    agreed = run.snapshot
    if agreed is not None and fact.step <= agreed.step:
        if fact.step == agreed.step:
            reports = {**run.reported_snapshots.get(fact.step, {}), public_key: fact}
            run = replace(run, reported_snapshots={**run.reported_snapshots, fact.step: reports})
            if fact.root != agreed.root:
                return _resync(run, [public_key], fact.step, "the snapshot that a majority stored")
        return run, []
    if fact.step > run.head_step:
        return run, [Refuse(public_key, f"snapshot of step {fact.step}: the head is {run.head_step}")]
    if fact.step % run.config.clock.snapshot_every and fact.step != run.config.clock.steps:
        return run, [Refuse(public_key, f"snapshot of step {fact.step}: none is due there")]
    reports = {**run.reported_snapshots.get(fact.step, {}), public_key: fact}
    reported = {**run.reported_snapshots, fact.step: reports}
    newest = sorted(reported)[-SNAPSHOT_STEPS_KEPT:]
    run = replace(run, reported_snapshots={step: reported[step] for step in newest})
    return _agree_snapshot(run, fact.step)


def _agree_snapshot(run: Run, at_step: int) -> Outcome:
    reports = run.reported_snapshots.get(at_step, {})
    ready = {peer.public_key for peer in run.ready}
    electorate = _electorate(run) | (reports.keys() & ready)
    counted, members = _votes(reports, electorate), max(len(electorate), run.config.clock.min_peers)
    # Nothing can go on without an initial state: once all have one and none has a majority, the most frequent counts.
    final = at_step == 0 and len(counted) == members
    fact, _ = rules.agree_snapshot(counted, members, final=final)
    if fact is None:
        return run, []
    record = SnapshotAgreed(fact)
    run = _remember(run, record, 0)
    effects: list[Effect] = [Append(record)]
    effects.append(SendNotice(NoticeKind.SNAPSHOT, f"snapshot of step {at_step} is agreed", fact))
    wrong = sorted(key for key, other in reports.items() if other.root != fact.root)
    run, more = _resync(run, wrong, at_step, "the snapshot that a majority stored")
    return run, effects + more


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
        return _remember(run, record, 0), [Append(record), Refuse(public_key, record.offence.reason)]
    holders = {
        name: mask for name, mask in current.holders.items() if name[0] != public_key or name[1] == claim.payload_sha256
    }
    claims = {**current.claims, public_key: claim}
    # The payload may be held by many already, or be another one than before: count anew.
    run = replace(run, step=replace(current, claims=claims, holders=holders, counted_within=-1))
    peer = run.peers[public_key]
    speed = peer.samples_per_second if before else rules.measured_speed(peer.samples_per_second, claim)
    return _with_peer(run, replace(peer, samples_per_second=speed, loss=claim.loss)), _contradict(
        current, public_key, claim
    )


def _contradict(current: OpenStep, author: bytes, claim: Claim) -> list[Effect]:
    """Who holds another payload of this author has heard another announcement, and hears this one: then it has both."""
    heard = (mask for name, mask in current.holders.items() if name[0] == author and name[1] != claim.payload_sha256)
    own = _bit(current, author)
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
    bit = _bit(current, event.public_key)
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


def _bit(current: OpenStep, public_key: bytes) -> int:
    """The roster member's place in masks; 0 for anyone else."""
    place = current.tick.places.get(public_key)
    return 0 if place is None else 1 << place


# ---- the clock -------------------------------------------------------------------------------------------------------


def _progress(run: Run, now_ms: int) -> Outcome:
    """Open, close, reopen or finish, as far as the rules allow right now."""
    if run.phase is Phase.WAITING:
        return _try_open(run, now_ms)
    if run.phase is Phase.OPEN:
        return _try_close(run, now_ms)
    return _try_finish(run, now_ms)


def _try_open(run: Run, now_ms: int) -> Outcome:
    ready, wanted = len(run.ready), run.config.clock.min_peers
    if run.snapshot is None and ready >= wanted:
        run, effects = _agree_snapshot(run, 0)
        if run.snapshot is None:
            return replace(run, reason="waiting for the peers to store the initial state"), effects
        run, more = _try_open(run, now_ms)
        return run, effects + more
    if ready < wanted:
        return replace(run, reason=f"{ready} of {wanted} peers needed are ready"), []
    return _open(run, now_ms)


def _open(run: Run, now_ms: int) -> Outcome:
    samples = max(run.config.clock.batch_samples, len(run.ready))
    pool, _, _ = rules.draw(run.returned_samples, run.next_sample, samples)
    lr = rules.learning_rate(run.config.optimizer, run.config.clock.steps, run.head_step + 1)
    tick = Tick(run.head_step + 1, run.head_hash, 1, rules.roster_of(run, samples), pool, lr_to_bits(lr))
    return _announce(run, tick, now_ms)


def _reopen(run: Run, reason: str, now_ms: int) -> Outcome:
    """The same step and samples again, for those who are ready now. Payloads that exist stay valid."""
    current = run.step
    assert current is not None
    wanted, ready = run.config.clock.min_peers, run.ready
    samples = sum(len(part) for part in current.tick.pool)
    members = {peer.public_key: peer for peer in ready[:samples]}
    if len(ready) < wanted or members.keys() == {share.public_key for share in current.tick.roster}:
        text = f"{reason}: {len(ready)} of {wanted} peers needed are ready"
        deadline = now_ms + run.config.clock.deadline_ms_max
        run = replace(run, reason=text, step=replace(current, deadline_at_ms=deadline))
        return run, [SendNotice(NoticeKind.WAITING, text), Arm(deadline)]
    roster = rules.roster_of(replace(run, peers=members), samples)
    return _announce(run, replace(current.tick, attempt=current.tick.attempt + 1, roster=roster), now_ms)


def _ask_again(run: Run, current: OpenStep, now_ms: int) -> Outcome:
    """A strict step has no deadline, but what was lost on the way has to be said again: the same tick once more."""
    deadline = now_ms + run.config.clock.deadline_ms_max
    run = replace(run, step=replace(current, deadline_at_ms=deadline))
    return run, [SendTick(current.tick, deadline - now_ms), Arm(deadline)]


def _announce(run: Run, tick: Tick, now_ms: int) -> Outcome:
    record = TickOpened(tick)
    run = _remember(run, record, now_ms)
    assert run.step is not None
    left = run.step.deadline_at_ms - now_ms
    return run, [Append(record), SendTick(tick, left), Arm(run.step.deadline_at_ms)]


def _try_close(run: Run, now_ms: int) -> Outcome:
    current = run.step
    assert current is not None
    counted = rules.counted(run.config.clock, current, now_ms)
    if counted.counted.bit_count() != current.counted_votes:
        counted = replace(counted, counted_votes=counted.counted.bit_count(), counted_at_ms=now_ms)
    current = counted
    closes, reason = rules.should_close(run.config.clock, current, len(run.left), now_ms)
    run = replace(run, reason=reason, step=current)
    if closes:
        return _commit(run, now_ms)
    if now_ms >= current.deadline_at_ms and run.config.clock.strict:
        return _ask_again(run, current, now_ms)
    if now_ms >= current.deadline_at_ms:
        return _reopen(run, f"no payload of step {current.tick.step} is held by a quorum", now_ms)
    wanted, left = run.config.clock.min_peers, rules.live_mask(current, now_ms).bit_count()
    deserted = left < min(wanted, len(current.tick.roster))
    if run.config.clock.strict:
        deserted = bool(run.left)
    if deserted and len(run.ready) >= wanted:
        return _reopen(run, "too few of the roster are left", now_ms)
    return run, []


def _commit(run: Run, now_ms: int) -> Outcome:
    current = run.step
    assert current is not None
    effects: list[Effect] = []
    before = current.tick.step - 1
    if before > 0 and before not in run.agreed_digests:
        electorate = _electorate(run)
        counted = _votes(run.reported_digests.get(before, {}), electorate)
        value, reason = rules.agree(counted, len(electorate), final=True)
        if value is not None:
            run, effects = _agreed(run, before, value, reason)
    run, more = _judged(run, current.tick.step - VERDICT_STEPS)
    effects += more
    held = {key: c for key, c in current.claims.items() if current.counted >> current.tick.places[key] & 1}
    accepted, trials = _believed(run, held)
    entry = _entry(run, current, accepted, trials)
    body = entry_body(entry)
    record = EntryCommitted(entry, body, entry_hash(body))
    run = _paced(run, current, accepted.keys() | trials.keys())
    run = _remember(run, record, now_ms)
    # Until the last payload counted, not until the deadline: a step that waits in vain must not make the next wait longer.
    duration = max(current.counted_at_ms - current.opened_ms, 0)
    run = replace(run, durations_ms=(*run.durations_ms, duration)[-DURATIONS_KEPT:])
    effects += [Append(record), SendEntry(entry.step)]
    run, more = _after_commit(run, now_ms)
    return run, effects + more


def _judged(run: Run, at_step: int) -> Outcome:
    """What was found about a step's votes, once nobody has more time to say something."""
    audit = run.audits.get(at_step)
    if audit is None or not audit.verdicts:
        return run, []
    record = Judged(at_step, tuple(audit.verdicts[name] for name in sorted(audit.verdicts)), audit.arrival)
    return _remember(run, record, 0), [Append(record)]


def _believed(run: Run, held: Mapping[bytes, Claim]) -> tuple[Mapping[bytes, Claim], Mapping[bytes, Claim]]:
    """(payloads that count, payloads on probation) of those that are held. Where none would count, all do."""
    if not run.config.trust.enabled:
        return held, {}
    good = {key: claim for key, claim in held.items() if not run.standings.get(key, trust.Standing()).excluded}
    counted = {key: claim for key, claim in good.items() if run.standings.get(key, trust.Standing()).counted}
    if not counted:  # the first step of a run; or nobody else is left, and the step has to be decided
        return good or held, {}
    return counted, {key: claim for key, claim in good.items() if key not in counted}


def _entry(run: Run, current: OpenStep, counted: Mapping[bytes, Claim], trials: Mapping[bytes, Claim]) -> Entry:
    tick = current.tick
    ranges = assign(tick.pool, tick.roster)
    unused = [part for key, parts in ranges.items() if key not in counted for part in parts]
    return Entry(
        step=tick.step,
        parent_hash=tick.parent_hash,
        contributions=_contributions(run, current, counted),
        lr_bits=tick.lr_bits,
        parent_state_digest=run.agreed_digests.get(tick.step - 1, b""),
        returned_samples=rules.bounded(merge([*run.returned_samples, *unused]), POOL_RANGES_MAX - 1),
        next_sample=run.next_sample,
        trials=_contributions(run, current, trials),
        exclusions=trust.exclusions(run.standings),
        readmitted=trust.readmissions(run.standings),
    )


def _contributions(run: Run, current: OpenStep, claims: Mapping[bytes, Claim]) -> tuple[Contribution, ...]:
    """With how likely each is checked. Not at all after the first attempt: some votes are on that one's samples."""
    checked = run.config.trust.enabled and current.tick.attempt == 1
    places = {key: place for place, key in enumerate(current.claims, 1)} if checked else {}
    found = []
    for key, c in sorted(claims.items()):
        permille = run.standings.get(key, trust.Standing()).check_permille if checked else 0
        facts = c.payload_sha256, c.payload_bytes, c.samples, c.tokens, c.loss
        found.append(Contribution(key, *facts, check_permille=permille, arrival=places.get(key, 0)))
    return tuple(found)


def _paced(run: Run, current: OpenStep, counted: Iterable[bytes]) -> Run:
    """Roster members that missed the step get a smaller share of the next, also if their speed is not known yet."""
    usual, counted = rules.usual_speed(run.ready), set(counted)
    for key in sorted(current.tick.places.keys() & run.peers.keys()):
        peer = run.peers[key]
        if key not in counted:
            speed = (peer.samples_per_second or usual) * rules.MISSED_STEP_SPEED
            run = _with_peer(run, replace(peer, samples_per_second=speed, missed=peer.missed + 1))
        elif peer.missed:
            run = _with_peer(run, replace(peer, missed=0))
    return run


def _after_commit(run: Run, now_ms: int) -> Outcome:
    if run.phase is Phase.FINISHED:
        return replace(run, reason="the last step is committed; peers are applying it"), [Arm(run.finish_by_ms)]
    for peer in run.ready:
        if peer.applied_step < run.head_step - 1:
            run = _with_peer(run, _move_peer(peer, PeerPhase.SYNCING))
    run, effects = _try_open(run, now_ms)
    if run.phase is Phase.WAITING:
        effects.append(SendNotice(NoticeKind.WAITING, run.reason))
    return run, effects


def _try_finish(run: Run, now_ms: int) -> Outcome:
    """Tell everyone once all connected peers and the last roster have applied the last step, or its deadline has passed."""
    if run.finished_told:
        return run, []
    awaited = {key for key, peer in run.peers.items() if peer.phase is not PeerPhase.ABSENT}
    awaited |= {key for key in run.roster if key not in run.peers or not run.peers[key].gone}
    behind = sum(key not in run.peers or run.peers[key].applied_step < run.head_step for key in awaited)
    if behind and now_ms < run.finish_by_ms:
        return replace(run, reason=f"the last step is committed; {behind} peers are still applying it"), []
    effects: list[Effect] = []
    if run.head_step not in run.agreed_digests:
        electorate = _electorate(run)
        counted = _votes(run.reported_digests.get(run.head_step, {}), electorate)
        value, why = rules.agree(counted, len(electorate), final=True)
        if value is not None:
            run, effects = _agreed(run, run.head_step, value, why)
    if effects and now_ms < run.finish_by_ms:
        return run, effects
    text = f"finished: {run.head_step} steps"
    run = replace(run, finished_told=True, reason=text)
    return run, [*effects, SendNotice(NoticeKind.FINISHED, text, run.snapshot)]


# ---- what the operator asks ------------------------------------------------------------------------------------------


def _asked(run: Run, event: Asked) -> Outcome:
    match event:
        case TicketAsked():
            return _ticket_asked(run, event)
        case RevocationAsked():
            return _revocation_asked(run, event)
        case ExclusionAsked():
            return _exclusion_asked(run, event)
        case ReadmissionAsked():
            return _readmission_asked(run, event)


def _ticket_asked(run: Run, event: TicketAsked) -> Outcome:
    may, reason = admission.may_issue(run, event.ticket, event.unix_ms)
    if not may:
        return run, [Refuse(b"", reason)]
    record = TicketMade(event.ticket)
    return _remember(run, record, 0), [Append(record)]


def _revocation_asked(run: Run, event: RevocationAsked) -> Outcome:
    """Guests that have to go leave first: after a crash in between, no step waits for one that may not come back."""
    if event.ticket_id not in run.tickets:
        return run, [Refuse(b"", "this run has no such ticket")]
    effects: list[Effect] = []
    leaving = [key for key, came_with in run.guests.items() if event.with_peers and came_with == event.ticket_id]
    for key in leaving:
        run, more = _disconnected(run, Disconnected(key, leaving=True))
        effects += more
    record = TicketRevoked(event.ticket_id, event.with_peers)
    return _remember(run, record, 0), [*effects, Append(record), *(EndStream(key) for key in leaving)]


def _exclusion_asked(run: Run, event: ExclusionAsked) -> Outcome:
    """Out at once. Its stream ends: it asks again, and hears why."""
    may, reason = admission.may_exclude(run, event.public_key)
    if not may:
        return run, [Refuse(b"", reason)]
    record = PeerExcluded(event.public_key, event.reason)
    return _remember(run, record, 0), [Append(record), EndStream(event.public_key)]


def _readmission_asked(run: Run, event: ReadmissionAsked) -> Outcome:
    may, reason = admission.may_readmit(run, event.public_key)
    if not may:
        return run, [Refuse(b"", reason)]
    record = PeerReadmitted(event.public_key)
    return _remember(run, record, 0), [Append(record)]


# ---- memory ----------------------------------------------------------------------------------------------------------


def _remember(run: Run, record: Record, now_ms: int) -> Run:
    """What a record does to the state: the same when it is written and when it is read back after a crash."""
    match record:
        case LayoutFixed():
            return replace(run, layout_digest=record.layout_digest, parameters=record.parameters)
        case TickOpened():
            return _remember_tick(run, record.tick, now_ms)
        case EntryCommitted():
            return _remember_entry(run, record, now_ms)
        case PeerLeft():
            return replace(run, left=run.left | {record.public_key})
        case SnapshotAgreed():
            kept = {s: r for s, r in run.reported_snapshots.items() if s >= record.snapshot.step}
            return replace(run, snapshot=record.snapshot, reported_snapshots=kept)
        case Judged():
            audits = {step: audit for step, audit in run.audits.items() if step > record.step}
            standings, recent = trust.judge(
                run.config.trust, run.standings, run.recent_checks, record.verdicts, record.arrival
            )
            return replace(run, standings=standings, recent_checks=recent, audits=audits)
        case TicketMade():
            return replace(run, tickets={**run.tickets, record.ticket.ticket_id: Issued(record.ticket)})
        case TicketUsed():
            return replace(run, guests={**run.guests, record.public_key: record.ticket_id})
        case TicketRevoked():
            return _remember_revocation(run, record)
        case Equivocated():
            standings = trust.convicted(run.standings, record.offence)
            return _without(replace(run, standings=standings), record.offence.author)
        case PeerExcluded():
            standings = trust.removed(run.standings, record.public_key, record.reason)
            return _without(replace(run, standings=standings), record.public_key)
        case PeerReadmitted():
            return replace(run, standings=trust.readmitted(run.standings, record.public_key))


def _remember_revocation(run: Run, record: TicketRevoked) -> Run:
    issued = replace(run.tickets[record.ticket_id], revoked=True)
    run = replace(run, tickets={**run.tickets, record.ticket_id: issued})
    if not record.with_peers:
        return run
    return replace(run, guests={key: name for key, name in run.guests.items() if name != record.ticket_id})


def _remember_tick(run: Run, tick: Tick, now_ms: int) -> Run:
    before = run.step
    if tick.attempt == 1:
        samples = sum(len(part) for part in tick.pool)
        pool, left, following = rules.draw(run.returned_samples, run.next_sample, samples)
        assert pool == tick.pool, "the journal's tick does not follow from the entries before it"
        run = replace(run, returned_samples=left, next_sample=following)
    run = replace(run, roster=tuple(share.public_key for share in tick.roster), left=frozenset())
    deadline = now_ms + rules.deadline_ms(run.config.clock, run.durations_ms)
    rarely = rules.rarely_awaited(run.config.clock, tick, run.peers)
    opened = rules.seen(OpenStep(tick, now_ms, deadline, rarely=rarely), run.peers)
    if before is not None and before.tick.step == tick.step:
        opened = _carry_over(before, opened)
    run = _move(run, Phase.OPEN)
    return replace(run, step=opened, reason=f"step {tick.step} is open")


def _carry_over(before: OpenStep, opened: OpenStep) -> OpenStep:
    """Claims of peers that are still in the roster stay; holders are told again, in the new roster's order."""
    members = {share.public_key for share in opened.tick.roster}
    old = [share.public_key for share in before.tick.roster]
    new = {share.public_key: index for index, share in enumerate(opened.tick.roster)}
    moves = [(1 << i, 1 << new[key]) for i, key in enumerate(old) if key in new]
    holders = {
        name: sum(to for bit, to in moves if mask & bit) for name, mask in before.holders.items() if name[0] in members
    }
    claims = {key: claim for key, claim in before.claims.items() if key in members}
    return replace(opened, claims=claims, holders=holders)


def _remember_entry(run: Run, record: EntryCommitted, now_ms: int) -> Run:
    entry = record.entry
    assert entry.step == run.head_step + 1, f"entry {entry.step} after head {run.head_step}"
    assert entry.parent_hash == run.head_hash, f"entry {entry.step} does not follow the head"
    peers = dict(run.peers)
    for c in entry.contributions:
        peer = peers.get(c.public_key, Peer(c.public_key))
        peers[c.public_key] = replace(peer, votes_accepted=peer.votes_accepted + 1, loss=c.loss)
    run = _remember_trust(replace(run, peers=peers), record)
    for _ in range(len(run.peers) - PEERS_KEPT):
        run = _bounded(run, b"")
    tokens = sum(c.tokens for c in entry.contributions)
    loss = sum(c.loss * c.tokens for c in entry.contributions) / tokens if tokens else run.loss
    agreed = {s: d for s, d in run.agreed_digests.items() if s >= entry.step - DIGEST_STEPS_KEPT}
    if entry.parent_state_digest:
        agreed[entry.step - 1] = entry.parent_state_digest
    run = replace(
        run,
        head_step=entry.step,
        head_hash=record.hash,
        next_sample=entry.next_sample,
        returned_samples=entry.returned_samples,
        step=None,
        left=frozenset(),
        loss=loss,
        payload_bytes_total=run.payload_bytes_total + sum(c.payload_bytes for c in entry.contributions),
        agreed_digests=agreed,
    )
    if entry.step < run.config.clock.steps:
        return _move(run, Phase.WAITING)
    return replace(_move(run, Phase.FINISHED), finish_by_ms=now_ms + run.config.clock.deadline_ms_max)


def _without(run: Run, public_key: bytes) -> Run:
    """A peer is out at once: its votes of the open step do not count, and nobody waits for it."""
    current = run.step
    if current is not None:
        claims = {key: claim for key, claim in current.claims.items() if key != public_key}
        holders = {name: mask for name, mask in current.holders.items() if name[0] != public_key}
        left = run.left | {public_key} if run.config.clock.strict and public_key in run.roster else run.left
        run = replace(run, left=left, step=replace(current, claims=claims, holders=holders, counted_within=-1))
    peer = run.peers.get(public_key, Peer(public_key))
    return _with_peer(run, replace(_move_peer(peer, PeerPhase.ABSENT), gone=True))


def _remember_trust(run: Run, record: EntryCommitted) -> Run:
    """What an entry says about who is believed, and the checks that it draws."""
    entry, peers, checked = record.entry, dict(run.peers), run.config.trust.enabled
    for exclusion in entry.exclusions:
        peer = peers.get(exclusion.public_key, Peer(exclusion.public_key))
        peers[peer.public_key] = replace(_move_peer(peer, PeerPhase.ABSENT), gone=True)
    if checked or entry.exclusions or entry.readmitted:
        run = replace(run, peers=peers, standings=trust.logged(run.standings, entry, checked=checked))
    if not checked:
        return run
    audit = trust.audit_of(run.config.trust, entry, record.hash)
    audits = {step: audit for step, audit in run.audits.items() if step > entry.step - VERDICT_STEPS}
    return replace(run, audits={**audits, entry.step: audit})


def _with_peer(run: Run, peer: Peer) -> Run:
    step = None if run.step is None else rules.met(run.step, peer)
    return _bounded(replace(run, step=step, peers={**run.peers, peer.public_key: peer}), peer.public_key)


def _bounded(run: Run, newest: bytes) -> Run:
    """Forget the absent peer with the fewest accepted votes, and what it reported, when there are too many."""
    if len(run.peers) <= PEERS_KEPT:
        return run
    kept = {newest, *run.roster}
    absent = [peer for key, peer in run.peers.items() if peer.phase is PeerPhase.ABSENT and key not in kept]
    gone = min(absent, key=lambda peer: (peer.votes_accepted, peer.public_key)).public_key
    return replace(
        run,
        peers={key: peer for key, peer in run.peers.items() if key != gone},
        reported_digests={s: {k: v for k, v in r.items() if k != gone} for s, r in run.reported_digests.items()},
        reported_snapshots={s: {k: v for k, v in r.items() if k != gone} for s, r in run.reported_snapshots.items()},
    )


def _move(run: Run, phase: Phase) -> Run:
    assert phase in MOVES[run.phase], f"{run.phase} cannot become {phase}"
    return replace(run, phase=phase)


def _move_peer(peer: Peer, phase: PeerPhase) -> Peer:
    assert phase in PEER_MOVES[peer.phase], f"peer {short(peer.public_key)}: {peer.phase} cannot become {phase}"
    return replace(peer, phase=phase)
