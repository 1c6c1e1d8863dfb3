"""The life of a run beside its steps: a pause, changes of settings in it, a decay of its learning rate, its end; and the return
of entries that a journal has lost.

A paused run opens no step. The open step is decided by its usual rules, because peers have computed for it. If its deadline
passes without a payload that counts, the step waits for the end of the pause. The end comes at the newest entry: an open step
is given up, and the coordinator signs no later entry. Refuses a request that the run's state does not allow, with its reason.
ADR 44.

A journal may lose its end (a disk, a backup): peers give back the entries that this coordinator signed. Takes only what extends
the head, and discards a step that the log has decided. Refuses to open a step before the log is as long as a peer has proven it
to be. A second entry for one step would make two logs.
"""

from __future__ import annotations

from coordinator.clock import admission, memory, operator_orders, rules, run_changes
from coordinator.clock.effects import (
    Arm,
    DecayStarted,
    Effect,
    EndStream,
    NoticeKind,
    OrderSigned,
    Refuse,
    RunArchived,
    RunEnded,
    RunPaused,
    RunResumed,
    SendEntry,
    SendNotice,
    SettingsChanged,
)
from coordinator.clock.events import (
    ArchiveAsked,
    ChangeAsked,
    DecayAsked,
    EntriesReturned,
    ExclusionAsked,
    FinishAsked,
    OrderAsked,
    PauseAsked,
    ResumeAsked,
    Steered,
)
from coordinator.clock.findings import FORGED
from coordinator.clock.state import Outcome, PeerPhase, Phase, Run
from coordinator.clock.value_copy import replace
from protos.limits import STEP_MAX
from protos.orders import End, OperatorOrder, order_from_body, order_id

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
            run = run_changes.with_peer(run, run_changes.move_peer(peer, PeerPhase.SYNCING))
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


GOES_ON = "the operator lets the run go on"
FINISHED = "the run is finished: it opens no step any more"


def asked(run: Run, event: Steered, now_ms: int) -> Outcome:
    """One request of the operator: done, or refused with a reason."""
    refusal = _refusal(run, event) or _alone(run, event)
    if refusal:
        return run, [Refuse(b"", refusal)]
    match event:
        case PauseAsked():
            run, effects = memory.written(run, RunPaused(event.reason))
            return run, [*effects, SendNotice(NoticeKind.WAITING, words(run))]
        case ResumeAsked():
            run, effects = memory.written(run, RunResumed())
            return _overdue(run, now_ms), [*effects, SendNotice(NoticeKind.WAITING, GOES_ON)]
        case FinishAsked():
            return ended(run, event.reason, now_ms)
        case DecayAsked():
            return memory.written(run, DecayStarted(run_changes.decided_next(run), event.steps))
        case ChangeAsked():
            run, effects = memory.written(run, SettingsChanged(run_changes.decided_next(run), event.settings))
            return run, [*effects, *_told(run, event)]
        case ArchiveAsked():
            here = [key for key, peer in sorted(run.peers.items()) if peer.is_here]
            run, effects = memory.written(run, RunArchived(event.archived))
            return run, [*effects, *(EndStream(key) for key in here if event.archived)]


def ended(run: Run, reason: str, now_ms: int) -> Outcome:
    """The run ends at its newest entry."""
    end = End(run.head_step, run.head_hash, reason)
    run, effects = memory.written(run, RunEnded(end), now_ms)
    return run, [*effects, *_told(run, FinishAsked(reason))]


def ordered(run: Run, event: OrderAsked, now_ms: int) -> Outcome:
    """One more signature of an order of the operators. The last one that it needs is refused while the run's state does not
    allow what the order says: it can be given again later."""
    name, orders = order_id(run.run_id, event.body), run.orders
    refusal = operator_orders.refusal(orders, name, event.body, event.public_key, event.unix_ms)
    last, wish = operator_orders.completes(orders, run.config.operators, name), _wish(order_from_body(event.body))
    if last:
        refusal = refusal or operator_orders.no_room(orders, event.body, event.unix_ms) or _refusal(run, wish)
    elif run.phase is Phase.FINISHED:
        refusal = FINISHED
    if refusal:
        return run, [Refuse(b"", refusal)]
    record = OrderSigned(event.body, event.public_key, event.signature, event.unix_ms)
    run, effects = memory.written(run, record, now_ms)
    return run, [*effects, *(_told(run, wish) if last else [])]


_Wish = ExclusionAsked | FinishAsked | ChangeAsked


