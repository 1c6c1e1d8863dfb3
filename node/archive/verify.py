"""`swarmentum verify`: replay an archive, compare its end with the exported model, and give one result.

The result names the first step that does not hold, and the signer of the wrong statement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from node.archive.confirmed import WEIGHTS, BadStepError, compare
from node.archive.files import find
from node.archive.replay import Replay, Replayed
from node.data.tokenizer import ByteTokenizer
from node.model.spec import SMALL_LLAMA, ModelError, ModelSpec, build, names_vocabulary, with_vocabulary
from node.training.replica import Replica
from protos.changes import values_of, words
from protos.errors import OperatorError, Refusal
from protos.identity import peer_id
from protos.orders import order_values
from protos.run_config import RunConfig
from protos.start import RUN_DIGITS_SHOWN
from protos.text import as_line, things

# Whether an archive begins with the state that the run's genesis implies: the model of its seed. ADR 26.
#
# This needs torch and transformers, and no code of the run. Refuses models of the run's own code, and settings that depend on a
# tokenizer that is not here: nothing is downloaded, and nothing is called.

BYTES = "bytes"


def confirmed_by_seed(replay: Replay) -> bool:
    """Whether the replay began with step 0, and with the bits and the layout that every peer builds from the seed."""
    genesis = replay.genesis
    spec = _spec_of(genesis.config)
    if spec is None or replay.segments[0].step != 0 or genesis.start is not None:
        return False
    try:
        model = build(spec, genesis.config.seed)
    except ModelError:
        return False
    optimizer = genesis.config.optimizer
    made = Replica(genesis.run_id, model, optimizer, optimizer.vote_size)
    return made.layout_digest == genesis.layout.digest() and made.whole_digest() == replay.began


def _spec_of(config: RunConfig) -> ModelSpec | None:
    """The model of a run, if its settings alone say what it is."""
    if config.model.factory is not None:
        return None
    named = SMALL_LLAMA if config.model.config is None else config.model.config
    if names_vocabulary(named):
        return ModelSpec(named)
    return ModelSpec(with_vocabulary(named, ByteTokenizer().vocabulary)) if config.data.tokenizer == BYTES else None


CHANGES_SHOWN_MAX = 64
ORDERS_SHOWN_MAX = 64


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
    votes_in_sums: int = 0
    """Of `votes`: those that the archive has only in sums. Who made a sum is trusted to have added the named payloads up."""
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
    orders: list[dict[str, Any]] = field(default_factory=list)
    """What the run's operators ordered, with all who signed, and the step; the first ORDERS_SHOWN_MAX orders."""
    from_start: bool = False
    """Whether the replay began with the state that the genesis of a fork names."""
    confirmed_step: int | None = None
    """The last step after which an entry, or the genesis, confirms the whole state. None: nothing confirms the archive."""
    derived_steps: int = 0
    """How many steps come after that one: the log's votes lead to their states, and no entry names a digest of them."""

    def json(self) -> str:
        return as_line(asdict(self))


def verify(
    run: Path,
    from_step: int | None,
    model: Path | None,
    told: Callable[[Replayed, int], None] = lambda step, of: None,
    *,
    expected: str = "",
) -> Verification:
    """Replay the archive in or at `run`. `told` gets each step that holds, and the number of steps.

    `expected`: the start of the run's id in hex, if the person knows which run this has to be.

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
        if not result.run.startswith(expected):
            result.reason = f"{folder} is an archive of run {result.run}, and --run names {expected}"
            return result
        if (start := replay.genesis.start) is not None:
            result.fork_of, result.fork_step = start.run_id.hex(), start.step
        _replay(replay, result, told)
        result.reason = _unconfirmed(replay, result)
        if not result.reason and (exported / WEIGHTS).is_file():
            result.weights = compare(replay, exported)
    except BadStepError as bad:
        result.first_bad_step, result.reason = bad.step, bad.reason
        result.signed_by = None if bad.signer is None else peer_id(bad.signer)
        return result
    except (Refusal, OSError, UnicodeDecodeError, RecursionError) as error:
        result.first_bad_step, result.reason = (result.last_step or 0) + 1, f"the archive: {error}"
        return result
    result.ok = not result.reason
    result.reason = result.reason or f"{result.steps} steps hold"
    return result


def _unconfirmed(replay: Replay, result: Verification) -> str:
    """Why nothing confirms the states of an archive whose steps hold; empty if they are confirmed."""
    began, confirmed = replay.segments[0].step, replay.confirmed
    if confirmed.state is None and confirmed_by_seed(replay):
        confirmed.by_genesis(began)
        confirmed.layout = True
    result.confirmed_step = confirmed.state
    result.derived_steps = 0 if confirmed.state is None else replay.step - confirmed.state
    return confirmed.lacks(began, replay.step)


def show(work: Callable[[Callable[[Replayed, int], None]], Verification], *, as_json: bool) -> Verification:
    """Run `work` and print a line for each step and the result; with `as_json`, only the result is on stdout."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("verifying", total=None)

        def told(step: Replayed, of: int) -> None:
            progress.update(task, total=of, advance=1)
            if not as_json:
                progress.console.print(line(step), markup=False)

        result = work(told)
    print(result.json() if as_json else text(result), flush=True)
    return result


