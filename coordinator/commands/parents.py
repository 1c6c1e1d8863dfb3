"""The parent run of a fork, as its coordinator describes it: a run of this home, or the public run of an invite.

What another coordinator says of its run is checked as far as its signatures go: the entries. Peers check the state itself, by
the root that the fork's genesis names. ADR 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.commands.invite_calls import call, facts_of
from coordinator.commands.operator import Operator
from protos.admission_config import OperatorsConfig
from protos.changes import in_force
from protos.errors import OperatorError, RefusedError
from protos.invite import Invite
from protos.limits import HASH_BYTES
from protos.log import open_entry, run_id_of
from protos.pasted import is_link
from protos.run_config import RunConfig, config_from_json
from protos.start import StartingState, start_body, start_from_body
from protos.v1 import coordinator_pb2 as pb


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
        """The newest agreed state at or before a step. OperatorError with the steps that there are."""
        found = [state for state in self.states if state.step <= from_step]
        if found:
            return found[-1]
        steps = ", ".join(str(state.step) for state in self.states)
        raise OperatorError(
            f"--from-step {from_step}: run {self.run_id.hex()[:16]} has no agreed snapshot at or before this step; "
            + (f"it has those of steps {steps}" if steps else "it has none at all yet, so `run create` makes a new run")
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
