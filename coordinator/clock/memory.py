"""The change that a record makes to a run. The change is the same when the record is written and when it is read back.

Refuses to decide anything, and refuses a journal whose ticks and entries do not follow from each other. Facts that are in no
record (connected peers, holders) are reported again by the peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordinator.clock import holder_counts, operator_orders, rules, run_changes, trust
from coordinator.clock.effects import (
    Append,
    DecayStarted,
    EntryCommitted,
    Equivocated,
    Evaluated,
    Judged,
    LayoutFixed,
    OrderSigned,
    OwnerNamed,
    PeerExcluded,
    PeerLeft,
    PeerReadmitted,
    Record,
    RunArchived,
    RunEnded,
    RunPaused,
    RunResumed,
    SettingsChanged,
    SnapshotAgreed,
    SnapshotFact,
    TicketMade,
    TicketRevoked,
    TicketUsed,
    TickOpened,
    Withdrawn,
)
from coordinator.clock.state import (
    DIGEST_STEPS_KEPT,
    EVALUATED_STEPS_KEPT,
    SNAPSHOT_STEPS_KEPT,
    SNAPSHOTS_KEPT,
    WITHDRAWN_KEPT,
    Issued,
    OpenStep,
    Outcome,
    Peer,
    PeerPhase,
    Phase,
    Run,
    Voted,
)
from coordinator.clock.value_copy import replace
from protos import accounts
from protos.assignment import merge
from protos.checks import VERDICT_STEPS
from protos.evaluation import reopen_evaluation
from protos.limits import POOL_RANGES_MAX, ROSTER_PEERS_MAX
from protos.log import Entry
from protos.orders import End, SignedOrder, order_id
from protos.tick import Tick


def written(run: Run, record: Record, now_ms: int = 0) -> Outcome:
    """`remember`, with the effect that makes the record durable before any peer learns of it."""
    return remember(run, record, now_ms), [Append(record)]


def remember(run: Run, record: Record, now_ms: int) -> Run:
    """The run after this record. `now_ms`: deadlines of a step that it opens, or of the run's end, count from then."""
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
            return _remember_snapshot(run, record)
        case Withdrawn():
            return _remember_withdrawal(run, record)
        case Judged():
            checks = {step: drawn for step, drawn in run.checks.items() if step > record.step}
            standings, recent = trust.judge(
                run.config.trust,
                run.standings,
                run.recent_checks,
                record.verdicts,
                record.arrival,
                record.samples,
                shared=run.config.optimizer.shared,
            )
            run = replace(run, standings=standings, recent_checks=recent, checks=checks)
            return _sent_away(run, {verdict.subject for verdict in record.verdicts})
        case Evaluated():
            run = _evaluated(run, record.step, record.public_key, record.envelope)
            return replace(run, unlogged=(*run.unlogged, record.envelope))
        case TicketMade() | TicketUsed() | TicketRevoked():
            return _remember_ticket(run, record)
        case Equivocated() | PeerExcluded() | PeerReadmitted():
            return _remember_standing(run, record)
        case (
            RunPaused() | RunResumed() | RunEnded() | RunArchived() | DecayStarted() | SettingsChanged() | OrderSigned()
        ):
            return _remember_life(run, record, now_ms)
        case OwnerNamed():
            before, named = run.peers.get(record.public_key, Peer(record.public_key)), record.owner
            peer = replace(before, owner=named, owner_kept=named, owner_step=record.step)
            return run_changes.with_peer(run, peer)


def _remember_signature(run: Run, record: OrderSigned, now_ms: int) -> Run:
    """One record has the last signature of an order and what follows from it, so a crash cannot part them."""
    name = order_id(run.run_id, record.body)
    orders = operator_orders.with_signature(run.orders, name, record)
    signed = orders.waiting[name]
    if len(signed.signatures) < run.config.operators.needed:
        return replace(run, orders=orders)
    after = run_changes.decided_next(run)
    return remember(
        replace(run, orders=operator_orders.as_obeyed(orders, name, after)), _obeyed(run, signed, after), now_ms
    )


def _obeyed(run: Run, signed: SignedOrder, after_step: int) -> PeerExcluded | RunEnded | SettingsChanged:
    order = signed.order
    if order.excludes:
        return PeerExcluded(order.excludes, order.reason)
    if order.finishes:
        return RunEnded(End(run.head_step, run.head_hash, order.reason, signed))
    return SettingsChanged(after_step, order.settings)


