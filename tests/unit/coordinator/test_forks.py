"""`run fork`: which state it takes, which settings it keeps, and what the run is to the machine."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.clock import machine
from coordinator.clock.effects import SnapshotFact, Withdrawn
from coordinator.clock.events import Reported
from coordinator.clock.state import Phase
from coordinator.commands.forks import Parent, _without_its_authorities, changes_of, forked
from coordinator.commands.operator import Operator
from coordinator.serving.following import states
from coordinator.store.journal import Journal
from protos.assignment import Range
from protos.errors import OperatorError, RefusedError
from protos.identity import peer_id
from protos.log import run_id_of
from protos.optimizer_config import BaseOptimizerConfig, OptimizerConfig
from protos.run_config import RunConfig, TrustConfig
from protos.start import StartingState, start_from_body, start_of
from tests.unit.coordinator.driver import LAYOUT, RUN_ID, Harness, Swarm, config, digest_of, key, sha, snapshot_at
from tests.unit.coordinator.serving import COORDINATOR, genesis_of, operated, served
from tests.unit.protos.test_start import START

SETTINGS = config(min_peers=2, steps=35, snapshot_every=10)


class Played(Swarm):
    """A run with an id of its own."""

    def __init__(self, run_id: bytes) -> None:
        self._id = run_id
        super().__init__(SETTINGS, 2)

    def __post_init__(self) -> None:
        self.run_id, self.layout = self._id, LAYOUT
        super().__post_init__()


def played(home: Path, *more: Withdrawn) -> tuple[bytes, Played]:
    """A finished run in the journal of a home, as `served` will find it."""
    genesis = genesis_of(SETTINGS)
    run_id = run_id_of(genesis)
    swarm = Played(run_id)
    swarm.finish()
    journal = Journal(Journal.sqlite_url(home), COORDINATOR)
    journal.create_run(run_id, genesis)
    journal.append(run_id, *swarm.journal, *more)
    journal.close()
    return run_id, swarm


def test_the_journal_has_every_state_that_can_be_forked_but_those_withdrawn(tmp_path: Path) -> None:
    run_id, swarm = played(tmp_path, Withdrawn(30, 35))
    journal = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    found = states(journal, run_id, COORDINATOR.public_key, {})
    journal.close()
    assert [state.step for state in found] == [10, 20]
    for state in found:
        assert (state.root, state.total_bytes) == (snapshot_at(state.step).root, 1000)
        assert state.state_digest == digest_of(state.step)
        assert state.next_sample == swarm.entries[state.step - 1].next_sample
        assert state.entry_hash == swarm.entries[state.step].parent_hash


async def test_a_fork_by_the_operator_names_the_state_and_keeps_the_settings(tmp_path: Path) -> None:
    run_id, swarm = played(tmp_path)
    async with served(tmp_path, SETTINGS) as here:
        with operated(here, "run") as run:
            [made] = await run("fork", run_id.hex()[:12], "--from-step", "29", "optimizer.lr=0.001", "name=again")
            [newest] = await run("fork", here.invite.link(), "--from-step", "34")
            with pytest.raises((OperatorError, AssertionError), match="has a run 'swarm-from-30' already"):
                await run("fork", here.invite.link(), "--from-step", "34")
            listed = {row["run"]: row for row in await run("list")}
        genesis = here.hub._genesis[bytes.fromhex(made["run"])]
        fork = here.hub.runs[bytes.fromhex(made["run"])].run
    async with served(tmp_path, SETTINGS) as again:
        assert again.hub.runs[fork.run_id].run == fork, "the genesis in the journal says it all"
    assert (
        listed[made["run"]]["fork"]
        == made["fork"]
        == {"run": run_id.hex(), "step": 20, "root": snapshot_at(20).root.hex()}
    )
    assert listed[run_id.hex()]["fork"] is None
    start = start_of(genesis)
    assert (start.run_id, start.coordinator, start.step) == (run_id, COORDINATOR.public_key, 20)
    assert start.state_digest == digest_of(20)
    assert genesis.layout_digest == LAYOUT
    expected = SETTINGS.model_copy(update={"name": "again", "optimizer": OptimizerConfig(lr=0.001)})
    assert fork.config == expected
    assert fork.snapshots == (SnapshotFact(0, snapshot_at(20).root, 1000),)
    assert fork.next_sample == swarm.entries[19].next_sample
    assert (newest["fork"]["step"], newest["name"]) == (30, "swarm-from-30"), "by the link alone, from what is public"


async def test_a_fork_that_does_not_fit_is_refused_with_what_there_is(tmp_path: Path) -> None:
    run_id, _ = played(tmp_path)
    async with served(tmp_path, SETTINGS) as here:
        with operated(here, "run") as run:
            for arguments, says in (
                (
                    ("--from-step", "9"),
                    "no agreed snapshot at or before this step; the nearest of 4, which no connected peer has: 10, 20, 30",
                ),
                (("data.context=64",), "data: a fork keeps this setting of its parent run"),
                (("optimizer.lrr=1",), "optimizer.lrr: is not a known setting"),
                (("optimizer.lr=9",), "optimizer.lr: Input should be less than or equal to 2"),
                (("nothing.toml",), "neither a file that can be read"),
            ):
                with pytest.raises((OperatorError, AssertionError), match=says):
                    await run("fork", run_id.hex(), *arguments)
        operator = Operator(tmp_path)
        facts = await asyncio.to_thread(operator.find, run_id.hex())
        state = start_from_body((await asyncio.to_thread(operator.states, facts.genesis)).states[0])
        for start, layout, says in (
            (state, sha("another layout"), "the layout of a fork is that of its parent run"),
            (replace(state, root=sha("another root")), LAYOUT, "is not agreed, or is withdrawn"),
            (replace(state, state_digest=sha("another state")), LAYOUT, "is not agreed, or is withdrawn"),
        ):
            with pytest.raises(RefusedError, match=says):
                await asyncio.to_thread(operator.create_run, SETTINGS, layout, 10, start)


def test_changes_are_a_file_or_settings_which_count_and_none_is_given_twice(tmp_path: Path) -> None:
    file = tmp_path / "changes.toml"
    file.write_text('[optimizer]\nlr = 0.001\nschedule = "constant"\n[clock]\nsteps = 70\n')
    wanted = changes_of([str(file), "optimizer.lr=5e-4", "name=second try", "clock.strict=true"])
    made = forked(SETTINGS, wanted)
    assert (made.optimizer.lr, made.optimizer.schedule, made.name) == (5e-4, "constant", "second try")
    assert (made.clock.steps, made.clock.strict, made.clock.snapshot_every) == (70, True, 10)
    assert forked(SETTINGS, {}) == SETTINGS
    for first in ("optimizer.lr=5e-4", "optimizer={lr=5e-4}"):
        with pytest.raises(OperatorError, match=r"=1e-3: optimizer\.lr is given twice"):
            changes_of([str(file), first, "optimizer.top_k=9", "optimizer.lr=1e-3"])


@pytest.mark.parametrize(("base", "change", "says"), [
    ("sign", "optimizer.base.name=adamw", "optimizer.base.name: a fork keeps this setting of its parent run (sign)"),
    ("sign", "optimizer.method=paper", "optimizer"),
    ("muon", "optimizer.base.momentum=0.0", "not from or to 0"),
    ("sign", "model.factory=a:b", "model"),
    ("sign", "seed=-1", "seed"),
])  # fmt: skip
def test_settings_that_the_state_does_not_fit_are_refused(base: str, change: str, says: str) -> None:
    held = BaseOptimizerConfig.model_validate({"name": base, "momentum": 0.9 if base == "muon" else 0.0})
    parent = RunConfig(optimizer=OptimizerConfig(base=held))
    with pytest.raises(OperatorError) as refused:
        forked(parent, changes_of([change]))
    assert says in str(refused.value)


@pytest.mark.parametrize(("block", "change"), [(0, 64), (64, 0)])
def test_a_fork_keeps_whether_muon_goes_by_chunks(block: int, change: int) -> None:
    """Whole matrices count their steps in the snapshot's state, and chunks have no state."""
    held = BaseOptimizerConfig.model_validate({"name": "muon", "block": block})
    parent = RunConfig(optimizer=OptimizerConfig(base=held))
    with pytest.raises(OperatorError, match=r"optimizer\.base\.block: .* not from or to 0"):
        forked(parent, changes_of([f"optimizer.base.block={change}"]))
    assert forked(parent, changes_of(["optimizer.base.iterations=3"])).optimizer.base.iterations == 3


