"""The life of a run, as its operator steers it: the rule, the journal, the service and the commands."""

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from coordinator import __main__ as command
from coordinator.clock.effects import (
    DecayStarted,
    EntryCommitted,
    NoticeKind,
    RunPaused,
    RunResumed,
    SendNotice,
    SendTick,
)
from coordinator.clock.events import (
    Connected,
    DecayAsked,
    Disconnected,
    EntriesReturned,
    FinishAsked,
    PauseAsked,
    Reported,
    ResumeAsked,
    TimerFired,
)
from coordinator.clock.state import Phase
from coordinator.commands import operator
from coordinator.store import home_files
from coordinator.store import journal as journal_module
from coordinator.store.checkpoint import FoldedRuns
from coordinator.store.home_files import KnownRuns
from coordinator.store.journal import Journal, JournalError
from protos.envelope import NO_RUN, Kind, seal
from protos.errors import NetworkError, OperatorError, Refusal, RefusedError
from protos.identity import Identity
from protos.log import lr_from_bits, run_id_of
from protos.optimizer_config import OptimizerConfig
from protos.orders import End, open_end, seal_end
from protos.run_config import RunConfig
from protos.run_facts import phase_word
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2
from tests.unit.coordinator.driver import RUN_ID, Harness, Swarm, config, joined, key, snapshot_at
from tests.unit.coordinator.serving import (
    COORDINATOR,
    LivePeer,
    Served,
    create_request,
    eventually,
    genesis_of,
    identity,
    operated,
    operator_stub,
    peers,
    served,
    tick_of,
)
from tests.unit.coordinator.test_machine import contribute, opened_together
from tests.unit.coordinator.test_peers import decide
from tests.unit.coordinator.test_service import WAITS, begin, one_step

WHY = "the data is wrong"
TOLD = f"the operator paused the run: {WHY}"


def notices(effects: list[Any]) -> list[tuple[NoticeKind, str]]:
    return [(effect.kind, effect.reason) for effect in effects if isinstance(effect, SendNotice)]


def ticks(effects: list[Any]) -> list[int]:
    return [effect.tick.step for effect in effects if isinstance(effect, SendTick)]


# ---- a pause, in the machine -----------------------------------------------------------------------------------------


def test_the_open_step_is_decided_and_no_further_one_opens_until_the_run_goes_on() -> None:
    harness = opened_together()
    assert notices(harness.feed(PauseAsked(WHY))) == [(NoticeKind.WAITING, TOLD)]
    assert harness.run.phase is Phase.OPEN
    assert harness.run.reason.startswith(f"{TOLD}; step 1 is decided first: ")
    contribute(harness, 0, 1, 2)
    assert (harness.run.phase, harness.run.head_step, harness.run.reason) == (Phase.WAITING, 1, TOLD)
    harness.feed(joined(7))
    assert notices(harness.feed(Connected(key(7)))) == [(NoticeKind.WAITING, TOLD)], "a late peer hears why, too"
    went_on = harness.feed(ResumeAsked())
    assert notices(went_on) == [(NoticeKind.WAITING, "the operator lets the run go on")]
    assert ticks(went_on) == [2]
    assert [type(record) for record in harness.journal if isinstance(record, RunPaused | RunResumed)] == [
        RunPaused,
        RunResumed,
    ]


def test_a_pause_survives_a_crash() -> None:
    harness = opened_together()
    contribute(harness, 0, 1, 2)
    harness.feed(PauseAsked(""))
    contribute(harness, 0, 1, 2)
    harness.restart()
    assert harness.run.pause == ""
    harness.comes(*range(3), at=2)
    assert (harness.run.phase, harness.run.reason) == (Phase.WAITING, "the operator paused the run")
    assert ticks(harness.feed(ResumeAsked())) == [3]