def _remember_life(
    run: Run,
    record: RunPaused | RunResumed | RunEnded | RunArchived | DecayStarted | SettingsChanged | OrderSigned,
    now_ms: int,
) -> Run:
    match record:
        case RunPaused():
            return replace(run, pause=record.reason)
        case RunResumed():
            return replace(run, pause=None)
        case RunEnded():
            return _remember_end(run, record, now_ms)
        case RunArchived():
            return replace(run, archived=record.archived)
        case DecayStarted():
            return replace(run, decay=record)
        case SettingsChanged():
            return run_changes.applied(run, (*run.changes, record))
        case OrderSigned():
            return _remember_signature(run, record, now_ms)


def _evaluated(run: Run, step: int, author: bytes, envelope: bytes) -> Run:
    """With one more evaluation; those of the last states stay."""
    found = {**run.evaluations, step: {**run.evaluations.get(step, {}), author: envelope}}
    return replace(run, evaluations={at: found[at] for at in sorted(found)[-EVALUATED_STEPS_KEPT:]})


def _remember_evaluations(run: Run, entry: Entry) -> Run:
    """The entry has these evaluations: the next one need not. An entry that came back may bring some that were lost."""
    for envelope in entry.evaluations:
        if envelope not in run.unlogged:
            made = reopen_evaluation(envelope)
            run = _evaluated(run, made.step, made.author, envelope)
    return replace(run, unlogged=tuple(it for it in run.unlogged if it not in entry.evaluations))


def _remember_ticket(run: Run, record: TicketMade | TicketUsed | TicketRevoked) -> Run:
    match record:
        case TicketMade():
            return replace(run, tickets={**run.tickets, record.ticket.ticket_id: Issued(record.ticket)})
        case TicketUsed():
            anchors = run.anchor_guests
            if run.tickets[record.ticket_id].ticket.anchor:
                anchors |= {record.public_key}
            return replace(run, guests={**run.guests, record.public_key: record.ticket_id}, anchor_guests=anchors)
        case TicketRevoked():
            return _remember_revocation(run, record)


def _remember_standing(run: Run, record: Equivocated | PeerExcluded | PeerReadmitted) -> Run:
    match record:
        case Equivocated():
            standings = trust.convicted(run.standings, record.offence)
            return _without(replace(run, standings=standings), record.offence.author)
        case PeerExcluded():
            standings = trust.removed(run.standings, record.public_key, record.reason)
            return _without(replace(run, standings=standings), record.public_key)
        case PeerReadmitted():
            orders = operator_orders.readmitted(run.orders, record.public_key)
            return replace(run, standings=trust.readmitted(run.standings, record.public_key), orders=orders)


def _remember_revocation(run: Run, record: TicketRevoked) -> Run:
    issued = replace(run.tickets[record.ticket_id], revoked=True)
    run = replace(run, tickets={**run.tickets, record.ticket_id: issued})
    if not record.with_peers:
        return run
    kept = {key: name for key, name in run.guests.items() if name != record.ticket_id}
    return replace(run, guests=kept, anchor_guests=run.anchor_guests & kept.keys())


def _remember_snapshot(run: Run, record: SnapshotAgreed) -> Run:
    """Keep a new snapshot in the order of steps, the newest last. The snapshot may be older than others, if an anchor was
    away."""
    others = [fact for fact in run.snapshots if fact.step != record.snapshot.step]
    snapshots = tuple(sorted([*others, record.snapshot], key=lambda fact: fact.step)[-SNAPSHOTS_KEPT:])
    kept = {s: r for s, r in run.reported_snapshots.items() if s >= snapshots[0].step}
    return with_reported(replace(run, snapshots=snapshots), kept)


def with_reported(run: Run, reported: Mapping[int, Mapping[bytes, SnapshotFact]]) -> Run:
    """The run with these reports of snapshots: of the newest agreed one, whose holders joiners need however long no other is
    agreed (the anchor is away), and of the SNAPSHOT_STEPS_KEPT newest steps besides."""
    agreed = -1 if run.snapshot is None else run.snapshot.step
    newest = sorted(step for step in reported if step != agreed)[-SNAPSHOT_STEPS_KEPT:]
    return replace(run, reported_snapshots={s: reported[s] for s in sorted(reported) if s == agreed or s in newest})


