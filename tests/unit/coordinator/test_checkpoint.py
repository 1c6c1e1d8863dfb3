"""A checkpoint and the records after it say what all records say; one that does not fit is skipped."""

import dataclasses
import hashlib
import json
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from coordinator.clock import machine
from coordinator.clock.effects import EntryCommitted, Record
from coordinator.clock.state import Run
from coordinator.store import checkpoint
from coordinator.store.checkpoint import Folded, FoldedRuns, newest
from coordinator.store.journal import CHECKPOINTS_KEPT, Checkpoint, Journal
from protos.log import run_id_of
from protos.run_config import RunConfig, TrustConfig
from protos.v1 import log_pb2
from tests.unit.coordinator.driver import RUN_ID, Harness, Swarm, config
from tests.unit.coordinator.serving import COORDINATOR, eventually, peers, served
from tests.unit.coordinator.test_machine import clocks, happenings, play
from tests.unit.coordinator.test_service import WAITS, begin, one_step

FINGERPRINT = "b2c07911023dff55"


def fresh_of(harness: Harness) -> Run:
    return machine.new_run(harness.run_id, harness.settings, harness.layout)


def check_every_cut(harness: Harness) -> int:
    """At each entry: the run is kept, read back, and the rest is folded over it. Returns how many cuts there were."""
    fresh, cuts = fresh_of(harness), 0
    whole = machine.restore(fresh, harness.journal, harness.now)
    for cut, record in enumerate(harness.journal, 1):
        folded = machine.restore(fresh, harness.journal[:cut], harness.now)
        if not isinstance(record, EntryCommitted) or folded.step is not None:
            continue
        again = checkpoint.load(fresh, checkpoint.dump(folded))
        assert again == folded
        for field in dataclasses.fields(Run):  # in the same order, too
            assert repr(getattr(again, field.name)) == repr(getattr(folded, field.name)), field.name
        assert machine.restore(again, harness.journal[cut:], harness.now) == whole
        assert checkpoint.dump(again) == checkpoint.dump(folded)
        cuts += 1
    return cuts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(clock=clocks, events=st.lists(happenings(), max_size=40), trust=st.booleans())
def test_a_checkpoint_and_its_tail_equal_all_records(
    clock: RunConfig, events: list[tuple[str, int, int, int, int]], trust: bool
) -> None:
    checked = TrustConfig(enabled=True, probation_steps=1)
    harness = Harness(clock.model_copy(update={"trust": checked}) if trust else clock)
    play(harness, events)
    check_every_cut(harness)


@pytest.mark.parametrize("trust", [False, True])
def test_a_checkpoint_of_a_run_that_was_played_to_its_end(trust: bool) -> None:
    swarm = Swarm(config(min_peers=3, steps=20, snapshot_every=4), 4, seed=3, loss=0.05)
    if trust:
        checked = TrustConfig(enabled=True, probation_steps=2)
        swarm = Swarm(swarm.settings.model_copy(update={"trust": checked}), 4, seed=3)
    swarm.finish()
    assert check_every_cut(swarm) == 20


# ---- in a journal ----------------------------------------------------------------------------------------------------