@pytest.mark.parametrize("strict", [False, True])
def test_a_step_that_cannot_be_decided_waits_for_the_end_of_the_pause(strict: bool) -> None:
    """Its deadline passes again and again without a payload, and members leave: it is not opened for others meanwhile."""
    harness = opened_together(strict=strict)
    harness.feed(PauseAsked(WHY))
    harness.feed(Disconnected(key(2), leaving=True))
    for _ in range(3):
        assert harness.timer is not None
        harness.now = harness.timer
        again = harness.feed(TimerFired())
        assert harness.run.phase is Phase.OPEN
        assert ticks(again) == ([1] if strict else []), "a strict step asks its own roster again"
        assert harness.run.reason.startswith(TOLD)
    assert len(harness.ticks) == 1
    assert ticks(harness.feed(ResumeAsked())) == [1]
    if strict:
        return
    assert harness.ticks[1].attempt == 2
    assert key(2) not in harness.ticks[1].places


def test_what_is_refused() -> None:
    harness = opened_together(steps=1)

    def no(event: Any) -> str:
        before = len(harness.journal)
        harness.feed(event)
        assert len(harness.journal) == before
        return harness.refusals[-1]

    assert no(ResumeAsked()) == "the run is not paused"
    harness.feed(PauseAsked(WHY))
    assert no(PauseAsked("again")) == f"the run is paused already: {TOLD}"
    contribute(harness, 0, 1, 2)
    assert harness.run.phase is Phase.FINISHED, "the last step was open"
    assert "finished" in no(ResumeAsked())
    assert "finished" in no(PauseAsked(""))


# ---- the service and the commands ------------------------------------------------------------------------------------


def phase_of(here: Any) -> dict[str, float]:
    name = here.invite.run_id.hex()[:16]
    words = ("waiting", "open", "paused", "finished")
    found = {
        word: here.hub.metrics.registry.get_sample_value("swarmentum_run_phase", {"run": name, "phase": word})
        for word in words
    }
    return {word: value for word, value in found.items() if value}


async def test_from_the_command_to_the_peers_and_over_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        with operated(here, "run") as run:
            await begin(here, swarm)
            for bad in ("a\nb", "x" * 257, "\u202e"):
                with pytest.raises(RefusedError, match="the reason takes 0 to 256 bytes, printable"):
                    await run("pause", WAITS.name, "--reason", bad)
            [done] = await run("pause", WAITS.name, "--reason", WHY)
            assert done == {"run": here.invite.run_id.hex(), "name": WAITS.name, "paused": True, "reason": WHY}
            assert phase_of(here) == {"open": 1}
            await one_step(swarm)
            for peer in swarm:
                assert (await peer.until("notice")).notice.kind == pb.NoticeKind.NOTICE_KIND_WAITING
            facts, _ = await swarm[0].client.get_run()
            assert (phase_word(facts), facts.reason, facts.head_step) == ("paused", TOLD, 1)
            assert phase_of(here) == {"paused": 1}
            [row] = await run("list")
            assert (row["phase"], row["reason"], len(row["peers"])) == ("paused", TOLD, 2), "the peers stay"
            with pytest.raises(RefusedError, match=f"paused already: {TOLD}"):
                await run("pause", WAITS.name)
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        with operated(here, "run") as run:
            for peer in swarm:
                first = await peer.join(from_step=1)
                assert (first.notice.kind, first.notice.reason) == (pb.NoticeKind.NOTICE_KIND_WAITING, TOLD)
                await peer.ready(1)
            assert (await run("list"))[0]["phase"] == "paused"
            [done] = await run("resume", WAITS.name)
            assert done["paused"] is False
            assert [tick_of(await peer.until("tick")).step for peer in swarm] == [2, 2]
            with pytest.raises(RefusedError, match="not paused"):
                await run("resume", WAITS.name)