def line(step: Replayed) -> str:
    """A step that holds, for people."""
    own = f"{'all' if step.proven == step.votes else step.proven} signed by their author"
    if step.summed:
        own = "their sum, as the coordinator signed it"
    digest = "in the log" if step.digest_checked else "not in the log"
    for_cause = step.excluded - step.excluded_by_operator
    excluded = f"  {things(for_cause, 'peer')} excluded, evidence ok" if for_cause else ""
    if step.excluded_by_operator:
        excluded += f"  {things(step.excluded_by_operator, 'peer')} excluded on the operator's word"
    if step.readmitted:
        excluded += f"  {things(step.readmitted, 'peer')} readmitted by the operator"
    if step.changed:
        excluded += f"  changed by the operator: {words(step.changed)}"
    return (
        f"step {step.step:>6}  chain ok, coordinator's signature ok  {step.votes} payloads ok ({own})  "
        f"entry {step.entry_hash.hex()[:16]}  state before: {digest}  state {step.digest.hex()[:16]}{excluded}"
    )


def text(result: Verification) -> str:
    """The result, for people."""
    if result.ok:
        return (
            f"OK: steps {result.first_step} to {result.last_step} of run {result.run} hold: {result.votes} payloads "
            f"({result.votes_signed_by_author} signed by their author), {result.digests_checked} digests as the log says.\n"
            f"{_sums(result)}{_derived(result)}{_fork(result)}{_ended(result)}{_changes(result)}{_exclusions(result)}"
            f"{_orders(result)}"
            f"State digest {result.state_digest[:16]}; weights: {result.weights}."
        )
    if result.first_bad_step is None:
        return f"FAILED: {result.reason}."
    signer = f" Signed by {result.signed_by}." if result.signed_by else ""
    return f"FAILED at step {result.first_bad_step}: {result.reason}.{signer} {result.steps} steps before it hold."


def _sums(result: Verification) -> str:
    if not result.votes_in_sums:
        return ""
    return (
        f"{result.votes_in_sums} payloads are here only in sums: the log signs the hash of each sum and of each payload, and "
        "this archive cannot show that they belong together.\n"
    )


def _derived(result: Verification) -> str:
    if not result.derived_steps:
        return ""
    count = result.derived_steps
    last = "The last step is" if count == 1 else f"The last {count} steps are"
    return (
        f"{last} only derived: the log's votes lead there from the state after step {result.confirmed_step}, which is "
        "confirmed, and no entry of this archive names a later digest.\n"
    )


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


def _orders(result: Verification) -> str:
    if not result.orders:
        return ""
    rows = [f"  step {it['step']}: {it['says']}; signed by {', '.join(it['signed_by'])}" for it in result.orders]
    return "\n".join(["Orders of the run's operators, with enough signatures:", *rows, ""])


def _exclusions(result: Verification) -> str:
    if not result.exclusions + result.readmissions:
        return ""
    return (
        f"{things(result.exclusions, 'peer')} excluded, {result.exclusions_proven} of them proven by two payloads that they "
        f"signed for one step, {result.exclusions_by_operator} on the operator's word alone; "
        f"{result.readmissions} readmitted.\n"
    )


def _replay(replay: Replay, result: Verification, told: Callable[[Replayed, int], None]) -> None:
    total, end = replay.entries, replay.genesis.end
    if end is not None:
        result.ended_step, result.ended_reason = end.step, end.reason
        result.orders += [order_values(end.step, end.order)] if end.order is not None else []
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
        result.votes_in_sums += step.summed
        result.digests_checked += step.digest_checked
        result.exclusions += step.excluded
        result.exclusions_proven += step.excluded_proven
        result.exclusions_by_operator += step.excluded_by_operator
        result.readmissions += step.readmitted
        if step.changed and len(result.changes) < CHANGES_SHOWN_MAX:
            result.changes.append({"step": step.step, **values_of(step.changed)})
        result.orders += [order_values(step.step, it) for it in step.orders][: ORDERS_SHOWN_MAX - len(result.orders)]
        told(step, total)
    if not result.steps:
        raise OperatorError("the archive holds no step to verify; name the archive of a run that has made steps")
    result.state_digest = replay.digest.hex()