def journal_of(home: Path, swarm: Harness, every: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Journal, bytes]:
    """A run's journal, with checkpoints as the runtime makes them."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_EVERY", every)
    genesis = log_pb2.Genesis(
        config_json=swarm.settings.canonical_json(), coordinator_public_key=COORDINATOR.public_key
    )
    journal = Journal(Journal.sqlite_url(home), COORDINATOR)
    journal.create_run(RUN_ID, genesis)
    folded = Folded(genesis, machine.new_run(RUN_ID, swarm.settings))
    for record in swarm.journal:
        journal.append(RUN_ID, record)
        folded.append(record)
        if (due := folded.due()) is not None:
            journal.keep(RUN_ID, due)
            folded.kept_step = folded.at(0).head_step
    return journal, run_id_of(genesis)


@pytest.fixture
def played() -> Swarm:
    swarm = Swarm(config(min_peers=2, steps=12, snapshot_every=4), 3)
    swarm.finish()
    return swarm


class Counting(Journal):
    """Counts the records that are read."""

    read = 0

    def records(self, run_id: bytes, first: int = 0) -> typing.Iterator[Record]:
        for record in super().records(run_id, first):
            self.read += 1
            yield record


def read_back(home: Path) -> tuple[Run, int]:
    journal = Counting(Journal.sqlite_url(home), COORDINATOR)
    replay = FoldedRuns(journal)
    replay.catch_up()
    assert replay.left_out == {}
    run = replay.runs()[0].at(5)
    journal.close()
    return run, journal.read


def test_a_restart_reads_the_records_after_the_newest_checkpoint(
    tmp_path: Path, played: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = journal_of(tmp_path, played, 5, monkeypatch)
    whole = machine.restore(machine.new_run(RUN_ID, played.settings), journal.records(RUN_ID), 5)
    kept, unfit = journal.checkpoints(RUN_ID)
    assert (len(kept), unfit) == (CHECKPOINTS_KEPT, [])
    journal.close()
    run, read = read_back(tmp_path)
    assert run == whole
    assert read == len(played.journal) - kept[0].number < len(played.journal)


@pytest.mark.parametrize(
    ("damage", "skipped"),
    [
        ("UPDATE checkpoints SET body = x'7b7d' WHERE number = (SELECT max(number) FROM checkpoints)", 1),
        ("UPDATE checkpoints SET head_hash = zeroblob(32) WHERE number = (SELECT max(number) FROM checkpoints)", 1),
        ("UPDATE checkpoints SET sha256 = zeroblob(32)", 2),
        ("DELETE FROM checkpoints", 0),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_skipped(
    tmp_path: Path, played: Swarm, monkeypatch: pytest.MonkeyPatch, damage: str, skipped: int
) -> None:
    journal, _ = journal_of(tmp_path, played, 5, monkeypatch)
    with journal._engine.begin() as connection:
        connection.execute(sa.text(damage))
    assert len(journal.checkpoints(RUN_ID)[1]) == skipped
    journal.close()
    assert read_back(tmp_path)[0] == machine.restore(machine.new_run(RUN_ID, played.settings), played.journal, 5)


def test_a_checkpoint_of_another_version_is_skipped(
    tmp_path: Path, played: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = journal_of(tmp_path, played, 5, monkeypatch)
    journal.close()
    monkeypatch.setattr(checkpoint, "VERSION", checkpoint.VERSION + 1)
    run, read = read_back(tmp_path)
    assert read == len(played.journal)
    assert run == machine.restore(machine.new_run(RUN_ID, played.settings), played.journal, 5)


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 100_000, b'{"version":1,"run":5}'])
def test_bytes_that_are_no_run(body: bytes) -> None:
    fresh = machine.new_run(RUN_ID, config())
    with pytest.raises(checkpoint.UnfitError):
        checkpoint.load(fresh, body)


def test_a_journal_that_lost_its_end_does_not_believe_a_checkpoint_of_it(
    tmp_path: Path, played: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = journal_of(tmp_path, played, 5, monkeypatch)
    kept, _ = journal.checkpoints(RUN_ID)
    with journal._engine.begin() as connection:
        connection.execute(sa.text(f"DELETE FROM records WHERE number >= {kept[-1].number + 1}"))
    assert [one.number for one in journal.checkpoints(RUN_ID)[0]] == [kept[-1].number]
    run = newest(journal, RUN_ID, log_pb2.Genesis.FromString(journal.runs()[0][1])).at(0)
    assert run.head_hash == kept[-1].head_hash
    # The next one that is kept goes before those of the records that are lost.
    body = checkpoint.dump(run)
    journal.keep(RUN_ID, Checkpoint(kept[-1].number, run.head_hash, body))
    assert [one.number for one in journal.checkpoints(RUN_ID)[0]] == [kept[-1].number]
    assert journal.checkpoints(RUN_ID)[1] == []
    journal.close()


def test_a_standby_reads_on_and_numbers_have_no_gaps(
    tmp_path: Path, played: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    genesis = log_pb2.Genesis(
        config_json=played.settings.canonical_json(), coordinator_public_key=COORDINATOR.public_key
    )
    monkeypatch.setattr(checkpoint, "CHECKPOINT_EVERY", 2)
    acting, standby = (Counting(Journal.sqlite_url(tmp_path), COORDINATOR) for _ in range(2))
    acting.create_run(RUN_ID, genesis)
    replay, folded = FoldedRuns(standby), Folded(genesis, machine.new_run(RUN_ID, played.settings))
    for count, record in enumerate(played.journal, 1):
        acting.append(RUN_ID, record)
        folded.append(record)
        if (due := folded.due()) is not None:
            acting.keep(RUN_ID, due)
            folded.kept_step = folded.at(0).head_step
        replay.catch_up()
        assert standby.read == count
        assert replay.runs()[0].at(7) == machine.restore(
            machine.new_run(RUN_ID, played.settings), played.journal[:count], 7
        )
    acting.close()
    standby.close()


# ---- what a checkpoint is made of ------------------------------------------------------------------------------------


def fields_of(kind: Any, seen: set[Any]) -> list[str]:
    """Every dataclass and enum that a run is made of, with its fields and their types."""
    if kind in seen:
        return []
    seen.add(kind)
    found: list[str] = []
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            found.append(f"{kind.__name__}.{field.name}: {field.type}")  # type: ignore[union-attr]
            found += fields_of(hints[field.name], seen)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        found += [f"{kind.__name__}: {member.value}" for member in kind]
    elif not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        for part in typing.get_args(kind):
            found += fields_of(part, seen)
    return found


def test_a_checkpoint_keeps_the_names_that_its_fields_always_had() -> None:
    swarm = Swarm(config(min_peers=3, steps=4).model_copy(update={"trust": TrustConfig(enabled=True)}), 4, seed=3)
    swarm.play(lambda: swarm.run.head_step == 2)
    between = next(
        run
        for cut in range(len(swarm.journal), 0, -1)
        if (run := machine.restore(fresh_of(swarm), swarm.journal[:cut], 0)).step is None and run.checks
    )
    written = dict(json.loads(checkpoint.dump(between))["run"]["map"])
    assert written["audits"]["map"]
    assert "checks" not in written
    assert checkpoint.load(fresh_of(swarm), checkpoint.dump(between)).checks == between.checks


def test_other_fields_need_a_word_about_old_checkpoints() -> None:
    """A field of a run is new or another one. If its default is what a fold of old records gives, the new fingerprint goes
    here and old checkpoints still count. Otherwise `checkpoint.VERSION` goes up, and the next start folds every record once."""
    found = hashlib.sha256("\n".join(sorted(fields_of(Run, set()))).encode()).hexdigest()[:16]
    assert (checkpoint.VERSION, found) == (3, FINGERPRINT), found


def test_a_checkpoint_from_before_the_life_of_a_run_still_counts(played: Swarm) -> None:
    """Its run was neither paused nor ended, because there was no way to do that."""
    fresh, cut = fresh_of(played), max(n for n, it in enumerate(played.journal, 1) if isinstance(it, EntryCommitted))
    run = machine.restore(fresh, played.journal[:cut], 0)
    values = json.loads(checkpoint.dump(run))
    fields = values["run"]["map"]
    later = [
        field
        for field in fields
        if field[0] in ("pause", "ended", "decay", "archived", "changes", "evaluations", "unlogged", "orders")
    ]
    assert len(later) == 8
    values["run"]["map"] = [field for field in fields if field not in later]
    assert checkpoint.load(fresh, json.dumps(values).encode()) == run


def test_a_checkpoint_from_before_owners_lost_their_keys_still_counts(played: Swarm) -> None:
    fresh, cut = fresh_of(played), max(n for n, it in enumerate(played.journal, 1) if isinstance(it, EntryCommitted))
    run = machine.restore(fresh, played.journal[:cut], 0)
    old = checkpoint.dump(run).replace(
        b'[["name",""]]', b'[["name",""],["public_key",{"bytes":""}],["signature",{"bytes":""}]]'
    )
    assert len(old) > len(checkpoint.dump(run))
    assert checkpoint.load(fresh, old) == run


# ---- in a coordinator that serves ------------------------------------------------------------------------------------


async def test_a_coordinator_keeps_checkpoints_and_goes_on_without_room_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHECKPOINT_EVERY", 2)
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        with here.journal._engine.begin() as connection:
            full = "CREATE TRIGGER full BEFORE INSERT ON checkpoints BEGIN SELECT RAISE(ABORT, 'disk full'); END"
            connection.execute(sa.text(full))
        for _ in range(2):
            await one_step(swarm)
        assert here.journal.checkpoints(here.invite.run_id) == ([], [])
        with here.journal._engine.begin() as connection:
            connection.execute(sa.text("DROP TRIGGER full"))
        await one_step(swarm)
        await eventually(lambda: here.journal.checkpoints(here.invite.run_id)[0])
        head = here.runtime.run.head_hash
    async with served(tmp_path, WAITS) as here:
        assert here.runtime.run.head_hash == head
        assert here.runtime._folded.kept_step == 3