async def test_only_the_operator_steers_and_no_other_request_passes_as_this_one(tmp_path: Path) -> None:
    async with served(tmp_path, config()) as here, here.channel() as channel:
        stub, run_id = operator_stub(channel), here.invite.run_id

        def sealed(by: Identity, nonce: bytes, change: int = 1) -> pb.SteerRunRequest:
            body = pb.SteerRunBody(run_id=run_id, nonce=nonce, change=change)  # type: ignore[arg-type]
            return pb.SteerRunRequest(envelope=seal(by, Kind.KIND_ADMIN, NO_RUN, body))

        for request, reason in (
            (sealed(identity(0), b"a" * 16), "unknown_signer"),
            (sealed(COORDINATOR, b"short"), "malformed"),
            (sealed(COORDINATOR, b"b" * 16, 0), "change 0"),
            (sealed(COORDINATOR, b"c" * 16, 99), "change 99"),
        ):
            with pytest.raises(grpc.RpcError, match=reason):
                await stub.SteerRun(request)
        listed = seal(COORDINATOR, Kind.KIND_ADMIN, NO_RUN, pb.ListTicketsBody(run_id=run_id, nonce=b"d" * 16))
        with pytest.raises(grpc.RpcError, match="change 0"):
            await stub.SteerRun(pb.SteerRunRequest(envelope=listed))
        captured = sealed(COORDINATOR, b"e" * 16).envelope
        with pytest.raises(grpc.RpcError, match="malformed"):
            await stub.ListTickets(pb.ListTicketsRequest(envelope=captured))
        assert not here.runtime.run.is_paused
        await stub.SteerRun(sealed(COORDINATOR, b"f" * 16))
        assert here.runtime.run.is_paused
        with pytest.raises(grpc.RpcError, match="replayed"):
            await stub.SteerRun(sealed(COORDINATOR, b"f" * 16))


# ---- the end ---------------------------------------------------------------------------------------------------------

ENOUGH = "the loss is good enough"
OVER = f"the operator ended the run at step 1: {ENOUGH}"


def ended_run() -> Harness:
    """After one step, with the second one open; the end is told, and nobody has stored the last state."""
    harness = opened_together()
    contribute(harness, 0, 1, 2)
    assert harness.run.phase is Phase.OPEN
    assert notices(harness.feed(FinishAsked(ENOUGH))) == [(NoticeKind.WAITING, OVER)]
    return harness


def test_the_run_ends_at_its_newest_entry_and_waits_until_its_peers_have_stored_the_state() -> None:
    harness = ended_run()
    assert (harness.run.phase, harness.run.last_step, harness.run.step) == (Phase.FINISHED, 1, None)
    assert harness.run.ended == End(1, harness.run.head_hash, ENOUGH)
    harness.applies(1, *range(3))
    assert harness.run.reason == f"{OVER}; 3 peers are still storing its state"
    told = [harness.feed(Reported(key(n), snapshots=(snapshot_at(1),))) for n in range(3)]
    assert harness.run.snapshot == snapshot_at(1), "no multiple of snapshot_every, but the last state"
    assert [notices(effects)[-1:] for effects in told[:1]] == [[]]
    assert notices(told[2]) == [(NoticeKind.FINISHED, OVER)]
    harness.feed(joined(7))
    assert notices(harness.feed(Connected(key(7)))) == [(NoticeKind.FINISHED, OVER)], "a late joiner can load it"


def test_an_end_is_told_though_somebody_never_stores_the_state_and_survives_a_crash() -> None:
    harness = ended_run()
    harness.restart()
    assert (harness.run.phase, harness.run.ended) == (Phase.FINISHED, End(1, harness.run.head_hash, ENOUGH))
    assert harness.timer is not None
    harness.now = harness.timer
    assert notices(harness.feed(TimerFired())) == [(NoticeKind.FINISHED, OVER)]
    assert "finished" in refused(harness, FinishAsked(""))
    assert "finished" in refused(harness, ResumeAsked())


def test_a_run_may_end_in_a_pause_and_before_its_first_step() -> None:
    harness = Harness(config())
    harness.feed(PauseAsked(WHY))
    harness.feed(FinishAsked(""))
    assert harness.run.ended == End(0, harness.run_id)
    assert not harness.run.is_paused