def _remember_withdrawal(run: Run, record: Withdrawn) -> Run:
    """Reports of peers about these steps do not count any more, either."""
    first = record.from_step
    return replace(
        run,
        withdrawn=(*run.withdrawn, record)[-WITHDRAWN_KEPT:],
        snapshots=tuple(fact for fact in run.snapshots if fact.step < first),
        agreed_digests={step: digest for step, digest in run.agreed_digests.items() if step < first},
        reported_digests={step: reports for step, reports in run.reported_digests.items() if step < first},
        reported_snapshots={step: reports for step, reports in run.reported_snapshots.items() if step < first},
    )


def _remember_tick(run: Run, tick: Tick, now_ms: int) -> Run:
    before = run.step
    if tick.attempt == 1:
        samples = sum(len(part) for part in tick.pool)
        pool, left, following = rules.draw(run.returned_samples, run.next_sample, samples)
        assert pool == tick.pool, "the journal's tick does not follow from the entries before it"
        run = replace(run, returned_samples=left, next_sample=following)
    run = replace(run, roster=tuple(share.public_key for share in tick.roster), left=frozenset())
    turns = {key: replace(run.peers[key], last_turn=tick.step) for key in run.roster if key in run.peers}
    run = replace(run, peers={**run.peers, **turns})
    checks_due = run.checks[tick.step - 1].most_of_one if tick.step - 1 in run.checks else 0
    deadline = now_ms + rules.deadline_ms(run.config.clock, run.durations_ms, checks_due)
    rarely = rules.rarely_awaited(run.config.clock, tick, run.peers)
    opened = rules.seen(OpenStep(tick, now_ms, deadline, rarely=rarely), run.peers)
    if before is not None and before.tick.step == tick.step:
        opened = _carry_over(before, opened)
    run = run_changes.move(run, Phase.OPEN)
    return replace(run, step=opened, reason=f"step {tick.step} is open")


def _carry_over(before: OpenStep, opened: OpenStep) -> OpenStep:
    """Claims of peers that are still in the roster stay, and so do the holdings of these claims."""
    claims = {key: claim for key, claim in before.claims.items() if key in opened.tick.places}
    gone = {key: claim for key, claim in before.claims.items() if key not in claims}
    earlier = dict([*before.earlier.items(), *gone.items()][-ROSTER_PEERS_MAX:])
    return holder_counts.carried_over(before, replace(opened, claims=claims, earlier=earlier))


def _remember_entry(run: Run, record: EntryCommitted, now_ms: int) -> Run:
    entry = record.entry
    assert entry.step == run.head_step + 1, f"entry {entry.step} after head {run.head_step}"
    assert entry.parent_hash == run.head_hash, f"entry {entry.step} does not follow the head"
    if entry.evaluations:
        run = _remember_evaluations(run, entry)
    if entry.orders or run.orders.unlogged:
        done = {order_id(run.run_id, signed.body): signed for signed in entry.orders}
        run = replace(run, orders=operator_orders.logged(run.orders, done, entry))
    run = replace(run_changes.adopted(run, entry), roster=_roster_of(run, entry))
    peers = dict(run.peers)
    for c in entry.contributions:
        peer = rules.served(run, peers.get(c.public_key, Peer(c.public_key)), entry.step)
        peers[c.public_key] = replace(peer, votes_accepted=peer.votes_accepted + 1, loss=c.loss)
    run = run_changes.bounded(_remember_trust(replace(run, electors=None, peers=peers), record))
    loss = accounts.loss_of(entry.contributions, run.loss)
    newest = max(run.agreed_digests, default=0)  # it tells how long no state has been agreed on
    agreed = {s: d for s, d in run.agreed_digests.items() if s >= entry.step - DIGEST_STEPS_KEPT or s == newest}
    if entry.parent_state_digest:
        agreed[entry.step - 1] = entry.parent_state_digest
    run = replace(
        run,
        head_step=entry.step,
        head_hash=record.hash,
        next_sample=entry.next_sample,
        returned_samples=entry.returned_samples,
        voted=_voted(run, entry),
        reported_digests={s: r for s, r in run.reported_digests.items() if s >= entry.step - _digests_kept(run)},
        step=None,
        left=frozenset(),
        loss=loss,
        payload_bytes_total=run.payload_bytes_total + sum(c.payload_bytes for c in entry.contributions),
        agreed_digests=agreed,
    )
    if entry.step < run.config.clock.steps:
        return run_changes.move(run, Phase.WAITING)
    return _finished(replace(run, reason=f"finished: {entry.step} steps"), now_ms)


