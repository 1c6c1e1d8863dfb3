"""A journal that lost its end (a disk, a backup): peers give back the entries that this coordinator signed.

Takes only what extends the head, and discards a step that the log has decided. Refuses to open a step before the log is as
long as a peer has proven it to be. A second entry for one step would make two logs.
"""

from __future__ import annotations

from coordinator.clock import memory, transitions
from coordinator.clock.effects import Arm, Effect, EndStream, Refuse, SendEntry
from coordinator.clock.events import EntriesReturned
from coordinator.clock.state import Outcome, PeerPhase, Phase, Run
from coordinator.clock.value_copy import replace
from protos.limits import STEP_MAX

HELD = STEP_MAX
"""`lost_until` of a run that comes from a backup: nobody knows how long its log was. The operator ends this."""


def returned(run: Run, event: EntriesReturned, now_ms: int) -> Outcome:
    """The entries after the head, one by one. Entries that the log has are skipped, because several peers give back the
    same."""
    if run.ended is not None:
        return run, [Refuse(event.public_key, f"{run.ended}: no entry follows it")]
    effects: list[Effect] = []
    first = run.head_step
    for record in event.entries:
        entry = record.entry
        if entry.step <= run.head_step:
            continue
        if (entry.step, entry.parent_hash) != (run.head_step + 1, run.head_hash):
            text = f"entry {entry.step} does not follow this log, whose head is {run.head_step}"
            effects.append(Refuse(event.public_key, text))
            break
        run, more = memory.written(run, record, now_ms)
        gone = [EndStream(exclusion.public_key) for exclusion in entry.exclusions]
        effects += [*more, SendEntry(entry.step), *gone]
    if run.head_step == first:
        return run, effects
    for peer in run.trainers:
        if peer.applied_step < run.head_step - 1:
            run = transitions.with_peer(run, transitions.move_peer(peer, PeerPhase.SYNCING))
    if run.phase is Phase.FINISHED:
        effects.append(Arm(run.finish_by_ms))
    run = replace(run, lost_until=max(run.lost_until, event.newest_step))
    return replace(
        run, reason=f"the journal had lost its end: peers gave back entries {first + 1} to {run.head_step}"
    ), effects


def is_missed(run: Run) -> str:
    """The entries that are still missing, in words; empty if none is."""
    if run.head_step >= run.lost_until:
        return ""
    if run.lost_until == HELD:
        return (
            f"the coordinator was restored from a backup: peers give back the entries after step {run.head_step}, and no step "
            "opens until the operator says that the log is whole"
        )
    return f"the journal had lost its end: waiting for a peer that gives back entries {run.head_step + 1} to {run.lost_until}"
