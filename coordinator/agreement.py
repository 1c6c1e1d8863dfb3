"""Which state counts after a step, and which snapshot: what most of those who have a say reported. Others re-sync.

Refuses to let strangers vote, to stop a peer that differs (it is told to start again), and to go back on what is agreed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from coordinator import memory, rules, transitions
from coordinator.events import Append, Effect, NoticeKind, Refuse, SendNotice, SnapshotAgreed, SnapshotFact
from coordinator.state import DIGEST_STEPS_KEPT, SNAPSHOT_STEPS_KEPT, Outcome, PeerPhase, Run

V = TypeVar("V")


def applied(run: Run, public_key: bytes, at_step: int, digest: bytes) -> Outcome:
    """A peer has applied an entry, and its state has this digest."""
    peer = run.peers[public_key]
    if at_step > run.head_step:
        return run, [Refuse(public_key, f"step {at_step} is not committed yet; the head is {run.head_step}")]
    peer = replace(peer, applied_step=at_step, state_digest=digest)
    run = transitions.with_peer(run, peer)
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


def stored(run: Run, public_key: bytes, fact: SnapshotFact) -> Outcome:
    """A peer has stored a snapshot."""
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
    return agree_snapshot(run, fact.step)


def agree_snapshot(run: Run, at_step: int) -> Outcome:
    """Fix the snapshot of a step, if enough have stored the same; whoever stored another is told to re-sync."""
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
    run = memory.remember(run, record, 0)
    effects: list[Effect] = [Append(record)]
    effects.append(SendNotice(NoticeKind.SNAPSHOT, f"snapshot of step {at_step} is agreed", fact))
    wrong = sorted(key for key, other in reports.items() if other.root != fact.root)
    run, more = _resync(run, wrong, at_step, "the snapshot that a majority stored")
    return run, effects + more


def final_digest(run: Run, at_step: int) -> Outcome:
    """The last vote on the state after a step that has no agreed digest yet: the most frequent one counts."""
    if at_step in run.agreed_digests:
        return run, []
    electorate = _electorate(run)
    counted = _votes(run.reported_digests.get(at_step, {}), electorate)
    value, reason = rules.agree(counted, len(electorate), final=True)
    return _agreed(run, at_step, value, reason) if value is not None else (run, [])


def _agreed(run: Run, at_step: int, digest: bytes, reason: str) -> Outcome:
    """Fix the digest of a step; whoever reported another is told to re-sync, never to exit."""
    agreed = {s: d for s, d in run.agreed_digests.items() if s > at_step - DIGEST_STEPS_KEPT} | {at_step: digest}
    reports = run.reported_digests.get(at_step, {})
    kept = {s: r for s, r in run.reported_digests.items() if s > at_step}
    run = replace(run, agreed_digests=agreed, reported_digests=kept)
    minority = sorted(key for key, value in reports.items() if value != digest)
    return _resync(run, minority, at_step, reason) if minority else (run, [])


def _electorate(run: Run) -> set[bytes]:
    """Whose word counts about the state: the last roster but who hung up; if nobody is left, every peer that is ready.

    A member that has not come back yet after a restart of the coordinator counts: the first to come does not decide alone.
    """
    members = {key for key in run.roster if key not in run.peers or not run.peers[key].gone}
    return members or {peer.public_key for peer in run.ready}


def _votes(reports: Mapping[bytes, V], electorate: set[bytes]) -> dict[bytes, V]:
    return {key: value for key, value in reports.items() if key in electorate}


def _caught_up(run: Run, public_key: bytes) -> Run:
    """A syncing peer within one step of the head is ready: it takes part from the next tick on."""
    peer = run.peers[public_key]
    if peer.phase is PeerPhase.SYNCING and peer.applied_step >= max(run.head_step - 1, 0):
        return transitions.with_peer(run, transitions.move_peer(peer, PeerPhase.READY))
    return run


def _resync(run: Run, keys: list[bytes], at_step: int, reason: str) -> Outcome:
    effects: list[Effect] = []
    for key in keys:
        peer = run.peers.get(key)
        if peer is None or peer.phase is PeerPhase.ABSENT:
            continue
        run = transitions.with_peer(
            run, replace(transitions.move_peer(peer, PeerPhase.SYNCING), applied_step=-1, state_digest=b"")
        )
        text = (
            f"your state after step {at_step} differs from what counts ({reason}): load the snapshot and replay the log"
        )
        effects.append(SendNotice(NoticeKind.RESYNC, text, run.snapshot, to=key))
    return run, effects
