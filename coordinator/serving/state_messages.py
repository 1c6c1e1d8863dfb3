"""Parts of a run's state as messages to peers. Values in, messages out; decides nothing."""

from __future__ import annotations

from coordinator.clock.effects import NoticeKind, SendAnnouncement, SendNotice, SendSumRequest, SendTick
from coordinator.clock.records import SnapshotFact
from coordinator.clock.state import PeerPhase, Run
from protos import limits
from protos.changes import settings_body
from protos.end import seal_end
from protos.identity import Identity
from protos.log import contributions_body
from protos.tick import seal_tick
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2

SNAPSHOT_HOLDERS_MAX = 16

_NOTICE_KINDS = {
    NoticeKind.SNAPSHOT: pb.NoticeKind.NOTICE_KIND_SNAPSHOT,
    NoticeKind.RESYNC: pb.NoticeKind.NOTICE_KIND_RESYNC,
    NoticeKind.FINISHED: pb.NoticeKind.NOTICE_KIND_FINISHED,
    NoticeKind.WAITING: pb.NoticeKind.NOTICE_KIND_WAITING,
    NoticeKind.VOTE: pb.NoticeKind.NOTICE_KIND_VOTE,
}


def withdrawn_of(run: Run) -> list[pb.Withdrawn]:
    """Withdrawn steps, oldest first."""
    return [pb.Withdrawn(from_step=gone.from_step, to_step=gone.to_step) for gone in run.withdrawn]


def earlier_snapshots(run: Run) -> list[pb.SnapshotRef]:
    """The agreed ones before the newest, newest first."""
    return [snapshot_ref(run, fact) for fact in reversed(run.snapshots[:-1])]


def snapshot_ref(run: Run, fact: SnapshotFact) -> pb.SnapshotRef:
    """A snapshot with the connected peers that reported to store it: joiners ask only these for its pieces."""
    reports = run.reported_snapshots.get(fact.step, {})
    here = [peer.public_key for peer in run.peers.values() if peer.phase is not PeerPhase.ABSENT]
    stored = [key for key in here if (said := reports.get(key)) == fact and said is not None and said.kept]
    holders = stored[:SNAPSHOT_HOLDERS_MAX]
    return pb.SnapshotRef(step=fact.step, root=fact.root, total_bytes=fact.total_bytes, holders=holders)


def end_of(run: Run, identity: Identity) -> envelope_pb2.SignedEnvelope | None:
    """The signed end of a run that the operator ended; None for any other run."""
    return None if run.ended is None else seal_end(identity, run.run_id, run.ended)


def changed_of(run: Run) -> list[pb.ChangedSetting]:
    """Every change of a setting by the operator, oldest first."""
    return [
        pb.ChangedSetting(setting=setting, from_step=change.after_step + 1)
        for change in run.changes
        for setting in settings_body(change.settings)
    ]


def for_one(effect: SendSumRequest | SendAnnouncement) -> pb.FollowResponse:
    """The votes that an aggregator is to add up, or another announcement than a peer has heard."""
    if isinstance(effect, SendAnnouncement):
        return pb.FollowResponse(announcement=envelope_pb2.SignedEnvelope.FromString(effect.envelope))
    votes = contributions_body(effect.contributions)
    return pb.FollowResponse(sum=pb.SumRequest(step=effect.step, attempt=effect.attempt, contributions=votes))


def tick_event(run: Run, effect: SendTick, identity: Identity) -> pb.TickEvent:
    """A signed tick with the time that is left, and where its aggregators can be dialled."""
    envelope = seal_tick(identity, run.run_id, effect.tick)
    several = [run.peers[key].addresses for key in effect.tick.aggregators if key in run.peers]
    most = max(1, limits.ADDRESSES_MAX * limits.AGGREGATORS_MAX // max(1, len(several)))
    addresses = [address for theirs in several for address in theirs[:most]]
    return pb.TickEvent(envelope=envelope, deadline_ms=max(effect.deadline_ms, 0), aggregators=addresses)


def notice(run: Run, effect: SendNotice, identity: Identity) -> pb.Notice:
    """A notice to followers, as a message."""
    snapshot = snapshot_ref(run, effect.snapshot) if effect.snapshot else None
    return pb.Notice(
        kind=_NOTICE_KINDS[effect.kind],
        reason=effect.reason,
        snapshot=snapshot,
        step=effect.step,
        withdrawn=withdrawn_of(run),
        end=end_of(run, identity),
    )
