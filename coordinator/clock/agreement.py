"""Which state counts after a step, and which snapshot: the value that more than half of the electors reported.

`rules.py` says which peers are electors. Refuses to decide with fewer reports, or to break a tie: then nothing is
agreed, and the run goes on. Refuses to stop a peer that differs: the peer gets a re-sync, and computes again. Only the
operator or an anchor withdraws an agreed state. ADR 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.clock import memory, rules, run_changes
from coordinator.clock.effects import (
    Append,
    Effect,
    EndStream,
    LayoutFixed,
    NoticeKind,
    Refuse,
    SendNotice,
    SnapshotAgreed,
    SnapshotFact,
    Withdrawn,
)
from coordinator.clock.state import DIGEST_STEPS_KEPT, Outcome, PeerPhase, Run
from coordinator.clock.value_copy import replace
from protos.identity import short

NAMES_SHOWN_MAX = 8
# A snapshot is agreed when so many eligible peers have it on their disks, or all electors if they are fewer. Peers forget the
# payloads before an agreed snapshot, so it must not depend on the claim of a new identity. ADR 30.
STORED_MIN = 2
# A peer whose states differ so often in a row loses its place. An honest peer has stopped long before.
CONTRADICTED_MAX = 8


def applied(run: Run, public_key: bytes, at_step: int, digest: bytes) -> Outcome:
    """A peer has applied an entry, and its state has this digest."""
    peer = run.peers[public_key]
    if at_step > run.head_step:
        return run, [Refuse(public_key, f"step {at_step} is not committed yet; the head is {run.head_step}")]
    peer = replace(peer, applied_step=at_step, state_digest=digest)
    run = run_changes.with_peer(run, peer)
    if run.is_withdrawn(at_step):
        return _caught_up(run, public_key), []
    agreed = run.agreed_digests.get(at_step)
    if agreed is not None and agreed != digest:
        return _resync(run, {public_key: "the log holds another digest"}, at_step)
    if agreed is not None and peer.contradicted:
        run = run_changes.with_peer(run, replace(peer, contradicted=0))
    if agreed is None and at_step > 0 and at_step >= run.head_step - (DIGEST_STEPS_KEPT if peer.anchor else 1):
        reports = {**run.reported_digests.get(at_step, {}), public_key: digest}
        run = replace(run, reported_digests={**run.reported_digests, at_step: reports})
        run = rules.with_electors(run, at_step)
        value, reason = rules.agree(reports, rules.electors(run, at_step))
        if value is not None:
            run, effects = _agreed(run, at_step, value, reason)
            return (_caught_up(run, public_key) if digest == value else run), effects
    return _caught_up(run, public_key), []


def stored(run: Run, public_key: bytes, fact: SnapshotFact) -> Outcome:
    """A peer has stored a snapshot."""
    known = next((agreed for agreed in run.snapshots if agreed.step == fact.step), None)
    if known is not None:
        reports = {**run.reported_snapshots.get(fact.step, {}), public_key: fact}
        run = memory.with_reported(run, {**run.reported_snapshots, fact.step: reports})
        if fact != known:
            return _resync(run, {public_key: "another snapshot is agreed"}, fact.step)
        return run, []
    if run.is_withdrawn(fact.step) or (run.snapshot is not None and fact.step < run.snapshot.step):
        return run, []
    if fact.step > run.head_step:
        return run, [Refuse(public_key, f"snapshot of step {fact.step}: the head is {run.head_step}")]
    if not run.snapshot_is_due(fact.step):
        return run, [Refuse(public_key, f"snapshot of step {fact.step}: none is due there")]
    reports = {**run.reported_snapshots.get(fact.step, {}), public_key: fact}
    run = memory.with_reported(run, {**run.reported_snapshots, fact.step: reports})
    return agree_snapshot(run, fact.step)


def agree_snapshot(run: Run, at_step: int) -> Outcome:
    """Fix the snapshot of a step, if enough peers have stored the same; a peer that stored another one gets a re-sync.

    The snapshot of step 0 fixes the layout, too, if nothing has yet.
    """
    reports = run.reported_snapshots.get(at_step, {})
    if at_step == 0 and not run.anchored and len(run.trainers) < run.config.clock.min_peers:
        return run, []  # the first peers do not decide alone
    members = rules.electors(run, at_step)
    if not run.layout_digest:
        with_layout = {key: (fact, *_layout(run, key)) for key, fact in reports.items() if key in run.peers}
        agreed, _ = rules.agree(with_layout, members)
        if agreed is None:
            return run, []
        fact, layout, parameters = agreed
        run, effects = fix_layout(run, layout, parameters)
    else:
        found, _ = rules.agree(reports, members)
        if found is None:
            return run, []
        fact, effects = found, []
    keepers = rules.eligible(run, at_step)
    stored = sum(other == fact and other.kept for key, other in reports.items() if key in keepers)
    if stored < min(STORED_MIN, len(members)):
        return run, effects  # a joiner might find no peer that has the pieces
    record = SnapshotAgreed(fact)
    run = memory.remember(run, record, 0)
    effects.append(Append(record))
    effects.append(SendNotice(NoticeKind.SNAPSHOT, f"snapshot of step {at_step} is agreed", fact))
    wrong = {key: "another snapshot is agreed" for key, other in sorted(reports.items()) if other != fact}
    run, more = _resync(run, wrong, at_step)
    return run, effects + more


def fix_layout(run: Run, layout_digest: bytes, parameters: int) -> Outcome:
    """Every peer's parameters must have this layout from now on. Peers with another layout lose their place, and get the
    reason when they join again."""
    record = LayoutFixed(layout_digest, parameters)
    run, effects = memory.written(run, record)
    for key, peer in sorted(run.peers.items()):
        if peer.phase is not PeerPhase.ABSENT and peer.layout_digest != layout_digest:
            run = run_changes.with_peer(run, replace(run_changes.move_peer(peer, PeerPhase.ABSENT), gone=True))
            effects.append(EndStream(key))
    return run, effects


def start_problem(run: Run) -> str:
    """Why the initial state is not agreed yet, for people."""
    reports = run.reported_snapshots.get(0, {})
    if run.anchored and not run.anchors_here:
        return "waiting for an anchor to store the initial state: the operator starts one with `swarmentum anchor`"
    electors = rules.electors(run, 0)
    here = {key: fact for key, fact in reports.items() if key in electors}
    kinds = {(fact, _layout(run, key)) for key, fact in here.items()}
    if len(kinds) > 1:
        return (
            f"{len(here)} peers built {len(kinds)} different initial states, and none of them has a majority: their "
            "versions of swarmentum or of the model differ, or a peer lies; the operator can start an anchor, or exclude peers"
        )
    return "waiting for the peers to store the initial state"


def found_bad(run: Run, public_key: bytes, fact: SnapshotFact) -> Outcome:
    """A peer loaded an agreed snapshot, and its state differs from the log. Only an anchor's report withdraws the
    snapshot."""
    if fact not in run.snapshots or fact.step == 0:
        return run, []
    if public_key in run.anchors_here:
        return withdraw(run, fact.step)
    return run, [
        Refuse(
            public_key,
            f"snapshot of step {fact.step}: your report is noted; only the operator or an anchor can withdraw it",
        )
    ]


def withdraw(run: Run, from_step: int) -> Outcome:
    """Agreed snapshots of this step and later ones, and the state digests since, do not count any more."""
    record = Withdrawn(from_step, max(run.head_step, from_step))
    run, effects = memory.written(run, record)
    fact, text = (
        run.snapshot,
        f"the agreed snapshots and digests of steps {from_step} to {record.to_step} are withdrawn",
    )
    return run, [*effects, SendNotice(NoticeKind.SNAPSHOT, text, fact)] if fact else effects


def _layout(run: Run, key: bytes) -> tuple[bytes, int]:
    return run.peers[key].layout_digest, run.peers[key].parameters


def _agreed(run: Run, at_step: int, digest: bytes, reason: str) -> Outcome:
    """Fix the digest of a step. A peer that reported another one gets a re-sync, with the names of peers that reported the
    same."""
    agreed = {s: d for s, d in run.agreed_digests.items() if s > run.head_step - DIGEST_STEPS_KEPT} | {at_step: digest}
    reports = run.reported_digests.get(at_step, {})
    kept = {s: r for s, r in run.reported_digests.items() if s != at_step}
    run = replace(run, agreed_digests=agreed, reported_digests=kept)
    minority = {key: value for key, value in reports.items() if value != digest}
    return _resync(run, {key: f"{reason}; {_company(minority, key)}" for key in sorted(minority)}, at_step)


def _company(reports: Mapping[bytes, bytes], public_key: bytes) -> str:
    """The names of other peers that reported the same value as this peer."""
    same = sorted(key for key, value in reports.items() if key != public_key and value == reports[public_key])
    if not same:
        return "no other peer reported the same as you"
    names = ", ".join(map(short, same[:NAMES_SHOWN_MAX])) + (", ..." if len(same) > NAMES_SHOWN_MAX else "")
    return f"the same as you reported: {names}"


def _caught_up(run: Run, public_key: bytes) -> Run:
    """A syncing peer within one step of the head is ready: it takes part from the next tick on."""
    peer = run.peers[public_key]
    if peer.phase is PeerPhase.SYNCING and peer.applied_step >= max(run.head_step - 1, 0):
        return run_changes.with_peer(run, replace(run_changes.move_peer(peer, PeerPhase.READY), syncing_since_ms=0))
    return run


def _resync(run: Run, reasons: Mapping[bytes, str], at_step: int) -> Outcome:
    """Peers whose state differs from the agreed one, each with the reason. Such peers take part again once their state
    agrees."""
    effects: list[Effect] = []
    for key, reason in reasons.items():
        peer = run.peers.get(key)
        if peer is None or peer.phase is PeerPhase.ABSENT:
            continue
        peer = replace(peer, applied_step=-1, state_digest=b"", contradicted=peer.contradicted + 1)
        if peer.contradicted > CONTRADICTED_MAX:
            run = run_changes.with_peer(run, replace(run_changes.move_peer(peer, PeerPhase.ABSENT), gone=True))
            effects += [
                Refuse(key, f"{peer.contradicted} states of yours in a row differ from the agreed ones: join again"),
                EndStream(key),
            ]
            continue
        run = run_changes.with_peer(run, run_changes.move_peer(peer, PeerPhase.SYNCING))
        text = f"your state after step {at_step} differs from the agreed one ({reason})"
        effects.append(SendNotice(NoticeKind.RESYNC, text, run.snapshot, to=key, step=at_step))
    return run, effects
