"""Held-out losses of agreed states, as volunteers report them: journalled, in the next entry, and shown. ADR 53.

Only peers whose word on that state counts may report (`electorate.eligible`), once a state. Refuses to let a figure influence
anything: no rule of the clock reads them.
"""

from __future__ import annotations

from coordinator.clock import electorate, memory
from coordinator.clock.effects import Refuse
from coordinator.clock.records import Evaluated
from coordinator.clock.state import Outcome, Run
from protos.evaluation import is_due, reopen_evaluation
from protos.limits import EVALUATIONS_MAX


def reported(run: Run, public_key: bytes, envelope: bytes) -> Outcome:
    """A peer evaluated a state; the door has verified the envelope, and that the peer itself signed it."""
    made = reopen_evaluation(envelope)
    step = made.step
    known = run.evaluations.get(step, {})
    if public_key in known or len(known) >= EVALUATIONS_MAX:
        return run, []
    if not is_due(run.config, step, run.last_step) or not any(fact.step == step for fact in run.snapshots):
        return run, [Refuse(public_key, f"evaluation of step {step}: this state is not to be evaluated, or not agreed")]
    if made.sample and not run.config.evaluation.sample_tokens:
        return run, [Refuse(public_key, f"evaluation of step {step}: this run asks for no text of its model")]
    if public_key not in electorate.eligible(run, step):
        return run, [
            Refuse(public_key, f"evaluation of step {step}: your word on this state does not count in this run")
        ]
    return memory.written(run, Evaluated(step, public_key, envelope))