def test_no_end_while_a_longer_log_may_come_back_and_no_entry_after_the_end() -> None:
    harness = opened_together()
    contribute(harness, 0, 1, 2)
    longer = list(harness.journal)
    contribute(harness, 0, 1, 2)
    [lost] = [record for record in harness.journal if isinstance(record, EntryCommitted) and record.entry.step == 2]
    short = Harness(harness.settings)
    short.load(longer)
    short.run = replace(short.run, lost_until=2)
    assert "waiting for a peer that gives back entries 2 to 2" in refused(short, FinishAsked(""))
    short.run = replace(short.run, lost_until=0)
    short.feed(FinishAsked(""))
    short.comes(1)
    assert refused(short, EntriesReturned(key(1), (lost,), 2)).endswith("no entry follows it")
    assert short.run.head_step == 1


def refused(harness: Harness, event: Any) -> str:
    before = len(harness.journal)
    harness.feed(event)
    assert len(harness.journal) == before
    return harness.refusals[-1]


async def test_peers_get_the_signed_end_at_once_and_after_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        with operated(here, "run") as run:
            await begin(here, swarm)
            await one_step(swarm)
            [done] = await run("finish", WAITS.name, "--reason", ENOUGH)
            assert (done["finished"], done["step"]) == (True, 1)
            notice = (await swarm[0].until("notice")).notice
            end = open_end(
                notice.end.SerializeToString(), run_id=here.invite.run_id, coordinator=COORDINATOR.public_key
            )
            facts, _ = await swarm[0].client.get_run()
            assert end == End(1, facts.head_hash, ENOUGH)
            assert facts.end == notice.end
            assert (facts.total_steps, phase_word(facts)) == (1, "finished")
            assert not [row for row in await run("list") if row["steps"] != 1]
            with pytest.raises(RefusedError, match="finished"):
                await run("finish", WAITS.name)
    async with served(tmp_path, WAITS) as again, peers(again, 1) as [late]:
        first = await late.join(from_step=1)
        assert first.notice.end == notice.end, "the same bytes"


def test_an_end_of_another_run_or_signer_or_with_a_reason_that_is_no_text_does_not_pass() -> None:
    run_id, good = bytes([5]) * 32, End(3, bytes(32), ENOUGH)
    sealed = seal_end(COORDINATOR, run_id, good)

    def opens(envelope: Any, run: bytes = run_id) -> End:
        return open_end(envelope.SerializeToString(), run_id=run, coordinator=COORDINATOR.public_key)

    assert opens(sealed) == good
    for bad, words in (
        (seal_end(identity(0), run_id, good), "unknown_signer"),
        (seal_end(COORDINATOR, run_id, replace(good, entry_hash=b"short")), "out_of_range"),
        (seal_end(COORDINATOR, run_id, replace(good, step=1 << 41)), "out_of_range"),
        (seal_end(COORDINATOR, run_id, replace(good, reason="a\nb")), "out_of_range"),
        (seal_end(COORDINATOR, run_id, replace(good, reason="x" * 257)), "out_of_range"),
    ):
        with pytest.raises(Refusal, match=words):
            opens(bad)
    with pytest.raises(Refusal, match="wrong_run"):
        opens(sealed, bytes(32))


# ---- archived and deleted --------------------------------------------------------------------------------------------

ONE_STEP = config(min_peers=2, steps=1)


async def finished(here: Served, swarm: list[LivePeer]) -> None:
    await begin(here, swarm)
    await one_step(swarm)
    await eventually(lambda: here.runtime.run.finished_told)