def test_a_run_without_snapshots_says_that_there_is_nothing_to_fork() -> None:
    with pytest.raises(OperatorError, match="it has none at all yet"):
        Parent(RUN_ID, SETTINGS, LAYOUT, 10, (), frozenset()).state_at(5)
    states = tuple(StartingState(RUN_ID, LAYOUT, step, LAYOUT, LAYOUT, 9, b"", 0) for step in range(10, 2_570, 10))
    with pytest.raises(OperatorError, match=r"this step; the nearest that connected peers have: 2540, 2560$"):
        Parent(RUN_ID, SETTINGS, LAYOUT, 10, states, frozenset({2_540, 2_560})).state_at(5)


def test_anchors_of_another_operator_have_no_authority_over_a_fork() -> None:
    named = RunConfig(trust=TrustConfig(anchors=[peer_id(key(7))]))
    assert _without_its_authorities(named).trust == TrustConfig(anchored=True)
    assert _without_its_authorities(SETTINGS) == SETTINGS


# ---- what a fork is to the machine -----------------------------------------------------------------------------------------


def begun(settings: RunConfig) -> Harness:
    harness = Harness(settings, layout=LAYOUT)
    harness.run = machine.new_run(RUN_ID, settings, LAYOUT, 10, START)
    harness.accepted = (Range(0, START.next_sample),)  # the parent run handed these out
    return harness


