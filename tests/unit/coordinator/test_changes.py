"""Settings that the operator changes in a pause: the rule, the journal, the entries, the commands. ADR 44."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.clock.effects import EntryCommitted, SettingsChanged
from coordinator.clock.events import ChangeAsked, DecayAsked, EntriesReturned, PauseAsked, Reported, ResumeAsked
from coordinator.clock.state import CHANGES_MAX, Phase
from coordinator.store import checkpoint
from protos.changes import settings_of, values_of
from protos.errors import OperatorError, RefusedError
from protos.log import lr_from_bits, open_entry
from protos.optimizer_config import OptimizerConfig
from tests.unit.coordinator.driver import Harness, joined, key, snapshot_at
from tests.unit.coordinator.serving import COORDINATOR, operated, peers, served
from tests.unit.coordinator.test_machine import opened_together
from tests.unit.coordinator.test_peers import decide
from tests.unit.coordinator.test_run_life import refused
from tests.unit.coordinator.test_service import WAITS, begin, one_step

RATE = OptimizerConfig(lr=1e-2, schedule="constant", warmup_steps=0)


def asked(**values: object) -> ChangeAsked:
    """`steps=5` is clock.steps, `lr` is optimizer.lr; other names have their section, with two underscores for the dot."""
    names = {
        "steps": "clock.steps",
        "every": "clock.snapshot_every",
        "lr": "optimizer.lr",
        "batch": "clock.batch_samples",
    }
    return ChangeAsked(settings_of({names.get(name, name.replace("__", ".")): value for name, value in values.items()}))


def change(harness: Harness, **values: object) -> None:
    harness.feed(PauseAsked(""))
    harness.feed(asked(**values))
    assert not harness.refusals, harness.refusals
    harness.feed(ResumeAsked())


def come_back(harness: Harness) -> None:
    harness.restart()
    harness.comes(*range(3), at=harness.run.head_step)


def named(harness: Harness) -> list[dict[str, object]]:
    return [values_of(entry.settings) for entry in harness.entries]


def test_a_change_counts_from_the_step_after_the_open_one_and_every_later_entry_names_it() -> None:
    harness = opened_together(optimizer=RATE)
    change(harness, lr=5e-3, batch=20)
    assert harness.run.changes == (SettingsChanged(1, asked(lr=5e-3, batch=20).settings),)
    for _ in range(2):
        decide(harness, 0, 1, 2)
    come_back(harness)
    change(harness, lr=1e-3)
    for _ in range(2):
        decide(harness, 0, 1, 2)
    first = {"optimizer.lr": 5e-3, "clock.batch_samples": 20}
    assert named(harness) == [{}, first, first, {**first, "optimizer.lr": 1e-3}]
    assert [entry.lr for entry in harness.entries] == pytest.approx([1e-2, 5e-3, 5e-3, 1e-3])
    assert [sum(map(len, tick.pool)) for tick in harness.ticks[1:4]] == [20, 20, 20]


def test_a_run_gets_longer_and_shorter() -> None:
    harness = opened_together(steps=3)
    change(harness, steps=5)
    for _ in range(3):
        decide(harness, 0, 1, 2)
    assert harness.run.phase is Phase.OPEN, "three steps were all of it before"
    harness.feed(PauseAsked(""))
    assert "step 4 is open already; `run finish` ends the run" in refused(harness, asked(steps=4))
    harness.feed(ResumeAsked())
    for _ in range(2):
        decide(harness, 0, 1, 2)
    assert (harness.run.phase, harness.run.head_step, harness.run.steps) == (Phase.FINISHED, 5, 5)


def test_snapshots_are_due_by_the_settings_of_their_step() -> None:
    harness = opened_together(steps=20)
    for _ in range(2):
        decide(harness, 0, 1, 2)
    change(harness, every=5)
    assert harness.run.snapshot_is_due(2), "it was due when it was taken, and may be reported late"
    for _ in range(3):
        decide(harness, 0, 1, 2)
    assert [step for step in range(1, 11) if harness.run.snapshot_is_due(step)] == [2, 5, 10]
    harness.feed(Reported(key(0), snapshots=(snapshot_at(4),)))
    assert "snapshot of step 4: none is due there" in harness.refusals[-1]
    for n in range(3):
        harness.feed(Reported(key(n), snapshots=(snapshot_at(5),)))
    assert harness.run.snapshot == snapshot_at(5)


def test_tenure_goes_on_in_longer_periods() -> None:
    """Periods have other numbers after a change: a peer must not wait until the new numbers pass the old ones."""
    harness = opened_together(steps=40)
    for _ in range(8):
        decide(harness, 0, 1, 2)
    before = harness.run.peers[key(0)].tenure
    change(harness, every=4)
    for _ in range(6):
        decide(harness, 0, 1, 2)
    assert harness.run.peers[key(0)].tenure >= before + 1


def test_what_is_refused_and_what_to_do_instead() -> None:
    harness = opened_together(optimizer=RATE, steps=10)
    assert f"`swarmentum-coordinator run pause {harness.run.config.name}` first" in refused(harness, asked(lr=1e-3))
    harness.feed(PauseAsked(""))
    assert "has these values already: optimizer.lr = 0.01" in refused(harness, asked(lr=1e-2))
    assert "clock.min_peers: " in refused(harness, asked(clock__min_peers=0)), "the section's own limits"
    assert "batch_samples 1 is less than one sample a peer" in refused(harness, asked(batch=1))
    assert "admission.mode can become invite" in refused(harness, asked(admission__mode="allow_list"))
    assert "warm-up of 10 steps is not shorter than the run of 10" in refused(
        harness, asked(optimizer__warmup_steps=10)
    )
    assert "no effect with schedule constant: set" in refused(harness, asked(optimizer__decay_steps=3))
    assert "no setting to change" in refused(harness, ChangeAsked(()))
    harness.run = replace(harness.run, changes=(SettingsChanged(0, ()),) * CHANGES_MAX)
    assert f"changed {CHANGES_MAX} times" in refused(harness, asked(lr=1e-3))
    decays = opened_together(optimizer=RATE, steps=10)
    decays.feed(DecayAsked(4))
    decays.feed(PauseAsked(""))
    assert "decays since step 1, and the run ends at step 5" in refused(decays, asked(lr=1e-3))


def test_admission_closes_and_opens_again_as_the_genesis_has_it() -> None:
    harness = opened_together()
    change(harness, admission__mode="invite")
    harness.feed(joined(7))
    assert "only peers with an invite" in harness.refusals[-1]
    harness.refusals.clear()
    change(harness, admission__mode="open")
    harness.feed(joined(7))
    assert not harness.refusals


def test_a_journal_that_lost_its_end_gets_the_changes_back_with_the_entries() -> None:
    """The record is lost, and the signed entries name the settings. A change that no entry has is void."""
    lived = opened_together(steps=9, optimizer=RATE)
    decide(lived, 0, 1, 2)
    kept = list(lived.journal)
    change(lived, steps=12, every=3)
    for _ in range(3):
        decide(lived, 0, 1, 2)
    lost = Harness(lived.settings)
    lost.ticks, lost.entries = [], []
    lost.load(kept)
    lost.feed(joined(0))
    lost.feed(PauseAsked("nobody is here"))
    lost.feed(asked(batch=40))
    entries = tuple(r for r in lived.journal if isinstance(r, EntryCommitted))
    lost.feed(EntriesReturned(key(0), entries, len(entries)))
    assert lost.run.head_step == len(entries)
    assert lost.run.config.clock.steps == 12
    assert lost.run.config.clock.batch_samples == lived.settings.clock.batch_samples, "no entry has it"
    assert [lost.run.settings_at(entry.step) for entry in lived.entries] == [entry.settings for entry in lived.entries]


def test_a_checkpoint_has_the_settings_in_force() -> None:
    harness = opened_together(optimizer=RATE)
    change(harness, lr=5e-3, every=7)
    harness.feed(PauseAsked(""))
    decide(harness, 0, 1, 2)
    run, fresh = harness.run, Harness(harness.settings).run
    assert run.step is None
    again = checkpoint.load(fresh, checkpoint.dump(run))
    assert (again.config, again.defined, again.changes) == (run.config, fresh.config, run.changes)
    assert again.config.clock.snapshot_every == 7


async def test_a_change_from_the_command_to_the_signed_entries(tmp_path: Path) -> None:
    settings = WAITS.model_copy(update={"optimizer": RATE})
    async with served(tmp_path, settings) as here, peers(here, 2) as swarm:
        with operated(here, "run") as run:
            await begin(here, swarm)
            with pytest.raises(RefusedError, match="run pause"):
                await run("change", settings.name, "clock.steps=7")
            with pytest.raises(
                OperatorError, match=r"optimizer.beta cannot change in a run .*run fork RUN optimizer.beta="
            ):
                await run("change", settings.name, "optimizer.beta=0.5")
            await run("pause", settings.name)
            [done] = await run("change", settings.name, "clock.steps=7", "optimizer.lr=0.002")
            assert done["steps"] == 7
            assert done["changed"] == [
                {"key": "clock.steps", "value": 7, "from_step": 2},
                {"key": "optimizer.lr", "value": 0.002, "from_step": 2},
            ]
            [shown] = await run("show", settings.name)
            rows = {row["key"]: row for row in shown["settings"]}
            assert (rows["optimizer.lr"]["value"], rows["optimizer.lr"]["from_step"]) == (0.002, 2)
            assert (rows["clock.min_peers"]["from_step"], shown["steps"]) == (1, 7)
            await run("resume", settings.name)
            bodies = [(await one_step(swarm))[0].entry for _ in range(2)]
            entries = [
                open_entry(it.SerializeToString(), run_id=here.invite.run_id, coordinator=COORDINATOR.public_key).entry
                for it in bodies
            ]
            assert [values_of(entry.settings) for entry in entries] == [{}, {"clock.steps": 7, "optimizer.lr": 0.002}]
            assert [lr_from_bits(entry.lr_bits) for entry in entries] == pytest.approx([1e-2, 2e-3])
            facts, _ = await swarm[0].client.get_run()
            assert facts.total_steps == 7