async def test_a_finished_run_is_archived_served_no_more_and_taken_out_again(tmp_path: Path) -> None:
    async with served(tmp_path, ONE_STEP) as here, peers(here, 2) as swarm:
        with operated(here, "run") as run:
            with pytest.raises(RefusedError, match="not finished: `run finish` ends it"):
                await run("archive", ONE_STEP.name)
            await finished(here, swarm)
            with pytest.raises(RefusedError, match="is not archived"):
                await run("archive", ONE_STEP.name, "--undo")
            [done] = await run("archive", ONE_STEP.name)
            assert done == {"run": here.invite.run_id.hex(), "name": ONE_STEP.name, "archived": True}
            with pytest.raises((StopAsyncIteration, NetworkError, RefusedError)):
                await swarm[0].until("no such event")
            with pytest.raises(RefusedError, match="its operator has archived it"):
                await swarm[0].client.get_run()
            assert await run("list") == []
            assert [row["phase"] for row in await run("list", "--all")] == ["archived"]
            assert phase_of(here) == {}, "no figures of it"
            records = list(here.journal.records(here.invite.run_id))
    async with served(tmp_path, ONE_STEP) as here, peers(here, 1) as [late]:
        with pytest.raises(RefusedError, match="its operator has archived it"):
            await late.join(from_step=1)
        with operated(here, "run") as run:
            with pytest.raises(RefusedError, match="archived already"):
                await run("archive", ONE_STEP.name)
            assert list(here.journal.records(here.invite.run_id)) == records, "the journal stays"
            await run("archive", ONE_STEP.name, "--undo")
            assert [row["phase"] for row in await run("list")] == ["finished"]
            await late.join(from_step=1)


def rows(here: Served) -> list[int]:
    with here.journal._engine.connect() as connection:
        tables = "records", "checkpoints", "runs", "deleted_runs"
        return [connection.execute(sa.text(f"SELECT count(*) FROM {name}")).scalar_one() for name in tables]


async def test_a_name_that_begins_an_id_means_neither_run(tmp_path: Path) -> None:
    """Another run, whose id began with the name `1b`, was finished or deleted; an empty name meant the only run."""
    async with served(tmp_path, ONE_STEP) as here:
        with operated(here, "run") as run:
            first = here.invite.run_id.hex()
            with pytest.raises(AssertionError, match="Nothing is given after pause"):
                await run("pause", "")
            with pytest.raises(OperatorError, match="0 runs are called ' '"):
                await run("pause", " ")
            named = await operator_stub_create(here, ONE_STEP.model_copy(update={"name": first[:2]}))
            for command in ("pause", "finish"):
                with pytest.raises(OperatorError, match=rf"2 runs are called '{first[:2]}': .*\({first[:16]}\)"):
                    await run(command, first[:2])
            with pytest.raises(
                OperatorError, match=rf"this coordinator has: {ONE_STEP.name} \({first[:16]}\), {first[:2]} \("
            ):
                await run("pause", ONE_STEP.name.upper())
            await run("pause", named.hex()[:16])
            await run("pause", first)
            assert all(it.run.is_paused for it in here.hub.runs.values())


async def test_a_deleted_run_leaves_the_journal_and_its_id_is_never_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "PURGED_ROWS", 2)
    async with served(tmp_path, ONE_STEP) as here, peers(here, 2) as swarm:
        with operated(here, "run") as run:
            with pytest.raises(RefusedError, match="not finished"):
                await run("delete", ONE_STEP.name, "--yes")
            await finished(here, swarm)
            other = await operator_stub_create(here, ONE_STEP.model_copy(update={"name": "another"}))
            with pytest.raises(OperatorError, match="give --yes"):
                await run("delete", ONE_STEP.name)
            assert rows(here)[:1] == [3], "more than one purge deletes"
            [done] = await run("delete", ONE_STEP.name, "--yes")
            assert done["deleted"] is True
            await eventually(lambda: rows(here) == [0, 0, 1, 1])
            with pytest.raises(RefusedError, match="was deleted by its operator"):
                await swarm[0].client.get_run()
            with pytest.raises(OperatorError, match="0 runs are called"):
                await run("delete", ONE_STEP.name, "--yes")
            assert [row["run"] for row in await run("list", "--all")] == [other.hex()]
            assert phase_of(here) == {}
            async with here.channel() as channel:
                await _created_again(here, channel)


