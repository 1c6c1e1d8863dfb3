"""The clock as a pure function: `step(run, event, now_ms) -> (run, effects)`; and `restore`, its memory after a crash.

Each event goes to the module that decides about it: `joins`, `reports` (and from there `agreement`), or `life`.
After it, `steps` opens or closes (`entry_decision`) a step, or finishes the run. Records are remembered in `memory`.

Refuses to do anything itself: effects are values, to be carried out in order by the runtime. An `Append` makes an event
durable before any effect that peers can see. So a crash between any two effects loses nothing. ADR 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from coordinator.clock import joins, life, memory, reports, steps
from coordinator.clock.effects import Arm, Effect, Record, SnapshotFact
from coordinator.clock.events import (
    ArchiveAsked,
    ChangeAsked,
    Connected,
    DecayAsked,
    Disconnected,
    EntriesReturned,
    Event,
    ExclusionAsked,
    FinishAsked,
    JoinAsked,
    OrderAsked,
    PauseAsked,
    ReadmissionAsked,
    Reported,
    ResumeAsked,
    RevocationAsked,
    TicketAsked,
    TimerFired,
    WithdrawalAsked,
)
from coordinator.clock.state import Outcome, Phase, Run
from coordinator.clock.value_copy import replace
from protos.run_config import RunConfig
from protos.start import StartingState

_GROUNDS = attrgetter(
    "tick", "here", "gone", "counted", "counted_by", "abstained", "by_anchor", "named_by_anchor", "summing"
)


def new_run(
    run_id: bytes,
    config: RunConfig,
    layout_digest: bytes = b"",
    parameters: int = 0,
    start: StartingState | None = None,
) -> Run:
    """A run without peers. The hash that the first entry follows is the run id. The layout comes from the genesis.

    The genesis of a fork names its starting state, too: that is its agreed snapshot of step 0, and nobody decides about it.
    """
    run = Run(
        run_id=run_id,
        config=config,
        defined=config,
        head_hash=run_id,
        layout_digest=layout_digest,
        parameters=parameters,
    )
    if start is None:
        return run
    return replace(run, snapshots=(SnapshotFact(0, start.root, start.total_bytes),), next_sample=start.next_sample)


def restore(run: Run, records: Iterable[Record], now_ms: int) -> Run:
    """Fold the journal over a new run. An open step stays open, with a whole deadline from now."""
    for record in records:
        run = memory.remember(run, record, now_ms)
    return run


@dataclass(frozen=True)
class StepResult:
    """What `step` said of an event: the run before it and after it, and the effects. `now_ms`: of that moment."""

    before: Run
    now_ms: int
    run: Run
    effects: list[Effect]


def judge(run: Run, event: Event, now_ms: int) -> StepResult:
    """`step`, for a caller that carries the effects out later."""
    return StepResult(run, now_ms, *step(run, event, now_ms))


def step(run: Run, event: Event, now_ms: int) -> Outcome:
    """One event. Every event in every phase moves to a known state or refuses with a reason."""
    before = run
    match event:
        case JoinAsked():
            run, effects = joins.joined(run, event, now_ms)
        case Connected():
            run, effects = joins.connected(run, event.public_key, now_ms)
        case Disconnected():
            run, effects = joins.disconnected(run, event)
        case Reported():
            run, effects = reports.reported(run, event, now_ms)
        case EntriesReturned():
            run, effects = life.returned(run, event, now_ms)
        case TimerFired():
            effects = _early(run, now_ms)
        case TicketAsked() | RevocationAsked() | ExclusionAsked() | ReadmissionAsked() | WithdrawalAsked():
            run, effects = joins.asked(run, event)
        case PauseAsked() | ResumeAsked() | FinishAsked() | ArchiveAsked() | DecayAsked() | ChangeAsked():
            run, effects = life.asked(run, event, now_ms)
        case OrderAsked():
            run, effects = life.ordered(run, event, now_ms)
    if isinstance(event, Reported) and _says_nothing_of_the_step(before, run, event, now_ms):
        return run, effects
    run, more = steps.progress(run, now_ms)
    return run, effects + more


def _says_nothing_of_the_step(before: Run, run: Run, event: Reported, now_ms: int) -> bool:
    """Most reports in a large swarm change nothing that decides the open step: it then stands as it stood."""
    if (
        run.step is None
        or run.pause != before.pause
        or now_ms >= run.step.deadline_at_ms
        or not _stands(before, run, event)
    ):
        return False
    was, now = before.peers.get(event.public_key), run.peers.get(event.public_key)
    return was is not None and now is not None and was.phase is now.phase and run.snapshot is before.snapshot


def _stands(before: Run, run: Run, event: Reported) -> bool:
    """Whether all that decides the open step is as it was: an author may have claimed, or a few more may hold. Not if a
    member of a strict step left after its deadline: the next report opens it for the others."""
    was, now = before.step, run.step
    if was is None or now is None or was.counted_by is None or run.left or event.abstained is not None:
        return was is now
    return was is now or (run.standings is before.standings and _GROUNDS(was) == _GROUNDS(now))


def _early(run: Run, now_ms: int) -> list[Effect]:
    """A timer that fires before its time (clocks are rounded) is set again."""
    if run.step is not None and run.step.summing is None and now_ms < run.step.deadline_at_ms:
        return [Arm(run.step.deadline_at_ms)]
    if run.phase is Phase.FINISHED and not run.finished_told and now_ms < run.finish_by_ms:
        return [Arm(run.finish_by_ms)]
    return []
