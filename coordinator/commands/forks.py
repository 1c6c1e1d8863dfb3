"""The command `swarmentum-coordinator run fork`: a new run that begins at a state of another one. ADR 5.

Changes to a parent run's settings, as the operator of a fork writes them: a TOML file, or KEY=VALUE. Pure but for that file.

Refuses changes that the state of the parent run does not fit: another model, other data, or another base optimizer.

The parent run of a fork, as its coordinator describes it: a run of this home, or the public run of an invite.

What another coordinator says of its run is checked as far as its signatures go: the entries. Peers check the state itself, by
the root that the fork's genesis names. ADR 5.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from coordinator.commands.operator import Operator, call, facts_of, operator_at
from coordinator.commands.run_mistakes import mistakes
from coordinator.config import Home, Json
from protos import toml_file
from protos.changes import in_force
from protos.errors import OperatorError, RefusedError
from protos.invite import Invite, is_link
from protos.limits import HASH_BYTES, STEP_MAX
from protos.log import open_entry, run_id_of
from protos.run_config import RunConfig, config_from_json
from protos.run_sections import OperatorsConfig
from protos.start import StartingState, fork_values, start_body, start_from_body
from protos.v1 import coordinator_pb2 as pb

STEPS_NAMED_MAX = 3


@dataclass(frozen=True)
class Parent:
    """A run that can be forked. `states`: oldest first. `held`: the steps whose state a connected peer has."""

    run_id: bytes
    config: RunConfig
    layout_digest: bytes
    parameters: int
    states: tuple[StartingState, ...]
    held: frozenset[int]
    changed: tuple[pb.ChangedSetting, ...] = ()

    def config_at(self, step: int) -> RunConfig:
        """The settings of the run in `step`: its operator may have changed some since. Raises Refusal."""
        return in_force(self.config, self.changed, step)

    def state_at(self, from_step: int) -> StartingState:
        """The newest agreed state at or before a step. OperatorError with the nearest that there are."""
        found = [state for state in self.states if state.step <= from_step]
        if found:
            return found[-1]
        held = [state.step for state in self.states if state.step in self.held]
        near = ", ".join(map(str, (held or [state.step for state in self.states])[:STEPS_NAMED_MAX]))
        whose = "that connected peers have" if held else f"of {len(self.states)}, which no connected peer has"
        raise OperatorError(
            f"--from-step {from_step}: run {self.run_id.hex()[:16]} has no agreed snapshot at or before this step; "
            + (f"the nearest {whose}: {near}" if near else "it has none at all yet, so `run create` makes a new run")
        )


def parent(operator: Operator, run: str) -> Parent:
    """A run of this home by name or id, or the run of an invite link. Raises SwarmentumError."""
    if is_link(run):
        return _of_invite(Invite.parse(run))
    facts = operator.find(run)
    answer = operator.states(facts.genesis)
    return Parent(
        run_id_of(facts.genesis),
        config_from_json(facts.genesis.config_json),
        answer.layout_digest,
        answer.parameters,
        tuple(start_from_body(state) for state in answer.states),
        _held(facts),
        tuple(facts.changed),
    )


def _held(facts: pb.GetRunResponse) -> frozenset[int]:
    return frozenset(ref.step for ref in _snapshots(facts) if ref.holders)


def _snapshots(facts: pb.GetRunResponse) -> list[pb.SnapshotRef]:
    return ([facts.snapshot] if facts.HasField("snapshot") else []) + list(facts.earlier)


def _of_invite(invite: Invite) -> Parent:
    """The run of another coordinator, as far as it tells everybody: its newest agreed snapshots."""
    facts = facts_of(invite)
    genesis = facts.genesis
    if len(genesis.layout_digest) != HASH_BYTES:
        raise OperatorError(
            f"run {invite.run_id.hex()[:16]} cannot be forked with its link: its genesis states no parameter layout. "
            "Its own operator can fork it"
        )
    states = [_state(invite, ref) for ref in reversed(_snapshots(facts)) if ref.step]
    return Parent(
        invite.run_id,
        _without_its_authorities(config_from_json(genesis.config_json)),
        genesis.layout_digest,
        genesis.parameters,
        tuple(states),
        _held(facts),
        tuple(facts.changed),
    )


def _without_its_authorities(config: RunConfig) -> RunConfig:
    """Anchors and operators that another operator named have no authority over a fork: it has anchors of its own."""
    config = config.model_copy(update={"operators": OperatorsConfig()})
    if not config.trust.anchors:
        return config
    return config.model_copy(update={"trust": config.trust.model_copy(update={"anchors": [], "anchored": True})})


def _state(invite: Invite, ref: pb.SnapshotRef) -> StartingState:
    """An agreed snapshot with what the signed log says of its step. Raises RefusedError if the log lacks that step."""
    request = pb.ListEntriesRequest(run_id=invite.run_id, from_step=ref.step)
    answer: pb.ListEntriesResponse = call(invite, "ListEntries", request)
    data: Sequence[bytes] = [entry.SerializeToString(deterministic=True) for entry in answer.entries[:2]]
    entries = [open_entry(each, run_id=invite.run_id, coordinator=invite.coordinator_public_key) for each in data]
    if [signed.entry.step for signed in entries] not in ([ref.step], [ref.step, ref.step + 1]):
        raise RefusedError(f"the log of run {invite.run_id.hex()[:16]} does not show its entry {ref.step}")
    state = StartingState(
        invite.run_id,
        invite.coordinator_public_key,
        ref.step,
        entries[0].hash,
        ref.root,
        ref.total_bytes,
        entries[1].entry.parent_state_digest if len(entries) > 1 else b"",
        entries[0].entry.next_sample,
    )
    return start_from_body(start_body(state))  # the same door as for any other


SETTING = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(.*)", re.DOTALL)
KEPT: Mapping[str, str] = {
    "model": "the snapshot holds the parameters of this model",
    "data": "the fork goes on in the order of the parent run's samples",
    "clock.digest_steps": "the starting state has a digest by this rule",
    "optimizer.method": "the snapshot holds the state of this method",
    "optimizer.chunk": "the method's chunks belong to the layout of the state",
    "optimizer.base.name": "the snapshot holds the state of this base optimizer",
}
"""Settings that a fork has from its parent run, each with the reason."""
BUFFERS: Mapping[str, str] = {"momentum": "sgd, muon", "beta1": "adamw", "block": "muon"}
"""Settings of `optimizer.base` that change the buffers of the replicated state unless 0, and the bases that have them."""


def changes_of(arguments: Iterable[str]) -> dict[str, Any]:
    """The settings that the arguments name, as nested tables; a later argument takes precedence over a file. OperatorError,
    also for a setting that two KEY=VALUE name."""
    found: dict[str, Any] = {}
    given: set[str] = set()
    for argument in arguments:
        match = SETTING.fullmatch(argument)
        change = _file(Path(argument)) if match is None else _nested(match[1], _value(match[2]))
        keys = set() if match is None else set(flat(change))
        if twice := min(given & keys, default=""):
            raise OperatorError(f"{argument}: {twice} is given twice; leave one of the two out")
        given |= keys
        found = merged(found, change)
    return found


def _file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding=toml_file.WRITTEN))
    except OSError as error:
        raise OperatorError(
            f"{path}: is neither a file that can be read ({error.strerror}) nor a setting such as optimizer.lr=0.001"
        ) from error
    except ValueError as error:
        raise OperatorError(f"{path}: is not TOML: {error}") from error


def _value(text: str) -> Any:
    """A TOML value; a word without quotes is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; any other value takes the place of the one before."""
    result = dict(settings)
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def forked(parent: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The settings of a fork. OperatorError for a wrong value, and for one that the parent run's state does not fit."""
    values = merged(parent.model_dump(mode="json"), changes)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise OperatorError(toml_file.describe(error)) from error
    for mistake in mistakes(config):
        if mistake.keys[0] in flat(changes):
            raise OperatorError(f"{mistake.keys[0]}: {mistake}")
    for key, why in KEPT.items():
        was, now = _at(parent, key), _at(config, key)
        if was != now:
            raise OperatorError(f"{key}: a fork keeps this setting of its parent run ({_shown(was)}), because {why}")
    for key, bases in BUFFERS.items():
        was, now = _at(parent, f"optimizer.base.{key}"), _at(config, f"optimizer.base.{key}")
        if bool(was) != bool(now) and parent.optimizer.base.name in bases.split(", "):
            raise OperatorError(
                f"optimizer.base.{key}: a fork may change this setting of its parent run ({was}), but not from or to 0, "
                "because the snapshot holds a buffer for it, or holds none"
            )
    return config


