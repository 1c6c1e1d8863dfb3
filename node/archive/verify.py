"""`swarmentum verify`: replay an archive, compare its end with the exported model, and give one result.

The result names the first step that does not hold, and the signer of the wrong statement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from node.archive.files import find
from node.archive.replay import BadStepError, Replay, Replayed
from node.commands.card import MARK
from node.training.replica import BASE_PREFIX
from protos.changes import values_of, words
from protos.errors import OperatorError, Refusal
from protos.identity import peer_id
from protos.start import RUN_DIGITS_SHOWN

WEIGHTS = "model.safetensors"


CHANGES_SHOWN_MAX = 64


@dataclass
class Verification:
    """The result. `steps`: how many steps were replayed and hold; `first_step`, `last_step`: the first and last of them."""

    run: str = ""
    ok: bool = False
    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    first_bad_step: int | None = None
    reason: str = ""
    signed_by: str | None = None
    votes: int = 0
    votes_signed_by_author: int = 0
    digests_checked: int = 0
    exclusions: int = 0
    exclusions_proven: int = 0
    exclusions_by_operator: int = 0
    readmissions: int = 0
    state_digest: str = ""
    weights: str = "no exported model given"
    fork_of: str | None = None
    """The parent run of a fork, and at which of its steps the fork begins."""
    fork_step: int | None = None
    ended_step: int | None = None
    """Where the operator ended the run, as the coordinator signed it. None: the archive has no such end."""
    ended_reason: str = ""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Settings that the operator changed, each with the first step that it counts for; the first CHANGES_SHOWN_MAX changes."""
    from_start: bool = False
    """Whether the replay began with the state that the genesis of a fork names."""

    def json(self) -> str:
        return json.dumps(asdict(self))


def verify(
    run: Path, from_step: int | None, model: Path | None, told: Callable[[Replayed, int], None] = lambda step, of: None
) -> Verification:
    """Replay the archive in or at `run`. `told` gets each step that holds, and the number of steps.

    The exported model is that of `model`, or the folder `model` beside the archive if there is one. Raises OperatorError
    if there is nothing to verify.
    """
    folder = find(run)
    exported = model if model is not None else folder.parent / "model"
    if model is not None and not (exported / WEIGHTS).is_file():
        raise OperatorError(f"--model {model}: the folder has no {WEIGHTS}; name the folder of an exported model")
    result = Verification()
    try:
        replay = Replay.of(folder, from_step)
        result.run = replay.genesis.run_id.hex()
        if (start := replay.genesis.start) is not None:
            result.fork_of, result.fork_step = start.run_id.hex(), start.step
        _replay(replay, result, told)
        if (exported / WEIGHTS).is_file():
            result.weights = _compare(replay, exported)
    except BadStepError as bad:
        result.first_bad_step, result.reason = bad.step, bad.reason
        result.signed_by = None if bad.signer is None else peer_id(bad.signer)
        return result
    except Refusal as refusal:
        result.first_bad_step, result.reason = (result.last_step or 0) + 1, f"the archive: {refusal}"
        return result
    result.ok = True
    result.reason = f"{result.steps} steps hold"
    return result