def _finished(run: Run, now_ms: int) -> Run:
    return replace(run_changes.move(run, Phase.FINISHED), finish_by_ms=now_ms + run.config.clock.deadline_ms_max)


def _remember_end(run: Run, record: RunEnded, now_ms: int) -> Run:
    """No step follows. The samples of a step that is given up go back, for a fork of the run."""
    end = record.end
    assert (end.step, end.entry_hash) == (run.head_step, run.head_hash), "the end does not name the newest entry"
    unused = run.step.tick.pool if run.step is not None else ()
    returned = rules.bounded(merge([*run.returned_samples, *unused]), POOL_RANGES_MAX - 1)
    ended = replace(run, ended=end, pause=None, step=None, left=frozenset(), returned_samples=returned, reason=str(end))
    return _finished(ended, now_ms)


def _roster_of(run: Run, entry: Entry) -> tuple[bytes, ...]:
    """The roster that an entry decided about. If an entry came back without its tick, these are the peers that it names."""
    authors = {c.public_key for c in (*entry.contributions, *entry.trials)}
    if run.step is not None and run.step.tick.step == entry.step and authors <= set(run.roster):
        return run.roster
    return tuple(sorted(authors))


def _voted(run: Run, entry: Entry) -> dict[int, Voted]:
    """Rosters of the last steps, and of the last steps with a snapshot: peers report about these for a while."""
    due = [step for step in sorted([*run.voted, entry.step]) if run.snapshot_is_due(step)][-SNAPSHOT_STEPS_KEPT:]
    kept = {step: run.voted[step] for step in run.voted if step >= entry.step - 1 or step in due}
    voted = Voted(run.roster, frozenset(c.public_key for c in entry.contributions))
    if not voted.counted:  # else nobody's word on the state after a step without votes would count
        voted = kept.get(entry.step - 1, voted)
    return {**kept, entry.step: voted}


def _digests_kept(run: Run) -> int:
    """The number of steps for which a reported digest waits for other reports: an anchor may be behind the log."""
    return DIGEST_STEPS_KEPT if run.anchored else 1


def _remember_trust(run: Run, record: EntryCommitted) -> Run:
    """The standings after an entry, and the checks that the entry draws."""
    entry, peers, checked = record.entry, dict(run.peers), run.config.trust.enabled
    for exclusion in entry.exclusions:
        peer = peers.get(exclusion.public_key, Peer(exclusion.public_key))
        peers[peer.public_key] = replace(run_changes.move_peer(peer, PeerPhase.ABSENT), gone=True)
    if checked or entry.exclusions or entry.readmitted:
        standings = trust.logged(run.standings, entry, run.roster if checked else ())
        run = replace(run, electors=None, peers=peers, standings=standings)
    if not checked:
        return run
    drawn = trust.checks_of(run.config.trust, entry, record.hash)
    kept = {step: earlier for step, earlier in run.checks.items() if step > entry.step - VERDICT_STEPS}
    return replace(run, checks={**kept, entry.step: drawn})


def _sent_away(run: Run, judged: Iterable[bytes]) -> Run:
    """Peers that the verdicts exclude take part no more at once. The entries name only a few of them at a time."""
    for key in sorted(judged):
        peer = run.peers.get(key)
        if peer is not None and not peer.gone and run.standings.get(key, trust.Standing()).excluded:
            run = run_changes.with_peer(run, replace(run_changes.move_peer(peer, PeerPhase.ABSENT), gone=True))
    return run


def _without(run: Run, public_key: bytes) -> Run:
    """A peer is out at once: its votes of the open step do not count, and the step does not wait for it."""
    current = run.step
    if current is not None:
        claims = {key: claim for key, claim in current.claims.items() if key != public_key}
        left = run.left | {public_key} if run.config.clock.strict and public_key in run.roster else run.left
        run = replace(run, left=left, step=holder_counts.without(replace(current, claims=claims), public_key))
    peer = run.peers.get(public_key, Peer(public_key))
    return run_changes.with_peer(run, replace(run_changes.move_peer(peer, PeerPhase.ABSENT), gone=True))