def _at(config: RunConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any) -> str:
    return "its own table" if hasattr(value, "model_dump") else str(value)


NAME_CHARACTERS_MAX = 64
Parents = Annotated[
    str, typer.Argument(metavar="RUN", help="The parent run: its name, the start of its id, or an invite link to it.")
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CHANGE]...",
        help="Settings that differ from the parent run's: optimizer.lr=0.001, or a TOML file of them.",
    ),
]


def fork(
    run: Parents,
    changes: Changes = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=STEP_MAX,
            help="Begin at the newest agreed snapshot at or before this step (default: the newest).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The name of the new run (default: the parent's, and the step).")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Create a run that begins at an agreed snapshot of another run: to go back, or to continue a public run.

    The fork keeps the model, the data and the other settings of its parent run, but for the changes. Its steps and its learning
    rate begin anew; so does the momentum of the peers.
    """
    from coordinator.commands.checking import refuse_second
    from coordinator.commands.created import link_for_anchors, print_created, show_created

    wanted = changes_of([*(changes or []), *([f"name={json.dumps(name, ensure_ascii=False)}"] if name else [])])
    operator = operator_at(home)
    found = parent(operator, run)
    start = found.state_at(STEP_MAX if from_step is None else from_step)
    config = forked(found.config_at(start.step), {"name": _name(found.config.name, start.step)} | wanted)
    refuse_second(operator, config.name, todo="the fork another one with --name")
    invite = operator.create_run(config, found.layout_digest, found.parameters, start)
    genesis = operator.find(invite.run_id.hex()).genesis
    anchor_link = link_for_anchors(operator, genesis, config)
    if as_json:
        print_created(invite, config, anchor_link, layout=True, fork=fork_values(genesis))
        return
    show_created(invite, config, anchor_link, _said(start, from_step, start.step in found.held), home)


def _name(parent: str, step: int) -> str:
    """The default name: the pattern of names allows all of it."""
    end = f"-from-{step}"
    return parent[: NAME_CHARACTERS_MAX - len(end)] + end


def _said(start: StartingState, from_step: int | None, held: bool) -> str:
    lines = [f"It is a fork: it begins at the state after {start}."]
    if from_step not in (None, start.step):
        lines.append(f"That is the newest agreed snapshot at or before step {from_step}.")
    if not held:
        lines.append(
            "The coordinator knows no connected peer that has that state. The fork waits until a peer joins that has it."
        )
    lines.append(
        "Peers that have the state on their disks use it: start them with the --home that they had in the parent run."
    )
    return "\n".join(lines)