def show(work: Callable[[Callable[[Replayed, int], None]], Verification], *, as_json: bool) -> Verification:
    """Run `work` and print a line for each step and the result; with `as_json`, only the result is on stdout."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("verifying", total=None)

        def told(step: Replayed, of: int) -> None:
            progress.update(task, total=of, advance=1)
            if not as_json:
                progress.console.print(line(step))

        result = work(told)
    print(result.json() if as_json else text(result), flush=True)
    return result


def line(step: Replayed) -> str:
    """A step that holds, for people."""
    own = "all" if step.proven == step.votes else str(step.proven)
    digest = "in the log" if step.digest_checked else "not in the log"
    for_cause = step.excluded - step.excluded_by_operator
    excluded = f"  {for_cause} peers excluded, evidence ok" if for_cause else ""
    if step.excluded_by_operator:
        excluded += f"  {step.excluded_by_operator} peers excluded on the operator's word"
    if step.readmitted:
        excluded += f"  {step.readmitted} peers readmitted by the operator"
    if step.changed:
        excluded += f"  changed by the operator: {words(step.changed)}"
    return (
        f"step {step.step:>6}  chain ok, coordinator's signature ok  {step.votes} payloads ok ({own} signed by their author)  "
        f"entry {step.entry_hash.hex()[:16]}  state before: {digest}  state {step.digest.hex()[:16]}{excluded}"
    )


def text(result: Verification) -> str:
    """The result, for people."""
    if result.ok:
        return (
            f"OK: steps {result.first_step} to {result.last_step} of run {result.run[:16]} hold: {result.votes} payloads "
            f"({result.votes_signed_by_author} signed by their author), {result.digests_checked} digests as the log says.\n"
            f"{_fork(result)}{_ended(result)}{_changes(result)}{_exclusions(result)}"
            f"State digest {result.state_digest[:16]}; weights: {result.weights}."
        )
    signer = f" Signed by {result.signed_by}." if result.signed_by else ""
    return f"FAILED at step {result.first_bad_step}: {result.reason}.{signer} {result.steps} steps before it hold."


def _fork(result: Verification) -> str:
    if result.fork_of is None:
        return ""
    where = f"step {result.fork_step} of run {result.fork_of[:RUN_DIGITS_SHOWN]}"
    if result.from_start:
        return f"The run is a fork: it starts from the state after {where}, which this archive has.\n"
    return f"The run is a fork of {where}. This archive lacks that state: it begins before step {result.first_step}.\n"


def _ended(result: Verification) -> str:
    if result.ended_step is None:
        return ""
    why = f": {result.ended_reason}" if result.ended_reason else ""
    lacks = "" if result.last_step == result.ended_step else f" This archive ends before, at step {result.last_step}."
    return f"The operator ended the run at step {result.ended_step}, as the coordinator signed{why}.{lacks}\n"


def _changes(result: Verification) -> str:
    if not result.changes:
        return ""
    rows = []
    for it in result.changes:
        values = ", ".join(f"{key} = {value}" for key, value in it.items() if key != "step")
        rows.append(f"from step {it['step']} on: {values}")
    return f"The operator changed the run, as the coordinator signed; {'; '.join(rows)}.\n"


def _exclusions(result: Verification) -> str:
    if not result.exclusions + result.readmissions:
        return ""
    return (
        f"{result.exclusions} peers excluded, {result.exclusions_proven} of them proven by two payloads that they signed "
        f"for one step, {result.exclusions_by_operator} on the operator's word alone; {result.readmissions} readmitted.\n"
    )


def _replay(replay: Replay, result: Verification, told: Callable[[Replayed, int], None]) -> None:
    total, end = replay.entries, replay.genesis.end
    if end is not None:
        result.ended_step, result.ended_reason = end.step, end.reason
    for step in replay.steps():
        if end is not None and (step.step > end.step or (step.step == end.step and step.entry_hash != end.entry_hash)):
            why = f"the coordinator signed that the run ended at step {end.step}, and another log"
            raise BadStepError(step.step, why, replay.genesis.coordinator)
        result.steps += 1
        result.from_start = result.from_start or (replay.genesis.start is not None and step.step == 1)
        result.first_step = result.first_step or step.step
        result.last_step = step.step
        result.votes += step.votes
        result.votes_signed_by_author += step.proven
        result.digests_checked += step.digest_checked
        result.exclusions += step.excluded
        result.exclusions_proven += step.excluded_proven
        result.exclusions_by_operator += step.excluded_by_operator
        result.readmissions += step.readmitted
        if step.changed and len(result.changes) < CHANGES_SHOWN_MAX:
            result.changes.append({"step": step.step, **values_of(step.changed)})
        told(step, total)
    if not result.steps:
        raise OperatorError("the archive holds no step to verify; name the archive of a run that has made steps")
    result.state_digest = replay.digest.hex()


def _compare(replay: Replay, exported: Path) -> str:
    """Check that the exported weights are the replayed ones bit for bit. Raises BadStepError if they are not."""
    step = json.loads((exported / MARK).read_text()).get("steps") if (exported / MARK).is_file() else replay.step
    if step != replay.step:
        raise BadStepError(replay.step, f"{exported} is the model after step {step}; the archive ends at {replay.step}")
    difference = first_difference(replay.state, exported)
    if difference is not None:
        raise BadStepError(replay.step, f"{exported}: {difference}")
    return f"bit-identical to {exported}"


def first_difference(state: Mapping[str, Tensor], exported: Path) -> str | None:
    """How the weights of a folder differ from the parameters of `state`, or None. The folder may hold tied weights once."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights: Mapping[str, Any] = load_file(exported / WEIGHTS)
    except (SafetensorError, OSError) as error:
        return f"{WEIGHTS} cannot be read: {error}"
    parameters = {name: tensor for name, tensor in state.items() if not name.startswith(BASE_PREFIX)}
    for name, tensor in parameters.items():
        if name not in weights:
            return f"lacks {name}"
        if not same_bits(tensor, weights[name]):
            return f"{name} differs from the replayed weights"
    return None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit: -0 is not 0, and a NaN is itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