def comes(harness: Harness, number: int) -> None:
    harness.comes(number, at=0)


def test_a_fork_needs_no_agreement_on_its_initial_state_and_knows_who_has_it() -> None:
    harness = begun(config(min_peers=2))
    comes(harness, 0)
    assert "1 of 2 peers" in harness.run.reason
    fact = SnapshotFact(0, START.root, START.total_bytes)
    harness.feed(Reported(key(0), snapshots=(fact,)))
    assert harness.run.reported_snapshots[0] == {key(0): fact}, "a newcomer is sent there"
    comes(harness, 1)
    assert harness.run.phase is Phase.OPEN
    assert harness.ticks[0].pool[0].start == START.next_sample, "the samples go on where the parent run was"


def test_a_peer_with_another_initial_state_is_told_so() -> None:
    harness = begun(config(min_peers=2))
    comes(harness, 0)
    harness.feed(Reported(key(0), snapshots=(SnapshotFact(0, sha("another"), START.total_bytes),)))
    assert any("another snapshot is agreed" in str(effect) for _, effect in harness.announced)


def test_a_fork_with_anchors_begins_without_their_word_because_the_genesis_names_the_state() -> None:
    settings = config(min_peers=1).model_copy(update={"trust": TrustConfig(anchored=True)})
    harness = begun(settings)
    comes(harness, 0)
    assert harness.run.phase is Phase.OPEN


def test_a_run_whose_peers_all_have_nan_says_how_to_go_back() -> None:
    swarm = Swarm(config(min_peers=2, steps=40, snapshot_every=10), 2)
    swarm.play(
        lambda: swarm.run.head_step >= 13 and swarm.run.step is not None and swarm.run.snapshot == snapshot_at(10)
    )
    step = swarm.run.step.tick.step
    for n in range(2):
        swarm.feed(Reported(key(n), abstained=(step, "the gradient is not finite")))
    command = f"swarmentum-coordinator run fork {RUN_ID.hex()[:16]} --from-step 10 optimizer.lr=0.002 "
    assert "the run has diverged" in swarm.run.reason
    assert command in swarm.run.reason
    assert len(swarm.run.reason) < 512, "status shows all of it"
    changed = changes_of([command.rsplit(maxsplit=1)[-1]])
    assert forked(SETTINGS, changed).optimizer.lr == SETTINGS.optimizer.lr / 2