async def test_a_run_is_made_or_deleted_though_its_operator_hung_up_or_the_disk_takes_no_note(tmp_path: Path) -> None:
    """It was in the journal, and neither served nor listed before the next start: a second one got its name."""
    made, late = (genesis_of(ONE_STEP.model_copy(update={"name": name})) for name in ("made", "late"))
    async with served(tmp_path, ONE_STEP) as here:
        hub, known, begun = here.hub, KnownRuns(tmp_path), here.invite.run_id
        hub.noted, path = known.add, tmp_path / home_files.NAME
        in_the_way = path.with_name(f".{path.name}.new")
        in_the_way.mkdir()
        with closing(sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            calls = [asyncio.ensure_future(it) for it in (hub.create_run(made), hub.delete_run(begun))]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            other.execute("ROLLBACK")
            await eventually(lambda: hub.runs.keys() == {run_id_of(made)} and hub.deleted == {begun})
            in_the_way.rmdir()
            other.execute("BEGIN IMMEDIATE")
            call = asyncio.ensure_future(hub.create_run(late))
            await asyncio.sleep(0)
            hub.stand_by("another acts")
            with pytest.raises(JournalError, match="another coordinator acts"):  # its journal may never answer
                await call
            other.execute("ROLLBACK")
        known.add(run_id_of(late), "late")
        assert json.loads(path.read_text()).keys() == {run_id_of(made).hex(), run_id_of(late).hex()}


async def operator_stub_create(here: Served, settings: RunConfig) -> bytes:
    async with here.channel() as channel:
        return run_id_of((await operator_stub(channel).CreateRun(create_request(settings))).genesis)


async def _created_again(here: Served, channel: Any) -> None:
    """The request that made the run, captured and played again after a restart forgot its nonce: refused for ever."""
    request = create_request(ONE_STEP.model_copy(update={"name": "third"}))
    made = run_id_of((await operator_stub(channel).CreateRun(request)).genesis)
    here.hub.runs[made].run = replace(here.hub.runs[made].run, phase=Phase.FINISHED, finished_told=True)
    await here.hub.delete_run(made)
    with pytest.raises(grpc.RpcError, match="replayed"):
        await operator_stub(channel).CreateRun(request)


async def test_a_restart_goes_on_with_deleting_and_gives_the_room_back(tmp_path: Path) -> None:
    swarm = Swarm(config(min_peers=2, steps=60, snapshot_every=10), 3)
    swarm.finish()
    journal = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    genesis = log_pb2.Genesis(config_json=ONE_STEP.canonical_json(), coordinator_public_key=COORDINATOR.public_key)
    journal.create_run(RUN_ID, genesis)
    for record in swarm.journal:
        journal.append(RUN_ID, record)
    journal.delete_run(RUN_ID)  # and then kill -9
    assert journal.runs() == []
    journal.close()
    async with served(tmp_path, ONE_STEP) as here:
        await eventually(lambda: rows(here) == [0, 0, 1, 1])
        with pytest.raises(JournalError, match="UNIQUE"):
            here.journal.delete_run(RUN_ID)
    file, before = tmp_path / "journal.sqlite3", (tmp_path / "journal.sqlite3").stat().st_size
    journal = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    assert journal.shrink()
    assert not journal.shrink(), "nothing is left to give back"
    assert journal.deleted() == [RUN_ID]
    journal.close()
    assert file.stat().st_size < before / 2


def test_a_standby_knows_a_pause_and_forgets_a_run_that_was_deleted_meanwhile(tmp_path: Path) -> None:
    journal = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    genesis = log_pb2.Genesis(config_json=ONE_STEP.canonical_json(), coordinator_public_key=COORDINATOR.public_key)
    journal.create_run(RUN_ID, genesis)
    folds = FoldedRuns(journal)
    folds.catch_up()
    journal.append(RUN_ID, RunPaused(WHY))
    folds.catch_up()
    assert [(folded.run.run_id, folded.resumed(0).pause) for folded in folds.runs()] == [(RUN_ID, WHY)]
    journal.delete_run(RUN_ID)
    folds.catch_up()
    assert folds.runs() == []
    journal.close()


def test_delete_asks_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = pb.GetRunResponse(genesis=log_pb2.Genesis(config_json=ONE_STEP.canonical_json()), head_step=7)
    asked: list[pb.RunChange] = []

    class Told:
        def __init__(self, home: Path) -> None: ...

        def find(self, run: str) -> pb.GetRunResponse:
            return told

        def steer(self, genesis: log_pb2.Genesis, change: pb.RunChange, reason: str = "") -> None:
            asked.append(change)

    monkeypatch.setattr(operator, "Operator", Told)
    command_line = ["run", "delete", "swarm", "--home", str(tmp_path)]
    no = CliRunner().invoke(command.app, command_line, input="n\n")
    assert (no.exit_code, asked) == (1, [])
    assert "and its log of 7 steps will be gone for ever. Delete it?" in no.output
    yes = CliRunner().invoke(command.app, command_line, input="y\n")
    assert (yes.exit_code, asked) == (0, [pb.RunChange.RUN_CHANGE_DELETE])
    assert "is deleted" in yes.output


# ---- a decay by hand -------------------------------------------------------------------------------------------------


def stable(schedule: str = "wsd", **clock: Any) -> Harness:
    """Three peers in the first step of a run whose rate stays, without a warm-up."""
    optimizer = OptimizerConfig(lr=1e-2, schedule=schedule, warmup_steps=0, lr_final_ratio=0.0)  # type: ignore[arg-type]
    return opened_together(optimizer=optimizer, **clock)


def rates(harness: Harness) -> list[float]:
    return [entry.lr for entry in harness.entries]


def test_the_rate_decays_from_the_next_tick_on_and_the_run_ends_with_it() -> None:
    harness = stable()
    harness.feed(DecayAsked(4))
    assert harness.run.decay == DecayStarted(1, 4), "the open step has its rate in its tick"
    assert harness.run.steps == 5
    for _ in range(3):
        decide(harness, 0, 1, 2)
    harness.restart()
    harness.comes(*range(3), at=harness.run.head_step)
    for _ in range(2):
        decide(harness, 0, 1, 2)
    assert rates(harness) == pytest.approx([1e-2, 5e-3, 1e-2 * (1 - 0.5**0.5), 1e-2 * (1 - 0.75**0.5), 0.0])
    assert harness.run.ended == End(5, harness.run.head_hash, "its learning rate has decayed")
    assert harness.run.phase is Phase.FINISHED


def test_a_decay_that_makes_no_sense_is_refused() -> None:
    assert "schedule is cosine, which decays by itself" in refused(opened_together(), DecayAsked(1))
    harness = stable("constant", steps=10)
    assert "ends after the run's last step 10; take fewer steps" in refused(harness, DecayAsked(10))
    harness.feed(DecayAsked(9))
    assert "decays since step 1, and the run ends at step 10" in refused(harness, DecayAsked(1))
    late = stable(steps=5)
    for _ in range(4):
        decide(late, 0, 1, 2)
    assert "decays since step 4, as the run's settings say" in refused(late, DecayAsked(1))
    warm = opened_together(optimizer=OptimizerConfig(schedule="constant", warmup_steps=5))
    assert "step 1 is in the warm-up of 5 steps" in refused(warm, DecayAsked(1))


async def test_a_decay_from_the_command_to_the_ticks(tmp_path: Path) -> None:
    settings = WAITS.model_copy(
        update={"optimizer": OptimizerConfig(lr=1e-2, schedule="wsd", warmup_steps=0, lr_final_ratio=0.0)}
    )
    async with served(tmp_path, settings) as here, peers(here, 2) as swarm:
        with operated(here, "run") as run:
            await begin(here, swarm)
            [done] = await run("decay", settings.name, "--steps", "2")
            assert (done["steps"], done["last_step"]) == (2, 3)
            with pytest.raises(RefusedError, match="decays since step 1"):
                await run("decay", settings.name, "--steps", "1")
            heard = [(await one_step(swarm))[0].entry for _ in range(3)]
            entries = [log_pb2.LogEntry.FromString(entry.body) for entry in heard]
            assert [lr_from_bits(entry.lr_bits) for entry in entries] == pytest.approx([1e-2, 1e-2 * (1 - 0.5**0.5), 0])
            facts, _ = await swarm[0].client.get_run()
            assert (phase_word(facts), facts.head_step, facts.total_steps) == ("finished", 3, 3)
            assert facts.HasField("end")