def _wish(order: OperatorOrder) -> _Wish:
    """What an order asks for, as the coordinator's own key asks where the operators have none."""
    if order.excludes:
        return ExclusionAsked(order.excludes, order.reason)
    return FinishAsked(order.reason) if order.finishes else ChangeAsked(order.settings)


def _told(run: Run, wish: _Wish) -> list[Effect]:
    """What peers hear of it, once it is in the journal."""
    match wish:
        case ExclusionAsked():
            return [EndStream(wish.public_key)]
        case FinishAsked():
            return [SendNotice(NoticeKind.WAITING, str(run.ended)), Arm(run.finish_by_ms)]
        case ChangeAsked():
            return [SendNotice(NoticeKind.WAITING, f"{words(run)}; {run_changes.said(run.changes[-1])}")]


def _alone(run: Run, event: Steered) -> str:
    """Why the coordinator's own key may not ask for this; empty if it may."""
    match event:
        case FinishAsked():
            return operator_orders.alone(run.config.operators, "the end of the run")
        case ChangeAsked():
            return operator_orders.alone(run.config.operators, "a change of its settings")
        case DecayAsked() if run.config.operators.keys:
            return (
                "a decay ends the run, and the end of this run needs an order of its operators: they can change "
                "clock.steps, optimizer.schedule and optimizer.decay_steps with `run change`"
            )
    return ""


def _overdue(run: Run, now_ms: int) -> Run:
    """The deadline of a step that waited for the end of the pause is now: it is opened again at once."""
    current, longest = run.step, run.config.clock.deadline_ms_max
    if current is None or current.deadline_at_ms - current.opened_ms <= longest:
        return run
    return replace(run, step=replace(current, deadline_at_ms=now_ms))


def _refusal(run: Run, event: Steered | ExclusionAsked) -> str:
    """Why a request is not allowed; empty if it is."""
    if isinstance(event, ArchiveAsked):
        return _no_archive(run, event)
    if run.phase is Phase.FINISHED:
        return FINISHED
    match event:
        case ExclusionAsked():
            may, reason = admission.may_exclude(run, event.public_key)
            return "" if may else reason
        case PauseAsked():
            return f"the run is paused already: {words(run)}" if run.is_paused else ""
        case ResumeAsked():
            return "" if run.is_paused else "the run is not paused"
        case DecayAsked():
            return _no_decay(run, event)
        case ChangeAsked():
            missed = is_missed(run)
            return f"the settings cannot change yet: {missed}" if missed else run_changes.refusal(run, event.settings)
        case FinishAsked():  # a longer log may come back, and no entry may follow the end
            missed = is_missed(run)
            return f"the run cannot end yet: {missed}" if missed else ""


def _no_archive(run: Run, event: ArchiveAsked) -> str:
    if run.archived == event.archived:
        return f"the run is {'archived already' if run.archived else 'not archived'}"
    return may_go(run)


def _no_decay(run: Run, event: DecayAsked) -> str:
    optimizer, steps, after = run.config.optimizer, run.config.clock.steps, run_changes.decided_next(run)
    if optimizer.schedule not in ("wsd", "constant"):
        return f"the run's optimizer.schedule is {optimizer.schedule}, which decays by itself; a decay needs wsd or constant"
    if run.decay is not None:
        return f"the learning rate decays since step {run.decay.after_step}, and the run ends at step {run.decay.last_step}"
    if after < optimizer.warmup_steps:
        return f"step {after} is in the warm-up of {optimizer.warmup_steps} steps; wait for its end"
    if optimizer.schedule == "wsd" and after > rules.decay_begins(optimizer, steps):
        return f"the learning rate decays since step {rules.decay_begins(optimizer, steps)}, as the run's settings say"
    if after + event.steps > steps:
        return f"a decay of {event.steps} steps after step {after} ends after the run's last step {steps}; take fewer steps"
    if missed := is_missed(run):
        return f"the decay cannot begin yet: {missed}"
    return ""


def may_go(run: Run) -> str:
    """Why a run may not be archived or deleted now; empty if it may."""
    if run.archived or run.finished_told:
        return ""
    if run.phase is Phase.FINISHED:
        return f"the run is finished, and its peers may still need it: {run.reason}; try again in a minute"
    return "the run is not finished: `run finish` ends it"


def words(run: Run) -> str:
    """Why a paused run opens no step, for people."""
    if run.pause and run.pause.startswith(FORGED):
        return run.pause
    return "the operator paused the run" + (f": {run.pause}" if run.pause else "")
